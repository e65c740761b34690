"""What is said about a timed schedule in words: what it is for, and its figures."""

from collections.abc import Sequence

from megatron.pipeline_parallel.planning.bounds import ANY_SCHEDULE
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Placement
from megatron.pipeline_parallel.planning.quantities import memory_text
from megatron.pipeline_parallel.planning.request import PlanBound, held_by_1f1b, microbatch_memory
from megatron.pipeline_parallel.planning.timeline import Timeline

_WIDTH = 26
"""Of the first column."""


def head_text(timeline: Timeline, in_bytes: bool = False) -> str:
    """What a schedule is for: sizes, times, memory and limit."""
    schedule, costs = timeline.schedule, timeline.costs
    placement = schedule.placement
    sizes = f"p = {placement.pp_size}, v = {placement.chunks_per_rank}, m = {schedule.num_microbatches}"
    if schedule.num_sequence_splits > 1:
        sizes += f", {schedule.num_sequence_splits} sequence splits a microbatch"
    rows = [
        ("schedule", schedule.name),
        ("sizes", f"{sizes}, placement {placement.name}"),
        ("times a stage", f"F {_each(costs.f)}, B {_each(costs.b)}, W {_each(costs.w)}, message {_comm(costs)}"),
        ("memory a stage", _memory(costs.memory_b, costs.memory_w, in_bytes)),
    ]
    for word, limit in (("limit", costs.device_limit), ("host memory limit", costs.host_limit)):
        if limit is not None:
            rows.append((word, _limit(limit, costs, placement, schedule.num_microbatches, in_bytes)))
    return _aligned(rows)


def asked_text(timeline: Timeline, in_bytes: bool = False) -> str:
    """What all schedules of a comparison are for, whatever their chunks: times and memory are through a whole rank."""
    schedule, costs, placement = timeline.schedule, timeline.costs, timeline.schedule.placement

    def whole(values: Sequence[float]) -> tuple[float, ...]:
        ranks = range(placement.pp_size)
        return tuple(sum(values[stage] for stage in placement.stages_of(rank)) for rank in ranks)

    times = f"F {_each(whole(costs.f))}, B {_each(whole(costs.b))}, W {_each(whole(costs.w))}, message {_comm(costs)}"
    rows = [("sizes", f"p = {placement.pp_size}, m = {schedule.num_microbatches}"), ("times a rank", times)]
    rows.append(("memory a rank", _memory(whole(costs.memory_b), whole(costs.memory_w), in_bytes)))
    if costs.device_limit is not None:
        rows.append(("limit", _limit(costs.device_limit, costs, placement, schedule.num_microbatches, in_bytes)))
    return _aligned(rows)


def summary_text(timeline: Timeline, bounds: Sequence[PlanBound], in_bytes: bool = False) -> str:
    """The figures of a schedule, each bubble rate named, and how far the makespan is above the bounds."""
    ranks = range(timeline.schedule.pp_size)
    peaks = [timeline.peak_memory(rank) for rank in ranks]
    rows = [
        ("makespan", f"{timeline.makespan:.6g}"),
        ("bubble rate", f"{timeline.bubble_rate:.4f} of the rectangle of ranks and makespan"),
        ("span bubble rate", f"{timeline.span_bubble_rate:.4f} of the longest span, a rank's first F to its last op"),
        ("peak", f"{_numbers([timeline.peak(rank) for rank in ranks])} microbatches, a rank"),
        ("peak memory", f"{' '.join(memory_text(peak, in_bytes) for peak in peaks)}, a rank"),
        ("messages", _messages(timeline, in_bytes)),
    ]
    copies = [timeline.traffic(rank) for rank in ranks]
    if any(traffic.copies for traffic in copies):
        size = memory_text(sum(traffic.copy_size for traffic in copies), in_bytes)
        rows.append(("copies to and from host", f"{sum(traffic.copies for traffic in copies)}, together {size}"))
        host = [memory_text(timeline.peak_host_memory(rank), in_bytes) for rank in ranks]
        rows.append(("peak host memory", f"{' '.join(host)}, a rank"))
    for bound, among in bounds:
        ratio = f"; this makespan is {timeline.makespan / bound.value:.4f} of it" if bound.value else ""
        rows.append(("lower bound", f"{bound.value:.6g} {'for ' if among == ANY_SCHEDULE else ''}{among}{ratio}"))
    return _aligned(rows)


def check_drawable(timeline: Timeline) -> None:
    """Raise ValueError where a grid over time would be larger than anyone reads: idle times far longer than the ops."""
    ranks = range(timeline.schedule.pp_size)
    durations = [slot.end - slot.start for rank in ranks for slot in timeline.compute(rank)]
    longest = max(durations, default=0.0)
    # The grid leaves out ops shorter than that.
    shortest = min((time for time in durations if time >= longest / 64 > 0), default=longest or 1.0)
    size = len(ranks) * timeline.makespan / shortest
    if size > _LARGEST_GRID:
        raise ValueError(
            f"the grid would be {timeline.makespan / shortest:.3g} of its shortest ops wide: show it with --streams, or give "
            "--time-f, --time-b, --time-w and --time-comm that are closer together"
        )


_LARGEST_GRID = 10_000_000
"""Places for an op: ranks times width."""


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, the first on the left, the others on the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{word.ljust(_WIDTH)}{text}" for word, text in rows)


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)


def _each(values: Sequence[float]) -> str:
    return f"{values[0]:.6g}" if len(set(values)) == 1 else f"({_numbers(values)})"


def _comm(costs: CostModel) -> str:
    if isinstance(costs.comm, (int, float)):
        return f"{costs.comm:.6g}"
    return "(" + "; ".join(map(_numbers, costs.comm)) + ")"


def _memory(memory_b: Sequence[float], memory_w: Sequence[float], in_bytes: bool) -> str:
    def each(values: Sequence[float]) -> str:
        texts = [memory_text(value, in_bytes) for value in values]
        return texts[0] if len(set(texts)) == 1 else f"({', '.join(texts)})"

    ratios = [w / b if b else float("inf") if w else 0.0 for w, b in zip(memory_w, memory_b)]
    return f"M_B {each(memory_b)}, M_W {each(memory_w)}, M_W/M_B {_each(ratios)}"


def _limit(limit: Sequence[float], costs: CostModel, placement: Placement, m: int, in_bytes: bool) -> str:
    """A limit as memory, in microbatches, and as a multiple of what 1F1B holds; a number a rank where they differ."""
    shares = [value / one if one else float("inf") for value, one in zip(limit, held_by_1f1b(costs, placement, m))]
    counts = [value / one if one else float("inf") for value, one in zip(limit, microbatch_memory(costs, placement))]
    memory = [memory_text(value, in_bytes) for value in limit]
    memory_a_rank = memory[0] if len(set(memory)) == 1 else f"({', '.join(memory)})"
    if any(share == float("inf") for share in shares):
        return f"{memory_a_rank} a rank"
    return f"{memory_a_rank} a rank = {_each(counts)} microbatches of M_B = {_each(shares)} of what 1F1B holds"


def _messages(timeline: Timeline, in_bytes: bool) -> str:
    traffic = [timeline.traffic(rank) for rank in range(timeline.schedule.pp_size)]
    count = sum(part.messages for part in traffic)
    sizes = [part.message_size for part in traffic]
    if any(size is None for size in sizes):
        return f"{count}, of unknown size (--memory-message)"
    return f"{count}, together {memory_text(sum(sizes), in_bytes)}"
