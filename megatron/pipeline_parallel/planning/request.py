"""What the planning flags ask for: their values, the costs that these make, and the timed schedule that comes of both.

Messages name the flags, as the values come from them.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.pipeline_parallel.planning.bounds import ANY_SCHEDULE, Bound, lower_bound
from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.builders import placement as placement_of
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.formats import MAX_OPS
from megatron.pipeline_parallel.planning.greedy import MemoryLimitError
from megatron.pipeline_parallel.planning.op import OpKind, Placement
from megatron.pipeline_parallel.planning.quantities import Memory, enough, enough_memory
from megatron.pipeline_parallel.planning.simulate import simulate
from megatron.pipeline_parallel.planning.timeline import Timeline
from megatron.pipeline_parallel.planning.validate import ScheduleError, validate

ONE = Memory((1.0,), False)

_OPS_A_FORWARD = 7
"""F, B, W and the two messages' ends."""


class LimitError(ValueError):
    """A schedule holds more than --activation-memory-limit; `needed` is the smallest value of that flag that would do."""

    def __init__(self, text: str, needed: "Needed") -> None:
        super().__init__(text)
        self.needed = needed


class Needed(NamedTuple):
    """The smallest limit that fits, in both of its units."""

    share: float
    """Times what 1F1B holds on that rank; infinite where it books nothing there."""
    memory: float

    def text(self, in_bytes: bool) -> str:
        """The end of a message: the value as the flag takes it, both ways where memory is in bytes."""
        if self.share < float("inf"):
            share = enough(self.share)
            if in_bytes:
                return f"the smallest that fits is {enough_memory(self.memory)}, or {share} without a unit"
            return f"the smallest that fits is {share} ({enough(self.memory)} in the unit of --memory-b)"
        if in_bytes:
            return f"the smallest that fits is {enough_memory(self.memory)}"
        return "no multiple of what 1F1B holds does, as --memory-b is 0 on a rank; give memory and limit in bytes"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The values of the planning flags. Raises ValueError on more ops than can be planned, and on memory that mixes units."""

    pp_size: int
    num_microbatches: int
    chunks_per_rank: int | None = None
    num_sequence_splits: int | None = None
    group_size: int | None = None
    placement: Placement | None = None
    time_f: tuple[float, ...] = (1.0,)
    time_b: tuple[float, ...] = (1.0,)
    time_w: tuple[float, ...] = (1.0,)
    time_comm: tuple[float, ...] = (0.0,)
    """One number, or a row a rank of the times from it to each."""
    memory_b: Memory = ONE
    memory_w: Memory = ONE
    memory_message: Memory | None = None
    activation_memory_limit: Memory | None = None
    """In bytes, or a multiple of what 1F1B holds."""

    def __post_init__(self) -> None:
        chunks = self.placement.chunks_per_rank if self.placement else self.chunks_per_rank or 1
        splits = self.num_sequence_splits or 1
        num_ops = self.pp_size * chunks * self.num_microbatches * splits * _OPS_A_FORWARD
        if num_ops > MAX_OPS:
            raise ValueError(
                f"--pipeline-model-parallel-size {self.pp_size} * {chunks} chunks * --num-microbatches {self.num_microbatches} * "
                f"{splits} sequence splits make {num_ops} ops: at most {MAX_OPS} are planned, so lower one"
            )
        self._check_units()

    @property
    def in_bytes(self) -> bool:
        """Whether memory is in bytes."""
        return self.memory_b.in_bytes or self.memory_w.in_bytes

    @property
    def limit_in_bytes(self) -> bool:
        """Whether the limit is in bytes, and not a multiple of what 1F1B holds."""
        return self.activation_memory_limit is not None and self.activation_memory_limit.in_bytes

    def _check_units(self) -> None:
        for flag, memory in (
            ("--memory-b", self.memory_b),
            ("--memory-w", self.memory_w),
            ("--memory-message", self.memory_message),
        ):
            if memory is not None and memory.in_bytes != self.in_bytes and any(memory.values):
                default = " (its default is 1, without one)" if memory is ONE else ""
                has, others = ("bytes", "no unit") if memory.in_bytes else ("no unit", "bytes")
                raise ValueError(
                    f"{flag} has {has}{default} where other memory has {others}: give --memory-b, --memory-w and "
                    "--memory-message all in bytes, such as 1.5GiB, or all without a unit"
                )
        limit = self.activation_memory_limit
        if limit is not None and limit.in_bytes and not self.in_bytes:
            raise ValueError(
                f"--activation-memory-limit {enough_memory(limit.values[0])} is in bytes: give --memory-b and --memory-w in bytes, "
                "too, or the limit without a unit, as a multiple of what 1F1B holds"
            )


def make_timeline(name: str, request: Request) -> Timeline:
    """The schedule `name` for what is asked, validated and timed, without messages.

    ValueError on what the schedule or its costs cannot be, LimitError where it holds more than the limit.
    """
    problem = Problem(
        pp_size=request.pp_size,
        num_microbatches=request.num_microbatches,
        chunks_per_rank=request.chunks_per_rank,
        num_sequence_splits=request.num_sequence_splits,
        group_size=request.group_size,
        placement=request.placement,
    )
    placement = placement_of(name, problem)
    costs = make_costs(request, placement)
    try:
        schedule = build(name, replace(problem, costs=costs))
    except MemoryLimitError as error:
        raise _limit_error(name, error.smallest, costs, placement, request) from None
    try:
        validate(schedule, costs)
    except ScheduleError:
        if costs.device_limit is None:
            raise
        validate(schedule, replace(costs, device_limit=None))
        # So the limit is all that is wrong.
        timeline = simulate(schedule, costs)
        peaks = tuple(timeline.peak_memory(rank) for rank in range(request.pp_size))
        raise _limit_error(name, peaks, costs, placement, request) from None
    timeline = simulate(schedule, costs)
    if not timeline.makespan < float("inf"):
        raise ValueError(
            "the makespan is beyond what a number can hold: give --time-f, --time-b, --time-w, --time-comm smaller"
        )
    return timeline


def make_costs(request: Request, placement: Placement) -> CostModel:
    """The costs that the flags give stages placed so. ValueError where a list has another length than is needed."""
    v, p = placement.chunks_per_rank, placement.pp_size

    def each(flag: str, values: tuple[float, ...], parts: int = v) -> tuple[float, ...]:
        if len(values) == 1:
            return (values[0] / parts,) * placement.num_stages
        if len(values) != placement.num_stages:
            raise ValueError(f"{flag} has {len(values)} numbers: needs 1, or {p * v} (p * v = {p} * {v}), one a stage")
        return values

    costs = CostModel(
        f=each("--time-f", request.time_f),
        b=each("--time-b", request.time_b),
        w=each("--time-w", request.time_w),
        r=each("--time-f", request.time_f),
        comm=_comm(request.time_comm, p),
        memory_b=each("--memory-b", request.memory_b.values),
        memory_w=each("--memory-w", request.memory_w.values),
        # A chunk hands on as much as a whole rank does.
        message=each("--memory-message", request.memory_message.values, parts=1) if request.memory_message else (),
    )
    if request.activation_memory_limit is None:
        return costs
    limit = request.activation_memory_limit
    scale = (1.0,) * p if limit.in_bytes else held_by_1f1b(costs, placement, request.num_microbatches)
    return replace(costs, device_limit=tuple(limit.values[0] * part for part in scale))


def microbatch_memory(costs: CostModel, placement: Placement) -> tuple[float, ...]:
    """Memory of one microbatch's activations through all of a rank's chunks, a rank."""
    return tuple(sum(costs.memory_b[stage] for stage in placement.stages_of(rank)) for rank in range(placement.pp_size))


def held_by_1f1b(costs: CostModel, placement: Placement, num_microbatches: int) -> tuple[float, ...]:
    """What a limit of 1 stands for, a rank: min(m, p) microbatches of its own chunks."""
    most = min(num_microbatches, placement.pp_size)
    return tuple(most * memory for memory in microbatch_memory(costs, placement))


class PlanBound(NamedTuple):
    """A lower bound on a schedule's makespan, and which other schedules it is compared with."""

    bound: Bound
    among: str


