"""Random valid compute orders on random placements, for property tests."""

import random

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement, Schedule


def random_placement(rng: random.Random, max_ranks: int = 4, max_chunks: int = 3) -> Placement:
    """Any map of stages to ranks and chunks."""
    p, v = rng.randint(1, max_ranks), rng.randint(1, max_chunks)
    places = [(rank, chunk) for rank in range(p) for chunk in range(v)]
    rng.shuffle(places)
    return Placement(name="random", stages=tuple(places))


def random_schedule(rng: random.Random, placement: Placement, num_microbatches: int) -> Schedule:
    """Run a random op that can run, until all have: every valid order has a chance."""
    last = placement.num_stages - 1
    done: set[Op] = set()
    ranks: list[list[Op]] = [[] for _ in range(placement.pp_size)]
    joint = {stage: rng.random() < 0.4 for stage in range(last + 1)}
    left = {
        Op(kind, stage, placement.chunk_of(stage), microbatch)
        for stage in range(last + 1)
        for microbatch in range(num_microbatches)
        for kind in ((OpKind.F, OpKind.BW) if joint[stage] else (OpKind.F, OpKind.B, OpKind.W))
    }

    def has_run(kinds: tuple[OpKind, ...], stage: int, microbatch: int) -> bool:
        return any(Op(kind, stage, placement.chunk_of(stage), microbatch) in done for kind in kinds)

    def can_run(op: Op) -> bool:
        in_order = op.microbatch == 0 or has_run((op.kind,), op.stage, op.microbatch - 1)
        if op.kind == OpKind.F:
            return in_order and (op.stage == 0 or has_run((OpKind.F,), op.stage - 1, op.microbatch))
        if op.kind == OpKind.W:
            return in_order and has_run((OpKind.B,), op.stage, op.microbatch)
        gradient = op.stage == last or has_run((OpKind.B, OpKind.BW), op.stage + 1, op.microbatch)
        return in_order and gradient and has_run((OpKind.F,), op.stage, op.microbatch)

    while left:
        op = rng.choice(sorted(filter(can_run, left)))
        left.remove(op)
        done.add(op)
        ranks[placement.rank_of(op.stage)].append(op)
    return Schedule(
        name="random", placement=placement, num_microbatches=num_microbatches, ranks=tuple(map(tuple, ranks))
    )


def random_costs(rng: random.Random, placement: Placement) -> CostModel:
    """Times a stage and latencies a pair of ranks; some are 0."""

    def times(size: int) -> tuple[float, ...]:
        return tuple(float(rng.choice((0, 1, 1, 2, 3, 7))) for _ in range(size))

    n = placement.num_stages
    return CostModel(
        f=times(n), b=times(n), w=times(n), r=times(n), memory_b=times(n), memory_w=times(n),
        comm=tuple(times(placement.pp_size) for _ in range(placement.pp_size)),
    )  # fmt: skip
