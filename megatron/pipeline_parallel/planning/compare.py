"""All schedules side by side: those that fit what is asked, in a table, and why the others do not."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron.pipeline_parallel.planning import builders
from megatron.pipeline_parallel.planning.quantities import memory_text
from megatron.pipeline_parallel.planning.report import asked_text, table_text
from megatron.pipeline_parallel.planning.request import LimitError, Needed, Request, make_timeline, plan_bounds
from megatron.pipeline_parallel.planning.timeline import Timeline
from megatron.pipeline_parallel.planning.validate import ScheduleError

HEADER = ("schedule", "v", "bubble rate", "span bubble rate", "makespan", "peak", "peak memory", "messages", "bound")

_LEGEND = (
    "bubble rate: of the rectangle of ranks and makespan; span bubble rate: of the longest span; peak: microbatches on the rank that\n"
    "holds most; bound: no schedule of this placement ends earlier "
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found of each schedule."""

    fitting: tuple[tuple[str, Timeline], ...]
    """By makespan, then by peak."""
    left_out: tuple[tuple[str, str], ...]
    """A schedule and the reason, in one line."""
    needed: Needed | None
    """The smallest limit at which one of those fits that only the limit keeps out."""


def compare(names: Iterable[str], request: Request) -> Comparison:
    """Time every schedule of `names` that fits. Fields of `request` that mean nothing to a schedule are left out for it."""
    fitting: list[tuple[str, Timeline]] = []
    left_out: list[tuple[str, str]] = []
    needed: list[Needed] = []
    for name in names:
        try:
            fitting.append((name, make_timeline(name, _meant_for(name, request))))
        except ScheduleError:
            # A builder's own fault, not one of what was asked.
            raise
        except ValueError as error:
            left_out.append((name, str(error).splitlines()[0]))
            needed += [error.needed] if isinstance(error, LimitError) else []
    return Comparison(
        fitting=tuple(sorted(fitting, key=lambda pair: (_rounded(pair[1].makespan), _peak(pair[1]), pair[0]))),
        left_out=tuple(left_out),
        needed=min(needed, default=None, key=lambda one: one.memory if request.limit_in_bytes else one.share),
    )


def comparison_text(comparison: Comparison, request: Request) -> str:
    """What was asked, the table, what its columns mean, what holds for some schedules only, and what is left out."""
    in_bytes = request.in_bytes
    first = comparison.fitting[0][1]
    lines = [asked_text(first, in_bytes), ""]
    lines += [table_text(HEADER, [_row(name, timeline, in_bytes) for name, timeline in comparison.fitting])]
    lines += ["", _LEGEND + ("within the limit" if first.costs.device_limit else "at the schedule's own peak memory")]
    for field, flag in _FOR_SOME.items():
        if getattr(request, field) is not None:
            takers = [name for name, _ in comparison.fitting if field in builders.takes(name)]
            lines.append(f"{flag} holds for {', '.join(takers) or 'none of these'}; the others have none or their own")
    if comparison.left_out:
        lines += ["", "left out:"] + [f"  {name}: {reason}" for name, reason in comparison.left_out]
    return "\n".join(lines)


_FOR_SOME = {
    "placement": "--placement",
    "num_sequence_splits": "--num-seq-splits",
    "group_size": "--interleave-group-size",
}


def _meant_for(name: str, request: Request) -> Request:
    takes = builders.takes(name)
    return replace(
        request,
        num_sequence_splits=request.num_sequence_splits if "num_sequence_splits" in takes else None,
        group_size=request.group_size if "group_size" in takes else None,
        placement=request.placement if "placement" in takes else None,
    )


def _rounded(makespan: float) -> float:
    """Makespans that only the order of additions tells apart are one."""
    return float(f"{makespan:.9g}")


def _peak(timeline: Timeline) -> float:
    return max(map(timeline.peak, range(timeline.schedule.pp_size)))


def _row(name: str, timeline: Timeline, in_bytes: bool) -> tuple[str, ...]:
    ranks = range(timeline.schedule.pp_size)
    return (
        name,
        str(timeline.schedule.placement.chunks_per_rank),
        f"{timeline.bubble_rate:.4f}",
        f"{timeline.span_bubble_rate:.4f}",
        f"{timeline.makespan:.6g}",
        f"{_peak(timeline):.4g}",
        memory_text(max(map(timeline.peak_memory, ranks)), in_bytes),
        str(sum(timeline.traffic(rank).messages for rank in ranks)),
        f"{plan_bounds(timeline)[0].bound.value:.6g}",
    )
