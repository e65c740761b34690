"""Schedules as text grids."""

from math import ceil
from typing import NamedTuple

from megatron.pipeline_parallel.planning.dataflow import waits_for
from megatron.pipeline_parallel.planning.op import Op, OpKind, Schedule
from megatron.pipeline_parallel.planning.simulate import Timeline

_SHORT = {
    OpKind.SEND_FORWARD: "SF",
    OpKind.RECV_FORWARD: "RF",
    OpKind.SEND_BACKWARD: "SB",
    OpKind.RECV_BACKWARD: "RB",
    OpKind.OFFLOAD_SEND_START: "OSS",
    OpKind.OFFLOAD_SEND_END: "OSE",
    OpKind.OFFLOAD_RECV_PREP: "ORP",
    OpKind.OFFLOAD_RECV_START: "ORS",
    OpKind.OFFLOAD_RECV_END: "ORE",
}

GRID_WIDTH = 5
"""Positions that a grid around one cell shows on either side."""


def short(op: Op) -> str:
    """A grid cell: ``F2.5`` is F of stage 2, microbatch 5; ``F2.5/1`` of its sequence split 1."""
    split = f"/{op.sequence_split}" if op.sequence_split else ""
    return f"{_SHORT.get(op.kind, op.kind)}{op.stage}.{op.microbatch}{split}"


def step_grid(
    schedule: Schedule, marked: frozenset[tuple[int, int]] = frozenset(), *, around: int | None = None
) -> str:
    """Ranks down, positions in the program across, the cells of `marked` (rank, position) between ``>`` and ``<``.

    With `around`, only positions within `GRID_WIDTH` of it are shown.
    """
    longest = max(map(len, schedule.ranks), default=0)
    first = 0 if around is None else max(0, around - GRID_WIDTH)
    last = longest if around is None else min(longest, around + GRID_WIDTH + 1)
    rows = [["step", *map(str, range(first, last))]]
    for rank, ops in enumerate(schedule.ranks):
        cells = [f"rank {rank}"]
        for position in range(first, last):
            cell = short(ops[position]) if position < len(ops) else ""
            cells.append(f">{cell}<" if (rank, position) in marked else cell)
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(" ".join(cell.ljust(size) for cell, size in zip(row, widths)).rstrip() for row in rows)


def label(op: Op, chunks_per_rank: int) -> str:
    """A compute op in a grid over time: ``F3`` is F of microbatch 3, ``F3b`` in chunk 1 where there are several, ``F3b/1`` of split 1."""
    chunk = "" if chunks_per_rank == 1 else chunk_letter(op.chunk)
    split = f"/{op.sequence_split}" if op.sequence_split else ""
    return f"{op.kind}{op.microbatch}{chunk}{split}"


def chunk_letter(chunk: int) -> str:
    """``a`` for chunk 0, ``b`` for chunk 1; ``c26`` where letters run out."""
    return chr(ord("a") + chunk) if chunk < 26 else f"c{chunk}"


def time_grid(timeline: Timeline) -> str:
    """Ranks down, time across: each compute op prints its `label` from its start on.

    The scale is the smallest at which every label fits and, where times have a common step, every op starts at a whole column.
    """
    return "\n".join(row.rstrip() for row in _rows(timeline, _axes(timeline, gap=0), idle=" "))


def show_text(timeline: Timeline) -> str:
    """As `time_grid`, with dots where a rank idles, a ``|`` at the end, a line that says how to read it, and a time axis.

    Ops too short to draw beside the others are listed below the grid, so that each op is seen.
    """
    axes = _axes(timeline, gap=1)
    rows = _rows(timeline, axes, idle=".")
    lines = [_legend(timeline, axes), _ticks(timeline, axes), *(f"{row}|" for row in rows)]
    short = [
        _name(rank, timeline) + ", ".join(cells)
        for rank in range(len(rows))
        if (cells := _not_drawn(timeline, rank, axes))
    ]
    return "\n".join(lines + (["too short to draw:", *short] if short else []))


class _Axes(NamedTuple):
    """How a timeline is drawn."""

    scale: float
    """Columns a unit of time."""
    least: float
    """Length of the shortest op that is drawn."""


_SHORTEST = 1 / 64
"""An op shorter than this part of the longest is not drawn: the others would have to be that much wider."""