def plan_bounds(timeline: Timeline) -> list[PlanBound]:
    """The bounds to print beside a schedule's makespan: within its limit where it has one, then at its own peak memory where that
    says more. None for a schedule that only evaluates.
    """
    schedule, costs = timeline.schedule, timeline.costs
    kinds = {op.kind for ops in schedule.ranks for op in ops}
    if not kinds & {OpKind.B, OpKind.BW}:
        return []
    peaks = tuple(timeline.peak_memory(rank) for rank in range(schedule.pp_size))
    found: list[PlanBound] = []
    for held, among in (
        (costs.device_limit, "within the limit"),
        (peaks, "at no more memory than this one, rank by rank"),
    ):
        if held is None:
            continue
        bound = lower_bound(
            schedule.placement,
            schedule.num_microbatches,
            costs,
            held,
            offloads=bool(kinds & _MOVES_MEMORY),
            num_sequence_splits=schedule.num_sequence_splits,
        )
        if not found or bound.value > found[-1].bound.value:
            found.append(PlanBound(bound, among if bound.holds_for != ANY_SCHEDULE else ANY_SCHEDULE))
    return found


_MOVES_MEMORY = frozenset({OpKind.R, OpKind.OFFLOAD_SEND_START})


def _comm(values: tuple[float, ...], p: int) -> float | tuple[tuple[float, ...], ...]:
    if len(values) == 1:
        return values[0]
    if len(values) != p * p:
        raise ValueError(
            f"--time-comm has {len(values)} numbers: needs 1, or {p * p} (p * p), a row a rank of the times from it to each"
        )
    return tuple(values[rank * p : (rank + 1) * p] for rank in range(p))


def _limit_error(
    name: str, smallest: tuple[float, ...], costs: CostModel, placement: Placement, request: Request
) -> LimitError:
    """What to say where a schedule needs `smallest` memory, a rank."""
    scale = held_by_1f1b(costs, placement, request.num_microbatches)
    shares = [memory / part if part else float("inf") if memory else 0.0 for memory, part in zip(smallest, scale)]
    needed = Needed(max(shares), max(smallest))
    limit = request.activation_memory_limit
    assert limit is not None
    given = enough_memory(limit.values[0]) if limit.in_bytes else enough(limit.values[0])
    return LimitError(
        f"--activation-memory-limit {given} is less than schedule {name!r} holds: {needed.text(request.in_bytes)}",
        needed,
    )
