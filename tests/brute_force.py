"""The best schedule of a small problem, by search over all orders; shares no code with the planner's bounds and simulator."""

from collections.abc import Iterator
from itertools import product

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement, Schedule


def all_orders(placement: Placement, num_microbatches: int, joint: bool = False) -> Iterator[Schedule]:
    """Every tuple of rank orders with each stage in microbatch order and F before B before W, those that get stuck included."""
    for ranks in product(
        *(tuple(_rank_orders(placement, rank, num_microbatches, joint)) for rank in range(placement.pp_size))
    ):
        yield Schedule(name="any", placement=placement, num_microbatches=num_microbatches, ranks=ranks)


def _rank_orders(placement: Placement, rank: int, num_microbatches: int, joint: bool) -> Iterator[tuple[Op, ...]]:
    kinds = (OpKind.F, OpKind.BW) if joint else (OpKind.F, OpKind.B, OpKind.W)
    stages = placement.stages_of(rank)

    def grow(order: tuple[Op, ...], done: dict[tuple[int, OpKind], int]) -> Iterator[tuple[Op, ...]]:
        if len(order) == len(stages) * len(kinds) * num_microbatches:
            yield order
        for stage in stages:
            for before, kind in zip((None, *kinds), kinds):
                count = done[stage, kind]
                if count < (num_microbatches if before is None else done[stage, before]):
                    op = Op(kind, stage, placement.chunk_of(stage), count)
                    yield from grow((*order, op), {**done, (stage, kind): count + 1})

    yield from grow((), {(stage, kind): 0 for stage in stages for kind in kinds})


def best_schedule(
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    limit: tuple[float, ...] | None = None,
    joint: bool = False,
    splits: int = 1,
) -> tuple[float, Schedule] | None:
    """The shortest makespan of all orders that hold at most `limit` a rank, and an order that has it; None when nothing fits.

    With `joint` every backward is a BW, else B and W. The W of a microbatch's `splits` go in the order of its B, last split first.
    """
    search = _Search(placement, num_microbatches, costs, limit, joint, splits)
    search.extend(search.start())
    if search.best_orders is None:
        return None
    kinds = (OpKind.F, OpKind.BW if joint else OpKind.B, OpKind.W)

    def op(stage: int, kind: int, unit: int) -> Op:
        microbatch, turn = divmod(unit, splits)
        split = turn if kind == F else splits - 1 - turn
        return Op(kinds[kind], stage, placement.chunk_of(stage), microbatch, split)

    return search.best, Schedule(
        name="best",
        placement=placement,
        num_microbatches=num_microbatches,
        num_sequence_splits=splits,
        ranks=tuple(tuple(op(*place) for place in order) for order in search.best_orders),
    )


class _State:
    """Part of a schedule: what each rank has done, and what it has decided to do next while the message for it is not there yet."""

    def __init__(self, num_ranks: int, num_stages: int, num_units: int) -> None:
        self.counts = [[0, 0, 0] for _ in range(num_stages)]
        """F, B and W done, a stage; they go in order of microbatch and split, so that this says which."""
        self.clock = [0.0] * num_ranks
        self.memory = [0.0] * num_ranks
        self.decided: list[tuple[int, int] | None] = [None] * num_ranks
        """(stage, kind)"""
        self.arrival = {
            (stage, kind, unit): LATER for stage in range(num_stages) for kind in (F, B) for unit in range(num_units)
        }
        """When the input of an F or B is there; 0 once it is used."""
        self.orders: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]

    def copy(self) -> "_State":
        new = object.__new__(_State)
        new.counts = [list(counts) for counts in self.counts]
        new.clock, new.memory, new.decided = list(self.clock), list(self.memory), list(self.decided)
        new.arrival = dict(self.arrival)
        new.orders = [list(order) for order in self.orders]
        return new


F, B, W = range(3)
LATER = float("inf")


