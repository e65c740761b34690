"""Makespans that no schedule beats: what a plan's own figure is printed beside.

Rank by rank, all other ranks are replaced by the delays that they cause at the least: chains of one op a stage, and messages.

    F starts     no F of stage s starts before one F of each earlier stage
    B starts     no B of stage s starts before a microbatch has passed all F and its first B has come down to s
    tails        after an F its microbatch must go on to the last stage and all the way back, after a B the rest of the way back

Of q sequence splits, one goes along the chain, and the others cost it their turn on the slowest stage. The chains hold with joint
backwards, too, where a gradient only comes later. What follows from them:

1. Any subset of a rank's ops: makespan >= earliest start + work + shortest tail. Holds for every schedule.
2. Memory on the rank. Until its first B it can run F alone, and of these only as many as fit at once. After its last F only the
   B and W of what is held can be left; after its last B only the W of what is held. On the way of a microbatch from its last F on
   the rank to its first B there, see `_idle_ways`. What these do not fill of the times up to the first B, of the ways and of the
   tail is idle, and these times never meet (the first and the last can, when all F of the rank fit at once).
   First B and last F are always of the rank's last stage and the last B of its first: other stages' ops of the same microbatch
   stand on the other side of them.
3. The area: every activation is held at least for its own way to the last stage and back, and a rank has `held` x time for all.

With k microbatches held by one chunk a rank, (2) has idle >= (p-1)(B+2c) + (p-k)F on rank 0, c the time of a message. With k chunks
held in a V of unit times it has makespan >= 6m + 6p - 3k - 1 on rank p-1 wherever k < 2m.
"""

from collections.abc import Iterable
from typing import NamedTuple

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Placement

ANY_SCHEDULE = "any schedule"
"""What a bound holds for when it does not depend on memory."""

SLACK = 1e-9
"""Relative: what still counts as within a limit."""


class Bound(NamedTuple):
    """A makespan that no schedule beats, and which schedules it holds for."""

    value: float
    holds_for: str


def lower_bound(
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    held: tuple[float, ...] | None = None,
    *,
    offloads: bool = False,
    num_sequence_splits: int = 1,
) -> Bound:
    """The best lower bound on the makespan of a training schedule.

    `held` is the most activation memory a rank that the schedules in question hold: a limit, or what one of them was seen to hold;
    None for no limit. With `offloads` an activation may leave the device (or be thrown away and recomputed), and only what
    holds at any memory is used. ValueError when `costs` or `held` are for another number of stages or ranks.
    """
    costs.check_fits(placement)
    if held is not None and len(held) != placement.pp_size:
        raise ValueError(f"held: one entry a rank, got {len(held)} for {placement.pp_size} ranks")
    stages = _Stages(placement, num_microbatches, costs, num_sequence_splits)
    ranks = range(placement.pp_size)
    best = Bound(max(_any_memory(stages, rank) for rank in ranks), ANY_SCHEDULE)
    if held is None or offloads:
        return best
    for rank in ranks:
        # What counts as within the limit elsewhere counts here, too.
        most = held[rank] * (1 + 2 * SLACK)
        value = max(_idle(stages, rank, most), _area(stages, rank, most))
        if value > best.value * (1 + SLACK):
            holds_for = f"any schedule without offload or recompute that holds at most {held[rank]:.6g} on rank {rank}"
            best = Bound(value, holds_for)
    return best


