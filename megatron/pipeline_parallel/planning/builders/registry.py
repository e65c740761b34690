"""The registry of schedules: what a builder is given, what it returns, and how it is found by name."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.names import DESIGNED
from megatron.pipeline_parallel.planning.op import Op, Placement, Schedule

Orders = list[list[Op]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be scheduled. Raises ValueError on sizes below 1."""

    pp_size: int
    num_microbatches: int
    chunks_per_rank: int | None = None
    """None for what the schedule has by nature: 1 on a straight placement, 2 where it is about chunks."""
    num_sequence_splits: int | None = None
    """None for what the schedule has by nature: 2 where it is about sequence splits, else 1."""
    group_size: int | None = None
    """Microbatches that go through a chunk before the next chunk's turn, in schedules that have groups; None for their default."""
    placement: Placement | None = None
    """Where the stages lie; None for the schedule's own placement."""
    costs: CostModel | None = None
    """Times and memory that an order may be fitted to, and the limit that it must keep; None for equal stages, no limit."""
    effort: int | None = None
    """Ops that a search may place; 0 for closed forms and greedy orders alone, None for the usual effort."""

    def __post_init__(self) -> None:
        for name in ("pp_size", "num_microbatches", "chunks_per_rank", "num_sequence_splits", "group_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} = {value}: needs a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class Builder:
    """A registered schedule."""

    name: str
    summary: str
    order: Callable[[Problem], Orders]
    placement: Callable[[Problem], Placement]
    takes: frozenset[str]
    """Which of a Problem's optional fields mean something to it, of 'num_sequence_splits', 'group_size', 'placement'."""


def one_chunk(problem: Problem) -> Placement:
    """One stage a rank; ValueError when more chunks are asked for."""
    if problem.chunks_per_rank not in (None, 1):
        raise ValueError(f"one chunk a rank, got {problem.chunks_per_rank} chunks")
    return Placement.loop(problem.pp_size)


def two_chunks_v(problem: Problem) -> Placement:
    """Two chunks a rank, placed as a V; ValueError when another number is asked for."""
    if problem.chunks_per_rank not in (None, 2):
        raise ValueError(f"two chunks a rank, got {problem.chunks_per_rank}")
    return Placement.v(problem.pp_size)


def chunks(default: int) -> Callable[[Problem], Placement]:
    """Any number of chunks a rank, in a loop."""
    return lambda problem: Placement.loop(problem.pp_size, problem.chunks_per_rank or default)


def in_turn(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    """1F1B's order of one rank: `warmup` forwards (all, where there are no more), an F and a backward in turn, the other backwards."""
    warmup = min(warmup, len(forwards))
    steady = [op for pair in zip(forwards[warmup:], backwards) for op in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


_BUILDERS: dict[str, Builder] = {}


def schedule(
    name: str,
    summary: str,
    placement: Callable[[Problem], Placement] = one_chunk,
    takes: Collection[str] = (),
) -> Callable[[Callable[[Problem], Orders]], Callable[[Problem], Orders]]:
    """Register the decorated function under `name`; ValueError when the name is taken."""

    def register(order: Callable[[Problem], Orders]) -> Callable[[Problem], Orders]:
        if name in _BUILDERS:
            raise ValueError(f"schedule {name!r} is registered already")
        _BUILDERS[name] = Builder(name=name, summary=summary, order=order, placement=placement, takes=frozenset(takes))
        return order

    return register


def names() -> list[str]:
    """The names of all schedules that are built: the design's own in its order, then others as they were registered."""
    own = [name for name in DESIGNED if name in _BUILDERS]
    return own + [name for name in _BUILDERS if name not in own]


def summary(name: str) -> str:
    """What a schedule is good for, in a line."""
    return _BUILDERS[name].summary


def takes(name: str) -> frozenset[str]:
    """Which optional fields of a Problem mean something to a schedule: 'num_sequence_splits', 'group_size', 'placement'."""
    return _BUILDERS[name].takes


def placement(name: str, problem: Problem) -> Placement:
    """Where a schedule puts its stages. ValueError on an unknown name or on sizes that the schedule does not have."""
    if name not in _BUILDERS:
        raise ValueError(f"unknown schedule {name!r}; built: {', '.join(names())}")
    builder, given = _BUILDERS[name], problem.placement
    if problem.num_sequence_splits not in (None, 1) and "num_sequence_splits" not in builder.takes:
        raise ValueError(
            f"schedule {name!r} has no sequence splits, got num_sequence_splits {problem.num_sequence_splits}"
        )
    if problem.group_size is not None and "group_size" not in builder.takes:
        raise ValueError(f"schedule {name!r} has no groups to size, got group_size {problem.group_size}")
    if given is not None and "placement" in builder.takes:
        return _checked(given, problem)
    try:
        own = builder.placement(problem)
    except ValueError as error:
        raise ValueError(f"schedule {name!r} has {error}") from None
    if given is not None and given.stages != own.stages:
        raise ValueError(f"schedule {name!r} has a placement of its own, {own.name}, got placement {given.name}")
    return own


def _checked(given: Placement, problem: Problem) -> Placement:
    if given.pp_size != problem.pp_size or problem.chunks_per_rank not in (None, given.chunks_per_rank):
        wanted = f"{problem.pp_size} ranks" + (f" of {problem.chunks_per_rank}" if problem.chunks_per_rank else "")
        raise ValueError(
            f"placement {given.name!r} is for {given.pp_size} ranks of {given.chunks_per_rank} chunks, not for {wanted}"
        )
    return given


def build(name: str, problem: Problem) -> Schedule:
    """The compute order of a schedule, not yet validated. ValueError as from `placement`, and where costs do not fit."""
    place = placement(name, problem)
    costs = problem.costs or CostModel.uniform(place)
    costs.check_fits(place)
    splits = problem.num_sequence_splits or (2 if "num_sequence_splits" in _BUILDERS[name].takes else 1)
    filled = replace(
        problem, chunks_per_rank=place.chunks_per_rank, num_sequence_splits=splits, placement=place, costs=costs
    )
    return Schedule(
        name=name,
        placement=place,
        num_microbatches=problem.num_microbatches,
        num_sequence_splits=splits,
        ranks=tuple(map(tuple, _BUILDERS[name].order(filled))),
    )
