"""One chunk a rank: GPipe, 1F1B, ZB-H1, ZB-H2, Seq1F1B.

p ranks, m microbatches, rank i from 0. The figures show p=4, m=8 with F = B = W; a BW takes two columns.
"""

from megatron.pipeline_parallel.planning.builders.registry import Orders, Problem, chunks, in_turn, schedule
from megatron.pipeline_parallel.planning.op import Op, OpKind


class _RankOrder:
    """The growing order of one rank that owns one stage; each kind goes through the microbatches in order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ops: list[Op] = []
        self.count = {kind: 0 for kind in (OpKind.F, OpKind.B, OpKind.W)}

    def add(self, kind: OpKind, times: int = 1) -> None:
        for _ in range(times):
            self.ops.append(Op(kind, self.rank, 0, self.count[kind]))
            self.count[kind] += 1


@schedule("gpipe", "all forwards, then all backwards; holds all m microbatches", chunks(1), {"placement"})
def gpipe(problem: Problem) -> Orders:
    """GPipe (arXiv 1811.06965), backwards in microbatch order. Peak m. Several chunks go breadth-first (arXiv 2211.05953).

    rank 0  F0F1F2F3F4F5F6F7                  BW0 BW1 BW2 BW3 BW4 BW5 BW6 BW7
    rank 1    F0F1F2F3F4F5F6F7            BW0 BW1 BW2 BW3 BW4 BW5 BW6 BW7
    rank 2      F0F1F2F3F4F5F6F7      BW0 BW1 BW2 BW3 BW4 BW5 BW6 BW7
    rank 3        F0F1F2F3F4F5F6F7BW0 BW1 BW2 BW3 BW4 BW5 BW6 BW7
    """
    orders = []
    for rank in range(problem.pp_size):
        stages = sorted(problem.placement.stages_of(rank))
        order = [(OpKind.F, stage) for stage in stages] + [(OpKind.BW, stage) for stage in reversed(stages)]
        orders.append(
            [
                Op(kind, stage, problem.placement.chunk_of(stage), microbatch)
                for kind, stage in order
                for microbatch in range(problem.num_microbatches)
            ]
        )
    return orders


@schedule("1f1b", "Megatron's default; holds min(m, p - i) microbatches on rank i")
def one_f_one_b(problem: Problem) -> Orders:
    """1F1B (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473). Peak min(m, p) on rank 0.

    rank 0  F0F1F2F3            BW0 F4BW1 F5BW2 F6BW3 F7BW4   BW5   BW6   BW7
    rank 1    F0F1F2        BW0 F3BW1 F4BW2 F5BW3 F6BW4 F7BW5   BW6   BW7
    rank 2      F0F1    BW0 F2BW1 F3BW2 F4BW3 F5BW4 F6BW5 F7BW6   BW7
    rank 3        F0BW0 F1BW1 F2BW2 F3BW3 F4BW4 F5BW5 F6BW6 F7BW7
    """
    p, m = problem.pp_size, problem.num_microbatches
    orders = []
    for rank in range(p):
        forwards, backwards = ([Op(kind, rank, 0, k) for k in range(m)] for kind in (OpKind.F, OpKind.BW))
        orders.append(in_turn(forwards, backwards, p - rank - 1))
    return orders


@schedule("zb-h1", "1F1B's peak with about a third of its bubble: weight gradients fill the gaps")
def zb_h1(problem: Problem) -> Orders:
    """ZB-H1 (arXiv 2401.10241, section 2.2.1). Peak min(m, p); bubble (p-1)(T_F + T_B - T_W).

    As 1F1B, with W put off until more than i of them wait on rank i, so that every rank holds what rank 0 holds.

        rank 0  F0F1F2F3      B0W0F4B1W1F5B2W2F6B3W3F7B4W4B5W5B6W6B7W7
        rank 1    F0F1F2    B0F3B1W0F4B2W1F5B3W2F6B4W3F7B5W4B6W5B7W6W7
        rank 2      F0F1  B0F2B1F3B2W0F4B3W1F5B4W2F6B5W3F7B6W4B7W5W6W7
        rank 3        F0B0F1B1F2B2F3B3W0F4B4W1F5B5W2F6B6W3F7B7W4W5W6W7
    """
    p = problem.pp_size
    return [_zero_bubble(problem, rank, p - rank, rank) for rank in range(p)]


@schedule("zb-h2", "no bubble at equal times and m >= 2p - 1, for nearly twice 1F1B's peak")
def zb_h2(problem: Problem) -> Orders:
    """ZB-H2 (arXiv 2401.10241, section 2.2.2). Peak min(m, 2p-1); bubble (p-1)(T_F + T_B - 2 T_W).

    Enough forwards run before the first B to fill the wait for it, and W is put off further still.

    rank 0  F0F1F2F3F4F5F6B0W0F7B1W1B2W2B3W3B4W4B5W5B6W6B7W7
    rank 1    F0F1F2F3F4B0F5B1F6B2W0F7B3W1B4W2B5W3B6W4B7W5W6W7
    rank 2      F0F1F2B0F3B1F4B2F5B3F6B4W0F7B5W1B6W2B7W3W4W5W6W7
    rank 3        F0B0F1B1F2B2F3B3F4B4F5B5F6B6W0F7B7W1W2W3W4W5W6W7
    """
    p = problem.pp_size
    return [_zero_bubble(problem, rank, 2 * (p - rank) - 1, 2 * rank) for rank in range(p)]


def _zero_bubble(problem: Problem, rank: int, ahead: int, put_off: int) -> list[Op]:
    """`ahead` forwards before the first B; then a B, a W once more than `put_off` wait, and an F, in turn."""
    m = problem.num_microbatches
    order = _RankOrder(rank)
    order.add(OpKind.F, min(ahead, m))
    for _ in range(m):
        order.add(OpKind.B)
        has_forwards = order.count[OpKind.F] < m
        if not has_forwards or order.count[OpKind.B] - order.count[OpKind.W] > put_off:
            order.add(OpKind.W)
        if has_forwards:
            order.add(OpKind.F)
    order.add(OpKind.W, m - order.count[OpKind.W])
    return order.ops


@schedule(
    "seq-1f1b", "1F1B on pieces of sequences: less memory and bubble for long ones", takes={"num_sequence_splits"}
)
def seq_1f1b(problem: Problem) -> Orders:
    """Seq1F1B (arXiv 2406.03488) with s sequence splits. Peak (p + s - 1) / s; s = 1 is 1F1B.

    Forwards first-in-first-out, as a split attends to those before it; backwards last-in-first-out within a microbatch, as the
    gradients of keys and values come from later splits. The figure shows m=2 in two splits.

    rank 0  F0  F0/1F1  F1/1                            BW0/1       BW0         BW1/1   BW1
    rank 1      F0  F0/1F1  F1/1                BW0/1       BW0         BW1/1   BW1
    rank 2          F0  F0/1F1          BW0/1   F1/1BW0         BW1/1   BW1
    rank 3              F0  F0/1BW0/1   F1  BW0     F1/1BW1/1   BW1
    """
    p, m, s = problem.pp_size, problem.num_microbatches, problem.num_sequence_splits
    forwards = [(microbatch, split) for microbatch in range(m) for split in range(s)]
    backwards = [(microbatch, split) for microbatch in range(m) for split in reversed(range(s))]
    orders = []
    for rank in range(p):
        f_ops = [Op(OpKind.F, rank, 0, *unit) for unit in forwards]
        b_ops = [Op(OpKind.BW, rank, 0, *unit) for unit in backwards]
        orders.append(in_turn(f_ops, b_ops, p - rank - 1 + s - 1))
    return orders