def _axes(timeline: Timeline, gap: int) -> _Axes:
    """As few columns as let every label fit with `gap` blanks behind it."""
    slots = [slot for rank in range(len(timeline.slots)) for slot in timeline.compute(rank)]
    least = max((slot.end - slot.start for slot in slots), default=0.0) * _SHORTEST
    slots = [slot for slot in slots if slot.end - slot.start >= least > 0]
    if not slots:
        return _Axes(1.0, float("inf"))
    chunks = timeline.schedule.placement.chunks_per_rank
    # The hair more keeps rounding from taking a column away.
    needed = max((len(label(slot.op, chunks)) + gap) / (slot.end - slot.start) for slot in slots) * (1 + 1e-9)
    step = _common_step(sorted({time for slot in slots for time in (slot.start, slot.end)}))
    columns = max(1, ceil(needed * step - 1e-6))
    # With a tiny step, whole columns would make the grid much wider than its labels need.
    return _Axes(columns / step if columns <= 2 * needed * step else needed, least)


def _common_step(times: list[float]) -> float:
    """The greatest step of which all `times` are multiples, but for rounding."""
    step, tolerance = 0.0, 1e-9 * times[-1]
    for time in times:
        while time > tolerance:
            step, time = time, step % time
    return step


def _rows(timeline: Timeline, axes: _Axes, idle: str) -> list[str]:
    chunks = timeline.schedule.placement.chunks_per_rank
    width, rows = round(timeline.makespan * axes.scale), []
    for rank in range(len(timeline.slots)):
        row = ""
        for slot in timeline.compute(rank):
            if slot.end - slot.start >= axes.least:
                begin, end = round(slot.start * axes.scale), round(slot.end * axes.scale)
                row = row.ljust(begin, idle) + label(slot.op, chunks).ljust(end - begin)
        rows.append(_name(rank, timeline) + row.ljust(width, idle))
    return rows


def _name(rank: int, timeline: Timeline) -> str:
    return f"rank {rank}".ljust(len(f"rank {len(timeline.slots) - 1}")) + "  "


def _legend(timeline: Timeline, axes: _Axes) -> str:
    chunks, parts = timeline.schedule.placement.chunks_per_rank, ["kind", "microbatch"]
    if chunks > 1:
        parts.append(f"chunk ({', '.join(f'{chunk_letter(chunk)} = {chunk}' for chunk in range(chunks))})")
    if timeline.schedule.num_sequence_splits > 1:
        parts.append("/sequence split (none = 0)")
    return f"each op: {', '.join(parts)}; a dot is idle; a column is {1 / axes.scale:g} of time"


def _ticks(timeline: Timeline, axes: _Axes) -> str:
    name = "time".ljust(len(_name(0, timeline)))
    width, line = round(timeline.makespan * axes.scale), ""
    for column in range(0, width + 1, 10):
        if len(line) <= column:
            line = line.ljust(column) + f"{column / axes.scale:g} "
    return (name + line).rstrip()


def _not_drawn(timeline: Timeline, rank: int, axes: _Axes) -> list[str]:
    chunks = timeline.schedule.placement.chunks_per_rank
    return [
        f"{label(slot.op, chunks)} {slot.start:g}..{slot.end:g}"
        for slot in timeline.compute(rank)
        if slot.end - slot.start < axes.least
    ]


def streams_text(timeline: Timeline) -> str:
    """Every op of every rank in issue order: start, end, stream, op, and the ops on other streams whose events it waits for.

    Between two streams there is no order but these events: that an op of another microbatch stands between an OFFLOAD_RECV_PREP and its
    OFFLOAD_RECV_START, say, holds nothing up.
    """
    lines = []
    for rank, (slots, waits) in enumerate(zip(timeline.slots, waits_for(timeline.schedule))):
        lines.append(f"rank {rank}")
        cells = [("start", "end", "stream", "op")]
        cells += [(f"{slot.start:g}", f"{slot.end:g}", slot.stream, str(slot.op)) for slot in slots]
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        events = ["", *(f"waits for: {', '.join(map(str, found))}" if found else "" for found in waits)]
        for (start, end, stream, op), event in zip(cells, events):
            times = f"  {start.rjust(widths[0])} {end.rjust(widths[1])}"
            lines.append(f"{times}  {stream.ljust(widths[2])}  {op.ljust(widths[3])}  {event}".rstrip())
    return "\n".join(lines)