class _Stages:
    """What one op of each stage takes, and the chains between stages. All lists are a stage, times for one sequence split."""

    def __init__(self, placement: Placement, num_microbatches: int, costs: CostModel, num_splits: int) -> None:
        self.placement = placement
        self.num_microbatches = num_microbatches
        self.num_splits = num_splits
        self.units = num_microbatches * num_splits
        """Ops of one kind on a stage."""
        self.f, self.b, self.w = ([time / num_splits for time in values] for values in (costs.f, costs.b, costs.w))
        self.memory_b, self.memory_w = (
            [size / num_splits for size in values] for values in (costs.memory_b, costs.memory_w)
        )
        self.up = self._messages(costs, 1)
        self.down = self._messages(costs, -1)
        extra_splits = num_splits - 1
        self.f_starts = self._f_starts()
        # All splits of a microbatch pass the slowest stage one after another, forward as well as backward.
        turn = self.f_starts[-1] + self.f[-1] + extra_splits * max(self.f)
        self.b_starts = self._b_starts(turn)
        self.turn_to_end = self._turn_to_end(extra_splits)
        self.f_tails = [
            self.f_starts[-1] + self.f[-1] - start - f + self.turn_to_end for start, f in zip(self.f_starts, self.f)
        ]
        self.b_tails = self._b_tails()

    def _messages(self, costs: CostModel, step: int) -> list[float]:
        """Time of the message between stages s and s + 1, upwards or downwards."""
        place = self.placement
        times = []
        for stage in range(place.num_stages - 1):
            source, destination = place.rank_of(stage), place.rank_of(stage + 1)
            ends = (source, destination) if step == 1 else (destination, source)
            times.append(costs.message_time(*ends))
        return times

    def _f_starts(self) -> list[float]:
        starts = [0.0]
        for f, message in zip(self.f, self.up):
            starts.append(starts[-1] + f + message)
        return starts

    def _b_starts(self, turn: float) -> list[float]:
        starts = [turn]
        for b, message in zip(self.b[:0:-1], self.down[::-1]):
            starts.append(starts[-1] + b + message)
        return starts[::-1]

    def _turn_to_end(self, extra_splits: int) -> float:
        """From the end of a microbatch's last F to the end of the W of whichever stage comes last."""
        slowest = longest = 0.0
        for b, w, start in zip(self.b[::-1], self.w[::-1], self.b_starts[::-1]):
            slowest = max(slowest, b)
            longest = max(longest, start - self.b_starts[-1] + b + extra_splits * slowest + w)
        return longest

    def _b_tails(self) -> list[float]:
        """From the end of a B to the end of the W of whichever earlier stage comes last."""
        tails = [self.w[0]]
        for b, w, message in zip(self.b, self.w[1:], self.down):
            tails.append(max(w, message + b + tails[-1]))
        return tails

    def work(self, rank: int) -> float:
        return self.units * sum(
            self.f[stage] + self.b[stage] + self.w[stage] for stage in self.placement.stages_of(rank)
        )


def _any_memory(stages: _Stages, rank: int) -> float:
    """Best of: earliest start + work + shortest tail, over all subsets of a rank's ops."""
    jobs = []
    for stage in stages.placement.stages_of(rank):
        jobs.append((stages.f_starts[stage], stages.units * stages.f[stage], stages.f_tails[stage]))
        jobs.append((stages.b_starts[stage], stages.units * stages.b[stage], stages.b_tails[stage]))
        jobs.append((stages.b_starts[stage] + stages.b[stage], stages.units * stages.w[stage], 0.0))
    best = 0.0
    for first in {start for start, _, _ in jobs}:
        work = 0.0
        # From the longest tail to the shortest: each step's subset is all that has at least this tail.
        for _, job_work, tail in sorted((job for job in jobs if job[0] >= first), key=lambda job: -job[2]):
            work += job_work
            best = max(best, first + work + tail)
    return best


def _idle(stages: _Stages, rank: int, held: float) -> float:
    """Work, and what must be idle before the first B, on the ways and after the last F, with at most `held` on the rank."""
    own = sorted(stages.placement.stages_of(rank))
    first, last = own[0], own[-1]
    f_fit, all_f_fit = _most_f(stages, own, held)
    before = max(stages.f_starts[first], stages.b_starts[last] - f_fit)
    after_f = stages.f_tails[last] - _most_left(stages, own, held)
    after_b = stages.b_tails[first] - _most_w_left(stages, own, held)
    num_ways, way = _idle_ways(stages, own, held)
    # The time after the last B never meets the time before the first; the time after the last F can when all F come first.
    ends = before + num_ways * way + max(0.0, after_b)
    if all_f_fit:
        return stages.work(rank) + max(ends, after_f)
    return stages.work(rank) + max(ends, before + (num_ways - 1) * way + after_f)


def _idle_ways(stages: _Stages, own: list[int], held: float) -> tuple[int, float]:
    """How often the rank waits for a microbatch on its way to the last stage and back, and how long it must be idle each time.

    When k microbatches fit, microbatch j + k gets its last F on the rank after microbatch j has begun its first B there: the ways of
    0, k, 2k, ... follow each other. On the way of j, the rank has F for the room that is left beside j, and the B and W of what
    filled that room before.
    """
    whole = stages.num_splits * sum(stages.memory_b[stage] for stage in own)
    num_held = int(min(stages.num_microbatches, held / whole * (1 + SLACK))) if whole else 0
    if not num_held:
        return 0, 0.0
    room = held - whole
    busy = _most_f(stages, own, room)[0] + _most(_left(stages, own), room)
    return (stages.num_microbatches - 1) // num_held, max(0.0, _way(stages, own[-1]) - busy)


def _most_f(stages: _Stages, own: list[int], held: float) -> tuple[float, bool]:
    """The most time of F that fits at once, and whether all F of the rank fit."""
    everything = stages.units * sum(stages.memory_b[stage] for stage in own)
    time = _most([(stages.f[stage], stages.memory_b[stage], stages.units) for stage in own], held)
    return time, everything <= held * (1 + SLACK)


