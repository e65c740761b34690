"""Several chunks a rank in a loop: interleaved 1F1B, and the interleaved schedules made for offload: GIS, GIS-H, PO.

p ranks, m microbatches, v chunks a rank, rank i from 0. Microbatches go through the chunks in groups of g: the whole group
through chunk 0, then through chunk 1, and so on. Where g does not divide m, the order is made for the next multiple, and the
microbatches that do not exist are left out of it: what remains runs whenever the whole does. The figures show p=4, m=4 and v=2 with
F = B = W; a BW takes two columns, a and b are the chunks.
"""

from math import ceil

from megatron.pipeline_parallel.planning.builders.registry import Orders, Problem, chunks, in_turn, schedule
from megatron.pipeline_parallel.planning.op import Op, OpKind


def _in_groups(problem: Problem, rank: int, group: int) -> tuple[list[Op], list[Op]]:
    """F and B of one rank in the order of a schedule with groups; the microbatches go up to the next multiple of `group`."""
    stages = problem.placement.stages_of(rank)
    forwards: list[Op] = []
    backwards: list[Op] = []
    for first in range(0, problem.num_microbatches, group):
        members = range(first, first + group)
        forwards += [Op(OpKind.F, stage, chunk, k) for chunk, stage in enumerate(stages) for k in members]
        backwards += [
            Op(OpKind.B, stage, chunk, k) for chunk, stage in reversed(list(enumerate(stages))) for k in members
        ]
    return forwards, backwards


def _that_exist(ops: list[Op], problem: Problem) -> list[Op]:
    return [op for op in ops if op.microbatch < problem.num_microbatches]


