"""Two chunks a rank in a V: ZBV, V-Half, V-Min, 1F1B-V, DualPipeV.

Rank i of p has stage i and stage 2p-1-i: the loss comes back to rank 0, and the memory of a rank's two chunks adds up to the same
on every rank. Except for DualPipeV the closed forms are for equal times; each is where a search for the given times starts
(`search`), at the same peak, and what comes out is never worse. The figures show p=4 with F = B = W and m=4; a BW takes two columns,
a and b are the chunks.
"""

from dataclasses import replace

from megatron.pipeline_parallel.planning.bounds import lower_bound
from megatron.pipeline_parallel.planning.builders import blocks
from megatron.pipeline_parallel.planning.builders.registry import Orders, Problem, schedule, two_chunks_v
from megatron.pipeline_parallel.planning.greedy import B, Codes, F, make_task, to_ops, without_w
from megatron.pipeline_parallel.planning.op import Op, OpKind
from megatron.pipeline_parallel.planning.search import EFFORT, search


def _fit(problem: Problem, forms: list[Codes], peak: int, *, joint: bool = False) -> Orders:
    """The best order found for the problem's times from closed forms, holding at most `peak` chunks on every rank."""
    p, n = problem.pp_size, 2 * problem.pp_size
    in_chunks = replace(
        problem.costs, memory_b=(1.0,) * n, memory_w=(1.0,) * n, device_limit=(float(peak),) * p, host_limit=None
    )
    task = make_task(problem.placement, problem.num_microbatches, in_chunks, joint=joint)
    # The closed form's own places for W are good at equal times; at others they are better chosen again.
    starts = forms if joint else forms + [without_w(form, n) for form in forms]
    # With joint backwards there is less to choose: F and B alone.
    effort = (EFFORT // 2 if joint else EFFORT) if problem.effort is None else problem.effort
    bound = lower_bound(problem.placement, problem.num_microbatches, in_chunks, in_chunks.device_limit)
    return to_ops(
        search(task, starts, effort=effort, enough=(bound.value, float("inf"))).codes, problem.placement, joint=joint
    )


@schedule("zbv", "no bubble at equal times and m >= 2p, at the peak of 1F1B", two_chunks_v)
def zbv(problem: Problem) -> Orders:
    """ZBV (arXiv 2405.15362, section 4.1). Peak min(m, p).

    rank 0  F0aF1aF2aF3a         F0bB0bF1bB1bF2bB2bF3bB3bB0aW0bB1aW1bB2aW2bB3aW3bW0aW1aW2aW3a
    rank 1     F0aF1aF2aF3a   F0b   F1bB0bF2bB1bF3bB2bB0aB3bB1aW0bB2aW1bB3aW2bW0aW3bW1aW2aW3a
    rank 2        F0aF1aF2aF0bF3aF1b   F2bB0bF3bB1bB0aB2bB1aB3bB2aW0bB3aW1bW0aW2bW1aW3bW2aW3a
    rank 3           F0aF0bF1aF1bF2aF2bF3aF3bB0bB0aB1bB1aB2bB2aB3bB3aW0bW0aW1bW1aW2bW2aW3bW3a
    """
    p, m = problem.pp_size, problem.num_microbatches
    return _fit(problem, [[_zbv_rank(p, m, rank) for rank in range(p)]], 2 * min(m, p))


def _zbv_rank(p: int, m: int, rank: int) -> list[int]:
    """F and B of one rank; the warm-up runs as far as the first B, then both chunks take turns."""
    n = 2 * p
    turn = {"f0": F * n + rank, "f1": F * n + n - 1 - rank, "b0": B * n + rank, "b1": B * n + n - 1 - rank}
    count = dict.fromkeys(turn, 0)
    order: list[int] = []

    def add(name: str) -> None:
        needs = {"f1": "f0", "b1": "f1", "b0": "b1"}.get(name)
        if count[name] < m and (needs is None or count[name] < count[needs]):
            count[name] += 1
            order.append(turn[name])

    for name, times in (("f0", 2 * (p - rank) - 1), ("f1 f0", rank), ("f1 b1", p - rank)):
        for _ in range(times):
            for one in name.split():
                add(one)
    while len(order) < 4 * m:
        for one in ("f0", "b0", "f1", "b1"):
            add(one)
    return order


@schedule("v-half", "half of 1F1B's peak, about half of its bubble", two_chunks_v)
def v_half(problem: Problem) -> Orders:
    """V-Half (arXiv 2405.15362, section 4.1). Peak min(m, floor((p+2)/2)).

    rank 0  F0aF1aF2aF3a         F0bB0bF1bB1bW0bF2bB2bW1bW2bB0aW0a   F3bB3bB1aW3bB2aW1aW2a   B3aW3a
    rank 1     F0aF1aF2aF3a   F0b   F1bB0bW0bF2bB1bW1b   B0aB2bW0aF3bW2bB1aB3bB2aW1aW3bW2aB3aW3a
    rank 2        F0aF1aF2aF0b   F1b   F2bB0bW0bF3aB1bB0aW1bW0aF3bB2bB1aW2bB2aB3bW1aW2aB3aW3bW3a
    rank 3           F0aF0bF1aF1bF2aF2b      B0bB0aW0bF3aW0aF3bB1bB1aB2bB2aW1bW1aB3bB3aW2bW2aW3bW3a
    """
    p, m = problem.pp_size, problem.num_microbatches
    peak = 2 * min(m, (p + 2) // 2)
    return _fit(problem, [blocks.repeat(blocks.v_half(p), m, peak)], peak)


@schedule("v-min", "a third of 1F1B's peak, the least of all V schedules", two_chunks_v)
def v_min(problem: Problem) -> Orders:
    """V-Min (arXiv 2405.15362, section 4.1). Peak min(m, floor((p+4)/3)).

    rank 0  F0aF1aF2a            F0bB0bW0bF1bB1bW1b      B0aF3aW0a   F2bB2bB1aW2bW1a   F3bB3bB2aW3bW2a         B3aW3a
    rank 1     F0aF1a         F0b   F1bB0bW0bF2a      B0aB1bW0aW1bF2bF3aB1aB2bW1aW2bF3b   B2aB3bW2aW3b      B3aW3a
    rank 2        F0aF1a   F0b   F1b      B0bW0bF2aB0aW0a   B1bF2bW1bB1aF3aW1aB2bF3bW2bB2aW2a   B3bW3b   B3aW3a
    rank 3           F0aF0bF1aF1b            B0bB0aW0bF2aW0aF2bB1bB1aW1bW1aF3aF3bB2bB2aW2bW2a      B3bB3aW3bW3a
    """
    p, m = problem.pp_size, problem.num_microbatches
    peak = 2 * min(m, (p + 4) // 3)
    return _fit(problem, [blocks.repeat(blocks.v_min(p), m, peak)], peak)


@schedule("1f1b-v", "two thirds of 1F1B's peak without splitting the backward", two_chunks_v)
def one_f_one_b_v(problem: Problem) -> Orders:
    """1F1B-V (arXiv 2405.15362, appendix). Peak min(m, ceil(2p/3)), half a microbatch more where 3 divides p. The figure shows m=3.

    rank 0  F0aF1aF2a            F0bBW0b  F1bBW1b  F2bBW2b                    BW0a        BW1a        BW2a
    rank 1     F0aF1aF2a      F0b   F1b   BW0b  F2bBW1b     BW2b        BW0a        BW1a        BW2a
    rank 2        F0aF1aF2aF0b   F1b   F2b      BW0b     BW1b     BW0a  BW2b  BW1a        BW2a
    rank 3           F0aF0bF1aF1bF2aF2b               BW0b  BW0a  BW1b  BW1a  BW2b  BW2a
    """
    p, m = problem.pp_size, problem.num_microbatches
    peak = 2 * -(-2 * p // 3)
    # On many ranks only the cheapest, as each takes longer to try.
    candidates = blocks.one_f_one_b_v(p)[: max(4, 128 // p)]

    def ends_at(block: blocks.Block) -> float:
        """With as few microbatches as show a block's two ends and what lies between."""
        few = min(m, 2 * p)
        task = make_task(problem.placement, few, replace(problem.costs, device_limit=None), joint=True)
        return search(task, [blocks.repeat(block, few, peak, joint=True)], effort=0).makespan

    form = blocks.repeat(min(candidates, key=ends_at), m, peak, joint=True)
    return _fit(problem, [form], blocks.peak_of(form, joint=True), joint=True)


@schedule("dualpipe-v", "DeepSeek's overlap of F and B in pairs, on half as many ranks as DualPipe", two_chunks_v)
def dualpipe_v(problem: Problem) -> Orders:
    """DualPipeV (DeepSeek's DualPipe, the "cut in half" form of arXiv 2412.19437). Peak min(m, p + 1/2).

    Where DualPipe runs an F and a B of two microbatches as one, they stand next to each other here, F first, and B's gradient leaves
    as soon as B ends. Made for m >= 2p; for fewer microbatches the order is that of 2p with the others left out.

    rank 0  F0aF1aF2aF3a         F0bB0bW0bF1bB1bW1bF2bB2bW2bF3bBW3b  BW0a        BW1a        BW2a        BW3a
    rank 1     F0aF1aF2aF3a   F0b   F1bB0bW0bF2bB1bW1bF3bBW2b  BW0a  BW3b  BW1a        BW2a        BW3a
    rank 2        F0aF1aF2aF0bF3aF1b   F2bB0bW0bF3bBW1b  BW0a  BW2b  BW1a  BW3b  BW2a        BW3a
    rank 3           F0aF0bF1aF1bF2aF2bF3aF3bBW0b  BW0a  BW1b  BW1a  BW2b  BW2a  BW3b  BW3a
    """
    p, m = problem.pp_size, problem.num_microbatches
    return [_dualpipe_v_rank(problem, rank, max(m, 2 * p)) for rank in range(p)]


def _dualpipe_v_rank(problem: Problem, rank: int, m: int) -> list[Op]:
    p = problem.pp_size
    stages = problem.placement.stages_of(rank)
    count = {(kind, chunk): 0 for kind in OpKind for chunk in (0, 1)}
    waiting: list[Op] = []
    ops: list[Op] = []

    def add(kind: OpKind, chunk: int) -> Op:
        op = Op(kind, stages[chunk], chunk, count[kind, chunk])
        count[kind, chunk] += 1
        ops.append(op)
        return op

    def backward(chunk: int, split: bool = False) -> None:
        # Joint and split backwards of a chunk share one count: the microbatches go in order.
        op = add(OpKind.B, chunk)
        if split:
            waiting.append(op)
        else:
            ops[-1] = op._replace(kind=OpKind.BW)

    def weight() -> None:
        if waiting:
            ops.append(waiting.pop(0)._replace(kind=OpKind.W))

    for _ in range(2 * (p - rank - 1)):
        add(OpKind.F, 0)
    for _ in range(rank + 1):
        add(OpKind.F, 0)
        add(OpKind.F, 1)
    for _ in range(p - rank - 1):
        backward(1, split=True)
        weight()
        add(OpKind.F, 1)
    for _ in range(m - 2 * p + rank + 1):
        add(OpKind.F, 0)
        backward(1)
        add(OpKind.F, 1)
        backward(0)
    for _ in range(p - rank - 1):
        backward(1)
        add(OpKind.F, 1)
        backward(0)
    # The second half of the way out is split, so that W fill the waits.
    for step in range(2 * (rank + 1)):
        backward(1 - step % 2, split=step >= rank + 1)
    for _ in range(p - rank - 1):
        weight()
        backward(0, split=True)
    while waiting:
        weight()
    return [op for op in ops if op.microbatch < problem.num_microbatches]
