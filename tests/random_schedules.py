"""Random valid compute orders on random placements, for property tests."""

import random

from megatron.pipeline_parallel.planning.costs import CostModel, Link
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement, Schedule


def random_placement(rng: random.Random, max_ranks: int = 4, max_chunks: int = 3) -> Placement:
    """Any map of stages to ranks and chunks."""
    p, v = rng.randint(1, max_ranks), rng.randint(1, max_chunks)
    places = [(rank, chunk) for rank in range(p) for chunk in range(v)]
    rng.shuffle(places)
    return Placement(name="random", stages=tuple(places))


def random_schedule(
    rng: random.Random, placement: Placement, num_microbatches: int, num_sequence_splits: int = 1
) -> Schedule:
    """Run a random op that can run, until all have: every valid order has a chance."""
    last, splits = placement.num_stages - 1, num_sequence_splits
    done: set[Op] = set()
    ranks: list[list[Op]] = [[] for _ in range(placement.pp_size)]
    joint = {stage: rng.random() < 0.4 for stage in range(last + 1)}
    left = {
        Op(kind, stage, placement.chunk_of(stage), microbatch, split)
        for stage in range(last + 1)
        for microbatch in range(num_microbatches)
        for split in range(splits)
        for kind in ((OpKind.F, OpKind.BW) if joint[stage] else (OpKind.F, OpKind.B, OpKind.W))
    }

    def has_run(kinds: tuple[OpKind, ...], stage: int, microbatch: int, split: int) -> bool:
        return any(Op(kind, stage, placement.chunk_of(stage), microbatch, split) in done for kind in kinds)

    def in_order(op: Op) -> bool:
        """Whether its stage has run this kind of op on what comes before; any split of a microbatch may have its W first."""
        before = op.microbatch - 1
        if op.kind == OpKind.W:
            return before < 0 or all(has_run((op.kind,), op.stage, before, split) for split in range(splits))
        first, step = (0, 1) if op.kind == OpKind.F else (splits - 1, -1)
        if op.sequence_split != first:
            return has_run((op.kind,), op.stage, op.microbatch, op.sequence_split - step)
        return before < 0 or has_run((op.kind,), op.stage, before, splits - 1 - first)

    def can_run(op: Op) -> bool:
        unit = (op.microbatch, op.sequence_split)
        if op.kind == OpKind.F:
            return in_order(op) and (op.stage == 0 or has_run((OpKind.F,), op.stage - 1, *unit))
        if op.kind == OpKind.W:
            return in_order(op) and has_run((OpKind.B,), op.stage, *unit)
        gradient = op.stage == last or has_run((OpKind.B, OpKind.BW), op.stage + 1, *unit)
        return in_order(op) and gradient and has_run((OpKind.F,), op.stage, *unit)

    while left:
        op = rng.choice(sorted(filter(can_run, left)))
        left.remove(op)
        done.add(op)
        ranks[placement.rank_of(op.stage)].append(op)
    return Schedule(
        name="random",
        placement=placement,
        num_microbatches=num_microbatches,
        num_sequence_splits=splits,
        ranks=tuple(map(tuple, ranks)),
    )


def random_offload(rng: random.Random, schedule: Schedule, share: float = 0.5) -> Schedule:
    """Offload about `share` of the activations, each of the five ops anywhere that the life of an activation allows."""
    return schedule.with_ranks(_offloaded(rng, ops, share) for ops in schedule.ranks)


def _offloaded(rng: random.Random, ops: tuple[Op, ...], share: float) -> list[Op]:
    at = {(op.kind, op.unit): position for position, op in enumerate(ops)}
    added: list[tuple[int, float, int, Op]] = []
    for forward in [op for op in ops if op.kind == OpKind.F and rng.random() < share]:
        kinds = [kind for kind in (OpKind.B, OpKind.W, OpKind.BW) if (kind, forward.unit) in at]
        backward = [at[kind, forward.unit] for kind in kinds]
        gaps = sorted(rng.randint(at[OpKind.F, forward.unit] + 1, min(backward)) for _ in range(4))
        gaps.append(rng.randint(max(backward) + 1, len(ops)))
        tie = rng.random()
        added += [(gap, tie, step, forward._replace(kind=kind)) for step, (gap, kind) in enumerate(zip(gaps, LIFE))]
    program = []
    for position in range(len(ops) + 1):
        program += [op for *_, op in sorted(entry for entry in added if entry[0] == position)]
        program += ops[position : position + 1]
    return program


LIFE = (
    OpKind.OFFLOAD_SEND_START,
    OpKind.OFFLOAD_SEND_END,
    OpKind.OFFLOAD_RECV_PREP,
    OpKind.OFFLOAD_RECV_START,
    OpKind.OFFLOAD_RECV_END,
)


def random_links(rng: random.Random, pp_size: int) -> tuple[Link, ...]:
    """Some ranks in groups that share a link, the others without."""
    ranks = list(range(pp_size))
    rng.shuffle(ranks)
    links = []
    while ranks and rng.random() < 0.8:
        size = rng.randint(1, len(ranks))
        links.append(
            Link(
                ranks=tuple(ranks[:size]),
                duplex=rng.choice(("half", "full")),
                shared_factor=rng.choice((1.0, 1.5, 2.0)),
            )
        )
        ranks = ranks[size:]
    return tuple(links)


def random_costs(rng: random.Random, placement: Placement) -> CostModel:
    """Times a stage and latencies a pair of ranks; some are 0."""

    def times(size: int) -> tuple[float, ...]:
        return tuple(float(rng.choice((0, 1, 1, 2, 3, 7))) for _ in range(size))

    n = placement.num_stages
    return CostModel(
        d2h=times(n), h2d=times(n), message=times(n),
        f=times(n), b=times(n), w=times(n), r=times(n), memory_b=times(n), memory_w=times(n),
        comm=tuple(times(placement.pp_size) for _ in range(placement.pp_size)),
    )  # fmt: skip