class _Search:
    """Depth first: the rank that is free first decides what it does next, so that every tuple of rank orders is met once.

    A state is left when its own simple bound is no better than the best schedule so far, or when one that was seen before
    had done and decided the same, with no clock and no message later than here.
    """

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: CostModel,
        limit: tuple[float, ...] | None,
        joint: bool,
        splits: int,
    ) -> None:
        self.placement, self.costs, self.joint, self.splits = placement, costs, joint, splits
        self.units = num_microbatches * splits
        self.limit = [float("inf")] * placement.pp_size if limit is None else [most * (1 + 1e-9) for most in limit]
        self.rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        self.own = [sorted(placement.stages_of(rank)) for rank in range(placement.pp_size)]
        self.last = placement.num_stages - 1
        b = [b + w for b, w in zip(costs.b, costs.w)] if joint else costs.b
        self.time = [[time / splits for time in times] for times in (costs.f, b, costs.w)]
        self.to_do = [(self.units, self.units, 0 if joint else self.units)] * placement.num_stages
        self.tail = self._tails()
        self.best, self.best_orders = float("inf"), None
        self.seen: dict[tuple, list[list[float]]] = {}

    def _next(self, stage: int, kind: int) -> tuple[int, int, float] | None:
        """The stage and kind that uses what an op makes, and the time of the message to it."""
        if kind == W or (stage, kind) == (0, B):
            return None
        other, other_kind = (stage + 1, F) if kind == F else (stage - 1, B)
        if other > self.last:
            other, other_kind = stage, B
        ranks = self.rank_of[stage], self.rank_of[other]
        return other, other_kind, 0.0 if ranks[0] == ranks[1] else self.costs.message_time(*ranks)

    def _tails(self) -> dict[tuple[int, int], float]:
        """The least time from the end of an op to the end of its microbatch."""
        tail = {(stage, W): 0.0 for stage in range(self.last + 1)}
        order = [(stage, B) for stage in range(self.last + 1)] + [(stage, F) for stage in range(self.last, -1, -1)]
        for stage, kind in order:
            after = self._next(stage, kind)
            own_w = self.time[W][stage] if kind == B and not self.joint else 0.0
            on = after[2] + self.time[after[1]][after[0]] + tail[after[:2]] if after else 0.0
            tail[stage, kind] = max(own_w, on)
        return tail

    def start(self) -> _State:
        state = _State(self.placement.pp_size, self.last + 1, self.units)
        for unit in range(self.units):
            state.arrival[0, F, unit] = 0.0
        return state

    def extend(self, state: _State) -> None:
        """Search everything that begins as `state` does."""
        free = [rank for rank, decided in enumerate(state.decided) if decided is None and self._left(state, rank)]
        if not free:
            if all(decided is None for decided in state.decided) and max(state.clock) < self.best:
                self.best, self.best_orders = max(state.clock), state.orders
            return
        if self._bound(state) >= self.best * (1 - 1e-12) or self._seen_better(state):
            return
        rank = min(free, key=lambda rank: state.clock[rank])
        for stage, kind in self._choices(state, rank):
            new = state.copy()
            self._decide(new, rank, stage, kind)
            self.extend(new)

    def _left(self, state: _State, rank: int) -> float | bool:
        return any(
            state.counts[stage][kind] < self.to_do[stage][kind] for stage in self.own[rank] for kind in (F, B, W)
        )

    def _choices(self, state: _State, rank: int) -> list[tuple[int, int]]:
        """What a rank may do next, late kinds first: that finds good schedules soon."""
        choices, own = [], self.own[rank]
        for kind in (B, F, W):
            for index, stage in enumerate(own):
                counts = state.counts[stage]
                # Of a rank's stages, the ones that a microbatch passes before.
                earlier = {F: own[:index], B: own[index + 1 :], W: ()}[kind]
                # A backward needs all splits' forwards, as it begins with the last split.
                before = {F: self.units, B: counts[F] // self.splits * self.splits, W: counts[B]}[kind]
                most = min([before] + [state.counts[stage][kind] for stage in earlier])
                if counts[kind] < min(most, self.to_do[stage][kind]) and self._fits(state, rank, stage, kind):
                    choices.append((stage, kind))
        return choices

    def _change(self, stage: int, kind: int) -> float:
        """Memory booked by an F, or left less by the end of a B or W."""
        memory_b, memory_w = self.costs.memory_b[stage], 0.0 if self.joint else self.costs.memory_w[stage]
        return (memory_b, memory_w - memory_b, -memory_w)[kind] / self.splits

    def _fits(self, state: _State, rank: int, stage: int, kind: int) -> bool:
        return state.memory[rank] + self._change(stage, kind) <= self.limit[rank]

    def _decide(self, state: _State, rank: int, stage: int, kind: int) -> None:
        state.decided[rank] = (stage, kind)
        awake = [rank]
        while awake:
            rank = awake.pop()
            if state.decided[rank] is None:
                continue
            stage, kind = state.decided[rank]
            unit = state.counts[stage][kind]
            ready = 0.0 if kind == W else state.arrival[stage, kind, unit]
            if ready == LATER:
                continue
            end = state.clock[rank] = max(state.clock[rank], ready) + self.time[kind][stage]
            if kind != W:
                state.arrival[stage, kind, unit] = 0.0
            state.memory[rank] += self._change(stage, kind)
            state.counts[stage][kind] += 1
            state.orders[rank].append((stage, kind, unit))
            state.decided[rank] = None
            awake += self._hand_on(state, stage, kind, unit, end)

    def _hand_on(self, state: _State, stage: int, kind: int, unit: int, end: float) -> list[int]:
        """Note when what an op made is where it is used; returns the rank that uses it."""
        after = self._next(stage, kind)
        if after is None:
            return []
        units = [unit]
        if after[1] != kind:
            # The turn, at the last stage: the last split's F is needed by the first B.
            units = range(unit - self.splits + 1, unit + 1) if (unit + 1) % self.splits == 0 else []
        for other in units:
            state.arrival[after[0], after[1], other] = end + after[2]
        return [self.rank_of[after[0]]]

    def _bound(self, state: _State) -> float:
        """No schedule that begins like this ends sooner: each rank's work left, and each stage's last F and last B."""
        bound = 0.0
        for rank, own in enumerate(self.own):
            work = sum(
                (self.to_do[stage][kind] - state.counts[stage][kind]) * self.time[kind][stage]
                for stage in own
                for kind in (F, B, W)
            )
            bound = max(bound, state.clock[rank] + work)
        starts: dict[tuple[int, int], float] = {}
        stages = range(self.last + 1)
        for stage, kind in [(stage, F) for stage in stages] + [(stage, B) for stage in reversed(stages)]:
            left = self.units - state.counts[stage][kind]
            if not left:
                continue
            ready = state.arrival[stage, kind, state.counts[stage][kind]]
            if ready == LATER:
                before = (stage - 1, F) if kind == F else (stage, F) if stage == self.last else (stage + 1, B)
                ready = starts[before] + self.time[before[1]][before[0]] + self._next(*before)[2]
            start = starts[stage, kind] = max(state.clock[self.rank_of[stage]], ready)
            bound = max(bound, start + left * self.time[kind][stage] + self.tail[stage, kind])
        return bound

    def _seen_better(self, state: _State) -> bool:
        key = (tuple(map(tuple, state.counts)), tuple(state.decided))
        times = [*state.clock, *state.arrival.values()]
        front = self.seen.setdefault(key, [])
        if any(all(old <= new for old, new in zip(other, times)) for other in front):
            return True
        front[:] = [other for other in front if not all(new <= old for old, new in zip(other, times))]
        front.append(times)
        return False
