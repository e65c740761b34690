"""The registry of schedules: what a builder is given, what it returns, and how it is found by name."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.pipeline_parallel.planning.op import Op, Placement, Schedule

Orders = list[list[Op]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be scheduled. Raises ValueError on sizes below 1."""

    pp_size: int
    num_microbatches: int
    chunks_per_rank: int = 1

    def __post_init__(self) -> None:
        for name in ("pp_size", "num_microbatches", "chunks_per_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: needs at least 1")


@dataclass(frozen=True, kw_only=True)
class Builder:
    """A registered schedule."""

    name: str
    summary: str
    order: Callable[[Problem], Orders]
    placement: Callable[[Problem], Placement]


def one_chunk(problem: Problem) -> Placement:
    """One stage a rank; ValueError when more chunks are asked for."""
    if problem.chunks_per_rank != 1:
        raise ValueError(f"one chunk a rank, got {problem.chunks_per_rank} chunks")
    return Placement.loop(problem.pp_size)


_BUILDERS: dict[str, Builder] = {}


def schedule(
    name: str, summary: str, placement: Callable[[Problem], Placement] = one_chunk
) -> Callable[[Callable[[Problem], Orders]], Callable[[Problem], Orders]]:
    """Register the decorated function under `name`; ValueError when the name is taken."""

    def register(order: Callable[[Problem], Orders]) -> Callable[[Problem], Orders]:
        if name in _BUILDERS:
            raise ValueError(f"schedule {name!r} is registered already")
        _BUILDERS[name] = Builder(name=name, summary=summary, order=order, placement=placement)
        return order

    return register


def names() -> list[str]:
    """The names of all schedules that are built, in the order of registration."""
    return list(_BUILDERS)


def placement(name: str, problem: Problem) -> Placement:
    """Where a schedule puts its stages. ValueError on an unknown name or on sizes that the schedule does not have."""
    if name not in _BUILDERS:
        raise ValueError(f"unknown schedule {name!r}; built: {', '.join(names())}")
    try:
        return _BUILDERS[name].placement(problem)
    except ValueError as error:
        raise ValueError(f"schedule {name!r} has {error}") from None


def build(name: str, problem: Problem) -> Schedule:
    """The compute order of a schedule. ValueError as from `placement`."""
    return Schedule(
        name=name,
        placement=placement(name, problem),
        num_microbatches=problem.num_microbatches,
        ranks=tuple(map(tuple, _BUILDERS[name].order(problem))),
    )
