"""Greedy list scheduling under a memory limit: orders for any placement, any times, any messages.

Ranks choose in the order of time. A free rank runs what is ready, B before F unless the rules say otherwise, fills a wait
with a W, and runs a W as soon as memory keeps back an F. A forward starts only where its microbatch has room to finish on
that rank: so the oldest microbatch can always go on, and no limit that lets one microbatch through ends in a deadlock.

Every stage runs F, B and W in microbatch order, so an order is a list of codes a rank: kind * num_stages + stage.
"""

from bisect import bisect_left
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement, Schedule

Codes = list[list[int]]
"""For each rank, kind * num_stages + stage of each op; the k-th code of a stage and kind is microbatch k."""

F, B, W = 0, 1, 2
_EPSILON = 1e-9
"""Relative."""

_NEVER = float("inf")


class Rules(NamedTuple):
    """What a greedy scheduler may choose freely."""

    caps: tuple[int, ...]
    """Most microbatches in flight, from F to B, a stage."""
    w_overhang: float = 0.0
    """Share of a W that may reach past the moment when the next F or B could start."""
    slack: float = _NEVER
    """Share of an F that may reach past the earliest moment of its rank's first B."""
    alternate: bool = False
    """After a B an F, when one is ready, even if another B is ready too."""
    f_deep_first: bool = True
    """Of two ready F of one rank, the one of the later stage."""
    b_deep_first: bool = True
    """Of two ready B of one rank, the one of the later stage."""


class Task(NamedTuple):
    """A placement with times and memory, laid out for an inner loop: one entry a stage unless said otherwise."""

    num_microbatches: int
    rank: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    """A rank: its stages in the order of the dataflow."""
    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    forward_latency: tuple[float, ...]
    """From this stage to the next."""
    backward_latency: tuple[float, ...]
    """From this stage to the one before."""
    memory_b: tuple[float, ...]
    memory_w: tuple[float, ...]
    room: tuple[float, ...]
    """What must be free before an F of this stage, for its microbatch to finish on this rank."""
    limit: tuple[float, ...]
    """Most memory, a rank."""
    first_b: tuple[float, ...]
    """Earliest moment of the first B, a rank."""
    tolerance: float
    """Times that differ by less are equal: sums in another order differ in their last digits."""
    joint: bool
    """Whether weight gradients are made together with input gradients."""


def make_task(placement: Placement, num_microbatches: int, costs: CostModel, *, joint: bool = False) -> Task:
    """Lay out a placement and its costs; ValueError where `costs.device_limit` is less than one microbatch needs."""
    n = placement.num_stages
    rank = tuple(placement.rank_of(stage) for stage in range(n))
    stages_of = tuple(tuple(sorted(placement.stages_of(i))) for i in range(placement.pp_size))
    forward = tuple(costs.message_time(rank[s], rank[s + 1]) if s + 1 < n else 0.0 for s in range(n))
    backward = tuple(costs.message_time(rank[s], rank[s - 1]) if s else 0.0 for s in range(n))
    reached = list(accumulate(costs.f[s] + forward[s] for s in range(n)))
    turned = [0.0] * n
    turned[-1] = reached[-1]
    for stage in reversed(range(n - 1)):
        joint_w = costs.w[stage + 1] if joint else 0.0
        turned[stage] = turned[stage + 1] + costs.b[stage + 1] + joint_w + backward[stage + 1]
    memory_w = (0.0,) * n if joint else costs.memory_w
    room = [0.0] * n
    for stages in stages_of:
        _fill_room(room, stages, costs.memory_b, memory_w)
    smallest = tuple(room[stages[0]] for stages in stages_of)
    limit = costs.device_limit or (_NEVER,) * placement.pp_size
    for i, (given, needed) in enumerate(zip(limit, smallest)):
        if given < needed * (1 - _EPSILON):
            raise MemoryLimitError(i, given, smallest)
    tolerance = _EPSILON * max(costs.f + costs.b + costs.w + forward + backward)
    return Task(
        num_microbatches, rank, stages_of, costs.f, costs.b, costs.w, forward, backward, costs.memory_b, memory_w,
        tuple(room), limit, tuple(min(turned[s] for s in stages) for stages in stages_of), tolerance, joint,
    )  # fmt: skip


