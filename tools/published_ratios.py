"""Print our makespan and peak beside those of the published schedulers, row by row.

    python tools/published_ratios.py tests/data/published_scheduler.csv [--only V-Half]

The file has one row a setting: the published schedule's name, p, m, times of one microbatch through a whole rank, message
time, makespan, bubble rate of the rectangle, most and mean peak (microbatches). A row falls short when our makespan or our peak
is larger. Exit status 1 when any does.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.pipeline_parallel.planning.builders import Problem, build, placement
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.simulate import Timeline, simulate

ROUNDING = 1e-5
"""The file's makespans have six digits."""


@dataclass(frozen=True)
class Row:
    """One published setting, and what ours makes of it."""

    schedule: str
    p: int
    m: int
    times: tuple[float, float, float]
    comm: float
    makespan: float
    peak: float

    @property
    def label(self) -> str:
        times = "/".join(f"{value:g}" for value in self.times)
        return f"{self.schedule} p={self.p} m={self.m} T={times} comm={self.comm:g}"


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [
            Row(
                row["schedule"], int(row["p"]), int(row["m"]), (float(row["F"]), float(row["B"]), float(row["W"])),
                float(row["comm"]), float(row["makespan"]), float(row["peak_mem_max"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def _plain(name: str, **fields: int) -> Callable[[Row], Timeline]:
    return lambda row: plan(name, row, Problem(pp_size=row.p, num_microbatches=row.m, **fields))


def _searched(row: Row) -> Timeline:
    """zb-auto under the peak that the published one reached."""
    problem = Problem(pp_size=row.p, num_microbatches=row.m)
    return plan("zb-auto", row, problem, device_limit=(row.peak,) * row.p)


OURS: dict[str, Callable[[Row], Timeline]] = {
    "1F1B": _plain("1f1b"),
    "1F1B-V": _plain("1f1b-v"),
    "GIS:v=2": _plain("gis", chunks_per_rank=2),
    "GIS:v=4": _plain("gis", chunks_per_rank=4),
    "GIS-H:v=2": _plain("gis-h", chunks_per_rank=2),
    "GIS-H:v=4": _plain("gis-h", chunks_per_rank=4),
    "V-Half": _plain("v-half"),
    "V-Min": _plain("v-min"),
    "ZB1P": _searched,
    "ZB2P": _searched,
    "ZBV": _plain("zbv"),
    "ZBV-strict": _plain("zbv"),
    "interleaved:v=2": _plain("interleaved-1f1b", chunks_per_rank=2),
    "interleaved:v=4": _plain("interleaved-1f1b", chunks_per_rank=4),
    "seq1F1B:s=2": _plain("seq-1f1b", num_sequence_splits=2),
}
"""Published name -> how the same is made here."""


def ours(row: Row) -> Callable[[Row], Timeline] | None:
    """How a row is made here; None for a schedule that is not built."""
    return OURS.get(row.schedule)


def plan(name: str, row: Row, problem: Problem, **limits: tuple[float, ...]) -> Timeline:
    f, b, w = row.times
    costs = CostModel.uniform(placement(name, problem), f=f, b=b, w=w, comm=row.comm, **limits)
    return simulate(build(name, replace(problem, costs=costs)), costs)


def falls_short(row: Row, timeline: Timeline) -> bool:
    return timeline.makespan > row.makespan * (1 + ROUNDING) or _peak(timeline) > row.peak + ROUNDING


def _peak(timeline: Timeline) -> float:
    return max(timeline.peak(rank) for rank in range(timeline.schedule.pp_size))


def compare(rows: list[Row]) -> Iterator[tuple[Row, Timeline]]:
    for row in rows:
        make = ours(row)
        if make is not None:
            yield row, make(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="rows whose published name starts so")
    args = parser.parse_args()
    try:
        rows = [row for row in read(args.file) if args.only is None or row.schedule.startswith(args.only)]
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"{args.file} holds no published schedules ({error!r}): give a file such as the one in tests/data")
    if not rows:
        parser.error(f"--only {args.only}: no row of {args.file} begins so")
    short = []
    better = 0
    total = 0
    print(f"{'setting':58} {'published':>10} {'ours':>10} {'ratio':>7} {'peak':>7} {'ours':>7} {'s':>5}")
    began = time.perf_counter()
    for row, timeline in compare(rows):
        seconds, began = time.perf_counter() - began, time.perf_counter()
        ratio = timeline.makespan / row.makespan
        mark = " falls short" if falls_short(row, timeline) else ""
        print(
            f"{row.label:58} {row.makespan:10g} {timeline.makespan:10g} {ratio:7.4f} {row.peak:7g} {_peak(timeline):7g} "
            f"{seconds:5.2f}{mark}",
            flush=True,
        )
        total += 1
        better += ratio < 1 - ROUNDING
        if mark:
            short.append(row.label)
    print(f"{total} rows: {better} better, {len(short)} fall short")
    not_built = sorted({row.schedule for row in rows if ours(row) is None})
    if not_built:
        print(f"not built here: {', '.join(not_built)}")
    for label in short:
        print(f"falls short: {label}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