@schedule(
    "interleaved-1f1b", "Megatron's virtual pipeline: 1/v of the bubble of 1F1B, more memory and messages", chunks(2)
)
def interleaved_1f1b(problem: Problem) -> Orders:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2). Peak min(m, p + (p-1)/v); bubble (p-1)(T_F + T_B + T_W) / v.

    With one chunk it is 1F1B.

    rank 0  F0aF1aF2aF3aF0bF1bF2bF3b                  BW0b     BW1b     BW2b     BW3b  BW0a  BW1a  BW2a  BW3a
    rank 1     F0aF1aF2aF3aF0bF1bF2bF3b         BW0b     BW1b     BW2b     BW3b  BW0a  BW1a  BW2a  BW3a
    rank 2        F0aF1aF2aF3aF0bF1bF2b   BW0b  F3bBW1b     BW2b     BW3b  BW0a  BW1a  BW2a  BW3a
    rank 3           F0aF1aF2aF3aF0bBW0b  F1bBW1b  F2bBW2b  F3bBW3b  BW0a  BW1a  BW2a  BW3a
    """
    p, v = problem.pp_size, problem.chunks_per_rank
    orders = []
    for rank in range(p):
        forwards, backwards = _in_groups(problem, rank, p)
        backwards = [op._replace(kind=OpKind.BW) for op in backwards]
        warmup = (p - rank - 1) * (2 if v > 1 else 1) + (v - 1) * p
        orders.append(_that_exist(in_turn(forwards, backwards, warmup), problem))
    return orders


@schedule("gis", "interleaved with split backward: the peak of 1F1B, for offload", chunks(2))
def gis(problem: Problem) -> Orders:
    """Generalised interleaved schedule (arXiv 2503.01328, section 4). Peak min(m, p); bubble (p-1)(T_F + T_B) / v.

    rank 0  F0aF1aF2aF3aF0bF1bF2bF3b         B0bW0b   B1bW1b   B2bW2b   B3bW3bB0aW0aB1aW1aB2aW2aB3aW3a
    rank 1     F0aF1aF2aF3aF0bF1bF2b      B0bW0bF3bB1bW1b   B2bW2b   B3bW3bB0aW0aB1aW1aB2aW2aB3aW3a
    rank 2        F0aF1aF2aF3aF0bF1b   B0bW0bF2bB1bW1bF3bB2bW2b   B3bW3bB0aW0aB1aW1aB2aW2aB3aW3a
    rank 3           F0aF1aF2aF3aF0bB0bW0bF1bB1bW1bF2bB2bW2bF3bB3bW3bB0aW0aB1aW1aB2aW2aB3aW3a
    """
    return _gis(problem, problem.pp_size)


@schedule(
    "gis-h", "gis in smaller groups: down to half of its memory for a little more bubble", chunks(2), {"group_size"}
)
def gis_h(problem: Problem) -> Orders:
    """GIS-H (arXiv 2503.01328, section 4) in groups of g, by default ceil(p/2).

    Peak (g(v-1) + p) / v; its bubble is that of gis and, for g <= p, (p-g)(v-1) chunk times. Raises ValueError below ceil(p/2): a
    smaller group is back on a rank before it is needed again, so that there is a bubble in every period, and from 5 ranks on
    orders that never end.

    rank 0  F0aF1a      F0bF1bF2aF3a         B0bW0b   F2bB1bW1bF3bB0aW0aB1aW1a   B2bW2b   B3bW3bB2aW2aB3aW3a
    rank 1     F0aF1a      F0bF1bF2a      B0bW0bF3aB1bW1bF2bB0aW0aF3bB1aW1a   B2bW2b   B3bW3bB2aW2aB3aW3a
    rank 2        F0aF1a      F0bF1b   B0bW0bF2aB1bW1bF3aB0aW0aF2bB1aW1aF3bB2bW2b   B3bW3bB2aW2aB3aW3a
    rank 3           F0aF1a      F0bB0bW0bF1bB1bW1bF2aB0aW0aF3aB1aW1aF2bB2bW2bF3bB3bW3bB2aW2aB3aW3a
    """
    smallest = ceil(problem.pp_size / 2)
    group = problem.group_size or smallest
    if group < smallest:
        raise ValueError(
            f"schedule 'gis-h' on {problem.pp_size} ranks needs an interleave group size of at least {smallest}, got {group}: "
            "smaller groups idle in every period, or never end"
        )
    return _gis(problem, group)


def _gis(problem: Problem, group: int) -> Orders:
    p, v = problem.pp_size, problem.chunks_per_rank
    orders = []
    for rank in range(p):
        forwards, backwards = _in_groups(problem, rank, group)
        warmup = min(group * (v - 1) + p - rank, len(forwards))
        order = forwards[:warmup]
        for position, op in enumerate(backwards):
            order += [op, op._replace(kind=OpKind.W)]
            order += forwards[warmup + position : warmup + position + 1]
        orders.append(_that_exist(order, problem))
    return orders


@schedule("po", "a uniform period of F, B and W: every activation is away long enough to be offloaded", chunks(2))
def po(problem: Problem) -> Orders:
    """PipeOffload's uniform schedule (arXiv 2503.01328, section 4.3), here before anything is offloaded.

    A microbatch enters every 3v chunk times. F goes on by one from rank to rank, B, with its W behind it, by two; so F keeps to slots
    of one residue modulo 3 and B and W to the two others, and two chunks collide only when they are equal modulo 3v.

    rank 0  F0aF1a      F0bF2aF1bF3a         B0bW0bF2b      B1bW1bF3bB0aW0a   B2bW2b   B1aW1aB3bW3bB2aW2aB3aW3a
    rank 1     F0aF1a      F0bF2aF1b      B0bW0bF3a   F2bB1bW1b   B0aW0aF3bB2bW2b   B1aW1aB3bW3bB2aW2aB3aW3a
    rank 2        F0aF1a      F0bF2a   B0bW0bF1b   F3aB1bW1bF2bB0aW0a   B2bW2bF3bB1aW1aB3bW3bB2aW2aB3aW3a
    rank 3           F0aF1a      F0bB0bW0bF2a   F1bB1bW1bF3aB0aW0aF2bB2bW2bB1aW1aF3bB3bW3bB2aW2aB3aW3a
    """
    p, m, v = problem.pp_size, problem.num_microbatches, problem.chunks_per_rank
    period = 3 * v
    f_start, b_start = _po_starts(p, v)
    orders = []
    for rank in range(p):
        ops: list[tuple[int, Op]] = []
        for chunk, stage in enumerate(problem.placement.stages_of(rank)):
            f_slot, b_slot = f_start[chunk] + rank, b_start[chunk] + 2 * (p - 1 - rank)
            for k in range(m):
                ops.append((f_slot + period * k, Op(OpKind.F, stage, chunk, k)))
                ops.append((b_slot + period * k, Op(OpKind.B, stage, chunk, k)))
                ops.append((b_slot + period * k + 1, Op(OpKind.W, stage, chunk, k)))
        orders.append([op for _, op in sorted(ops)])
    return orders


def _po_starts(p: int, v: int) -> tuple[list[int], list[int]]:
    """Slots, a chunk, of F of microbatch 0 on rank 0 and of its B on rank p-1: each the first free one after what it waits for."""
    f_start: list[int] = []
    ready = 0
    for _ in range(v):
        f_start.append(_first_free(ready, 0, 3 * v, f_start))
        ready = f_start[-1] + p
    b_start: list[int] = []
    for _ in range(v):
        # On rank p-1, F are in slots of residue p-1.
        b_start.append(_first_free(ready, p, 3 * v, b_start))
        ready = b_start[-1] + 2 * (p - 1) + 1
    return f_start, b_start[::-1]


def _first_free(slot: int, residue: int, period: int, taken: list[int]) -> int:
    """The first slot from `slot` on that equals `residue` modulo 3 and none of `taken` modulo the period."""
    slot += (residue - slot) % 3
    while slot % period in {other % period for other in taken}:
        slot += 3
    return slot