class MemoryLimitError(ValueError):
    """A limit that no order of a placement keeps; `smallest` has the least memory, a rank, that one does."""

    def __init__(self, rank: int, given: float, smallest: tuple[float, ...]) -> None:
        self.smallest = smallest
        super().__init__(
            f"a memory limit of {given:g} on rank {rank} is less than one microbatch needs there, {smallest[rank]:g}"
        )


def _fill_room(
    room: list[float], stages: tuple[int, ...], memory_b: tuple[float, ...], memory_w: tuple[float, ...]
) -> None:
    """A microbatch alone holds memory_b of all stages at its last F; as B turns a memory_b into a memory_w it can hold more."""
    growth = held = 0.0
    for stage in reversed(stages):
        held += memory_b[stage]
        growth = max(growth, memory_w[stage] - held)
    for stage in reversed(stages):
        growth += memory_b[stage]
        room[stage] = growth


class Greedy:
    """A schedule under construction; `run` goes on with it, `copy` lets it go on in two ways.

    The heap holds moments at which a rank may find something to do. A rank that starts an op announces its result to the
    rank that needs it, with the time when it will arrive, so that nobody idles who could know better.
    """

    def __init__(self, task: Task) -> None:
        n, m, num_ranks = len(task.f), task.num_microbatches, len(task.stages_of)
        self.task = task
        self.f_arrival = [[_NEVER] * m for _ in range(n)]
        self.f_arrival[0] = [0.0] * m
        self.b_arrival = [[_NEVER] * m for _ in range(n)]
        self.done = [0] * (3 * n)
        self.space = [limit * (1 + _EPSILON) for limit in task.limit]
        self.free = [0.0] * num_ranks
        self.began = [_NEVER] * num_ranks
        self.after_b = [True] * num_ranks
        self.waiting: list[list[int]] = [[] for _ in range(num_ranks)]
        """A rank: the stages whose B have run, in that order; the W run in it, too."""
        self.w_done = [0] * num_ranks
        self.codes: Codes = [[] for _ in range(num_ranks)]
        self.starts: list[list[float]] = [[] for _ in range(num_ranks)]
        """Start of each op of `codes`."""
        self.heap = [(0.0, i) for i in range(num_ranks)]
        self.rest = [m * sum(task.f[s] + task.b[s] + task.w[s] for s in stages) for stages in task.stages_of]
        """Time of what has not run, a rank."""
        self.placed = 0
        self.gave_up = False

    def copy(self) -> "Greedy":
        other = Greedy.__new__(Greedy)
        other.task, other.placed, other.gave_up = self.task, self.placed, self.gave_up
        for name in ("f_arrival", "b_arrival", "waiting", "codes", "starts"):
            setattr(other, name, [list(items) for items in getattr(self, name)])
        for name in ("done", "space", "free", "began", "after_b", "w_done", "heap", "rest"):
            setattr(other, name, list(getattr(self, name)))
        return other

    def until(self, moment: float) -> "Greedy":
        """What had started before `moment`, to go on from there."""
        task, n = self.task, len(self.task.f)
        past = Greedy(task)
        b_time = [b + w for b, w in zip(task.b, task.w)] if task.joint else task.b
        times = (task.f, b_time, task.w)
        for i, (codes, starts) in enumerate(zip(self.codes, self.starts)):
            count = bisect_left(starts, moment)
            past.codes[i], past.starts[i] = codes[:count], starts[:count]
            past.placed += count
            queue = past.waiting[i]
            for code, start in zip(past.codes[i], starts):
                s, k = code % n, past.done[code]
                past.done[code] = k + 1
                end = start + times[code // n][s]
                past.rest[i] -= end - start
                past.free[i] = end
                if code < n:
                    past.space[i] -= task.memory_b[s]
                    past.after_b[i] = False
                    if s + 1 < n:
                        past.f_arrival[s + 1][k] = end + task.forward_latency[s]
                    else:
                        past.b_arrival[s][k] = end
                elif code < 2 * n:
                    past.space[i] += task.memory_b[s] - task.memory_w[s]
                    past.after_b[i] = True
                    if not task.joint:
                        queue.append(s)
                    if s:
                        past.b_arrival[s - 1][k] = end + task.backward_latency[s]
                else:
                    past.space[i] += task.memory_w[s]
                    queue.insert(past.w_done[i], queue.pop(queue.index(s, past.w_done[i])))
                    past.w_done[i] += 1
            if count:
                past.began[i] = starts[0]
        past.heap = sorted((free, i) for i, free in enumerate(past.free))
        return past

    @property
    def is_complete(self) -> bool:
        """Whether every op of every microbatch is there."""
        kinds = 2 if self.task.joint else 3
        return not self.gave_up and self.placed == kinds * len(self.task.f) * self.task.num_microbatches

    @property
    def makespan(self) -> float:
        return max(self.free)

    @property
    def span(self) -> float:
        """The longest span of a rank, from its first op to its last: what counts once iterations overlap."""
        return max(end - start for start, end in zip(self.began, self.free))

    @property
    def score(self) -> tuple[int, int, float]:
        """What to minimise: the makespan, the span, the mean end of the ranks; the first two without their last digits."""
        digit = 100 * self.task.tolerance or 1.0
        return round(self.makespan / digit), round(self.span / digit), sum(self.free)

    def run(
        self, rules: Rules, fixed: Codes | None = None, *, until: float = _NEVER, at_most: float = _NEVER
    ) -> "Greedy":
        """Go on by `rules`, up to the first op that would start at `until` or later; returns itself.

        One long loop on purpose, with everything in local names: a search runs it some hundred thousand times a second.
        Gives up for good, not complete, as soon as a rank cannot end by `at_most`.

        With `fixed`, each rank runs those ops in that order, leaving out those that have run; a W goes earlier where it fits into
        a wait, or where memory keeps back what is next. A fixed order that the limit does not allow stops, not complete.
        """
        task, n, tolerance = self.task, len(self.task.f), self.task.tolerance
        m, rank, f_time, w_time, room = task.num_microbatches, task.rank, task.f, task.w, task.room
        memory_b, memory_w, first_b, joint = task.memory_b, task.memory_w, task.first_b, task.joint
        forward_latency, backward_latency = task.forward_latency, task.backward_latency
        b_time = [b + w for b, w in zip(task.b, task.w)] if joint else task.b
        growth = [after - before for before, after in zip(memory_b, memory_w)]
        caps, fits_into_wait, slack, alternate = rules.caps, 1 - rules.w_overhang, rules.slack, rules.alternate
        f_stages = [stages[::-1] if rules.f_deep_first else stages for stages in task.stages_of]
        b_stages = [stages[::-1] if rules.b_deep_first else stages for stages in task.stages_of]
        f_arrival, b_arrival, done, space, free = self.f_arrival, self.b_arrival, self.done, self.space, self.free
        began, after_b, waiting, w_done, heap = self.began, self.after_b, self.waiting, self.w_done, self.heap
        rest, last_end = self.rest, at_most * (1 + _EPSILON)
        orders = [_left(codes, done) for codes in fixed] if fixed else [[]] * len(free)
        at = [0] * len(free)
        early = [0] * (3 * n)
        """How often a code has run before its turn in a fixed order."""
        keeps_w = any(code >= 2 * n for order in orders for code in order)
        while heap:
            now, i = heappop(heap)
            if now >= until:
                heappush(heap, (now, i))
                break
            if now < free[i] - tolerance:
                continue
            order = orders[i]
            while True:
                soon = now + tolerance
                left = space[i]
                following = _NEVER
                b_ready = f_ready = -1
                kept_back = False
                w_next = w_done[i] if w_done[i] < len(waiting[i]) else -1
                while at[i] < len(order) and early[order[at[i]]]:
                    early[order[at[i]]] -= 1
                    at[i] += 1
                if at[i] < len(order):
                    code = order[at[i]]
                    s = code % n
                    if code < n:
                        arrival, needed = f_arrival[s][done[s]], memory_b[s]
                    elif code < 2 * n:
                        arrival, needed = b_arrival[s][done[code]], growth[s]
                    else:
                        arrival, needed = _NEVER, _NEVER
                        w_next = waiting[i].index(s, w_done[i])
                    if needed == _NEVER:
                        pass
                    elif arrival > soon:
                        following = arrival
                    elif needed > left:
                        kept_back = True
                    else:
                        at[i] += 1
                        if code < n:
                            f_ready = s
                        else:
                            b_ready = s
                else:
                    for s in b_stages[i]:
                        k = done[n + s]
                        if k < done[s]:
                            arrival = b_arrival[s][k]
                            if arrival > soon:
                                if arrival < following:
                                    following = arrival
                            elif growth[s] > left:
                                kept_back = True
                            elif b_ready < 0:
                                b_ready = s
                    if b_ready < 0 or alternate and after_b[i]:
                        started = slack == _NEVER or any(done[n + s] for s in f_stages[i])
                        for s in f_stages[i]:
                            k = done[s]
                            if k < m and k - done[n + s] < caps[s]:
                                arrival = f_arrival[s][k]
                                if not started and k and now + f_time[s] * (1 - slack) > first_b[i] + tolerance:
                                    continue
                                if room[s] > left:
                                    kept_back = kept_back or arrival <= soon
                                elif arrival > soon:
                                    if arrival < following:
                                        following = arrival
                                elif f_ready < 0:
                                    f_ready = s
                if f_ready >= 0:
                    code = s = f_ready
                    k = done[s]
                    space[i] -= memory_b[s]
                    end = now + f_time[s]
                    after_b[i] = False
                    if s + 1 < n:
                        f_arrival[s + 1][k] = end + forward_latency[s]
                        j = rank[s + 1]
                        if j != i:
                            heappush(heap, (free[j] if free[j] > now else now, j))
                    else:
                        b_arrival[s][k] = end
                elif b_ready >= 0:
                    s = b_ready
                    code = n + s
                    k = done[code]
                    space[i] -= growth[s]
                    end = now + b_time[s]
                    after_b[i] = True
                    if not joint:
                        waiting[i].append(s)
                    if s:
                        b_arrival[s - 1][k] = end + backward_latency[s]
                        j = rank[s - 1]
                        if j != i:
                            heappush(heap, (free[j] if free[j] > now else now, j))
                else:
                    if w_next >= 0 and (
                        kept_back or now + w_time[waiting[i][w_next]] * fits_into_wait <= following + tolerance
                    ):
                        s = waiting[i][w_next]
                        code = 2 * n + s
                        # The W that have run stay in front of the queue.
                        waiting[i].insert(w_done[i], waiting[i].pop(w_next))
                        w_done[i] += 1
                        if at[i] < len(order):
                            if order[at[i]] == code:
                                at[i] += 1
                            elif keeps_w:
                                early[code] += 1
                        space[i] += memory_w[s]
                        end = now + w_time[s]
                    else:
                        if following < _NEVER:
                            heappush(heap, (following, i))
                        break
                rest[i] -= end - now
                if end + rest[i] > last_end:
                    self.gave_up = True
                    return self
                done[code] += 1
                self.placed += 1
                self.codes[i].append(code)
                self.starts[i].append(now)
                if now < began[i]:
                    began[i] = now
                free[i] = end
                if end >= until or heap and heap[0][0] < end - tolerance:
                    heappush(heap, (end, i))
                    break
                now = end
        return self


def _left(codes: list[int], done: list[int]) -> list[int]:
    """What of a rank's order has not run."""
    skip = {code: done[code] for code in set(codes)}
    left = []
    for code in codes:
        if skip[code]:
            skip[code] -= 1
        else:
            left.append(code)
    return left


def to_ops(codes: Codes, placement: Placement, *, joint: bool) -> list[list[Op]]:
    """The order as ops."""
    n = placement.num_stages
    kinds = (OpKind.F, OpKind.BW if joint else OpKind.B, OpKind.W)
    heads = [(kinds[code // n], code % n, placement.chunk_of(code % n)) for code in range(3 * n)]
    done = [0] * (3 * n)
    orders: list[list[Op]] = []
    for rank_codes in codes:
        ops = []
        for code in rank_codes:
            ops.append(Op(*heads[code], done[code]))
            done[code] += 1
        orders.append(ops)
    return orders


def to_codes(schedule: Schedule) -> Codes:
    """A schedule with split backwards as codes."""
    n = schedule.placement.num_stages
    kinds = {OpKind.F: F, OpKind.B: B, OpKind.W: W}
    return [[kinds[op.kind] * n + op.stage for op in ops] for ops in schedule.ranks]


def without_w(codes: Codes, num_stages: int) -> Codes:
    """The F and B alone, for W to be placed anew."""
    return [[code for code in order if code // num_stages != W] for order in codes]