def _most_left(stages: _Stages, own: list[int], held: float) -> float:
    """The most time of B and W that can be left when the rank's last F ends; that F's own activation waits for B."""
    last = own[-1]
    return stages.b[last] + stages.w[last] + _most(_left(stages, own), held - stages.memory_b[last] * (1 - SLACK))


def _most_w_left(stages: _Stages, own: list[int], held: float) -> float:
    """The most time of W that can be left when the rank's last B ends; that B's own W follows, at memory_b in a BW."""
    first = own[0]
    room = held - min(stages.memory_b[first], stages.memory_w[first]) * (1 - SLACK)
    return stages.w[first] + _most([(stages.w[s], stages.memory_w[s], stages.units) for s in own], room)


def _left(stages: _Stages, own: list[int]) -> list[tuple[float, float, int]]:
    """What can be left to do of held activations, for `_most`: b + w at memory_b before B, w at memory_w before W."""
    parts = []
    for stage in own:
        b, w, memory_b, memory_w = stages.b[stage], stages.w[stage], stages.memory_b[stage], stages.memory_w[stage]
        if memory_w < memory_b and w * memory_b > (b + w) * memory_w:
            # More time for the memory before W: let all wait for W, then some of them for B instead.
            parts += [(w, memory_w, stages.units), (b, memory_b - memory_w, stages.units)]
        else:
            # Before B it counts for more; `_most` must know that before W it may fill a room too small for that.
            parts += [(b + w, memory_b, stages.units), (0.0, min(memory_w, memory_b), stages.units)]
    return parts


def _most(parts: Iterable[tuple[float, float, int]], room: float) -> float:
    """The most value that fits in `room`, of parts (value of one, size of one, number); fractions of one are allowed.

    Where all sizes are multiples of the smallest, room that no whole one fills is left out first.
    """
    parts = [part for part in parts if part[2]]
    free = sum(value * number for value, size, number in parts if not size)
    sized = [(value / size, size * number, size) for value, size, number in parts if size]
    if not sized or room <= 0:
        return free
    if room >= sum(size for _, size, _ in sized):
        return sum(value * number for value, _, number in parts)
    smallest = min(size for _, _, size in sized)
    if all(abs(size / smallest - round(size / smallest)) <= SLACK * size / smallest for _, _, size in sized):
        room = int(room / smallest * (1 + SLACK)) * smallest
    total = free
    for density, size, _ in sorted(sized, reverse=True):
        taken = min(size, room)
        total += density * taken
        room -= taken
    return total


def _area(stages: _Stages, rank: int, held: float) -> float:
    """The time that a rank needs to hold everything for as long as it must be held.

    Memory fills no faster than F run (and B, where memory_w is the larger) and empties no faster than B and W run. Where the time is
    long enough for both slopes, the corners above them are no part of the area.
    """
    own = stages.placement.stages_of(rank)
    largest = max(max(stages.memory_b[stage], stages.memory_w[stage]) for stage in own)
    if not 0 < largest <= held < float("inf"):
        return 0.0
    area = sum(stages.units * _held_time(stages, stage) for stage in own)
    # One op in progress holds all of its memory already, or still.
    slope = held - largest
    fill = slope * min(
        min(_ratio(stages.f[s], stages.memory_b[s]), _ratio(stages.f[s] + stages.b[s], stages.memory_w[s])) for s in own
    )
    drain = slope * min(
        min(_ratio(stages.b[s] + stages.w[s], stages.memory_b[s]), _ratio(stages.w[s], stages.memory_w[s])) for s in own
    )
    whole = (area + slope * (fill + drain) / 2) / held
    # A shorter time than both slopes take has less area than this time has: it is long enough when all of that is needed.
    return min(stages.f_starts[s] for s in own) + (whole if whole >= fill + drain else area / held)


def _held_time(stages: _Stages, stage: int) -> float:
    """Memory x time of one activation, at the least; a BW holds memory_b until its end."""
    memory_b, memory_w, w = stages.memory_b[stage], stages.memory_w[stage], stages.w[stage]
    return memory_b * (stages.f[stage] + _way(stages, stage) + stages.b[stage]) + min(memory_b, memory_w) * w


def _way(stages: _Stages, stage: int) -> float:
    """From the end of an F to the start of its B, at the least."""
    up = stages.f_starts[-1] + stages.f[-1] - stages.f_starts[stage] - stages.f[stage]
    return up + stages.b_starts[stage] - stages.b_starts[-1]


def _ratio(time: float, size: float) -> float:
    """Time for one unit of memory; what has no size never fills any."""
    return time / size if size else float("inf")
