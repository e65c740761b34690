"""Schedules as text grids."""

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


def time_grid(timeline: Timeline, unit: float = 1.0, cell: int = 2) -> str:
    """Ranks down, time across, `cell` characters a `unit` of time: each compute op prints its kind and microbatch from its start.

    Times are rounded to whole units, and an op's text is cut to its length, so choose a unit that divides the times.
    """
    rows = []
    for rank in range(len(timeline.slots)):
        row = ""
        for slot in timeline.compute(rank):
            begin, end = round(slot.start / unit) * cell, round(slot.end / unit) * cell
            row = row.ljust(begin) + f"{slot.op.kind}{slot.op.microbatch}"[: end - begin].ljust(end - begin)
        rows.append(f"rank {rank}  {row}".rstrip())
    return "\n".join(rows)
