"""The planner on the command line: pipeline schedules made, drawn, checked, compared and written to files, without torch.

    python tools/schedule.py show    --schedule zb-h1 --pipeline-model-parallel-size 4 --num-microbatches 8
    python tools/schedule.py export  --schedule zb-h1 --pipeline-model-parallel-size 4 --num-microbatches 8 \\
        --format json --output schedule.json
    python tools/schedule.py check   schedule.json
    python tools/schedule.py compare --pipeline-model-parallel-size 4 --num-microbatches 8 --activation-memory-limit 1

A mistake ends with one line on stderr and status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# ruff: noqa: E402, the checkout comes first so that the tool runs where nothing is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planning_flags import parse

from megatron.pipeline_parallel.planning import builders
from megatron.pipeline_parallel.planning.compare import compare, comparison_text
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.formats import (
    check_places,
    read_file,
    summary_differences,
    to_json,
)
from megatron.pipeline_parallel.planning.grid import show_text, streams_text
from megatron.pipeline_parallel.planning.op import Placement
from megatron.pipeline_parallel.planning.passes.communication import add_communication
from megatron.pipeline_parallel.planning.report import check_drawable, head_text, summary_text
from megatron.pipeline_parallel.planning.request import Request, make_timeline, plan_bounds
from megatron.pipeline_parallel.planning.simulate import Timeline, simulate
from megatron.pipeline_parallel.planning.validate import ScheduleError, validate
from megatron.pretrain.checks import listed
from megatron.pretrain.errors import ConfigError

PROGRAM = "schedule.py"

LONGEST_FILE_BYTES = 2**30


# ---- the commands


def run_show(args: argparse.Namespace) -> None:
    request = make_request(args)
    timeline = make_timeline(args.schedule, request)
    if args.streams:
        body = streams_text(with_messages(timeline))
    else:
        check_drawable(timeline)
        body = show_text(timeline)
    parts = (
        head_text(timeline, request.in_bytes),
        body,
        summary_text(timeline, plan_bounds(timeline), request.in_bytes),
    )
    write("\n\n".join(parts) + "\n")


def run_export(args: argparse.Namespace) -> None:
    timeline = with_messages(make_timeline(args.schedule, make_request(args)))
    text = timeline.schedule.to_text() if args.format == "text" else to_json(timeline, plan_bounds(timeline)[0].bound)
    if args.output == "-":
        write(text)
        return
    try:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--output {args.output!r} can't be written ({_reason(error)}): give another file, or leave it out for stdout"
        ) from None


def run_check(args: argparse.Namespace) -> None:
    content = read_text(args.file, "the schedule file")
    try:
        schedule, costs, claimed = read_file(content)
    except ValueError as error:
        raise ConfigError(f"{args.file}: {error}") from None
    has_costs = costs is not None
    costs = costs or CostModel.uniform(schedule.placement)
    validate(schedule, costs)
    timeline = simulate(schedule, costs)
    differences = summary_differences(claimed or {}, timeline)
    if not has_costs:
        write("A schedule as text has no costs: times and memory are those of equal stages, messages take no time.\n\n")
    write(f"{head_text(timeline)}\n\n{summary_text(timeline, plan_bounds(timeline))}\n")
    if differences:
        raise ConfigError(f"{args.file}: {'; '.join(differences)}: export it again, or mend its order or costs")
    write(f"\n{args.file} is valid\n")


def run_compare(args: argparse.Namespace) -> None:
    request = make_request(args)
    comparison = compare(builders.names(), request)
    if comparison.fitting:
        write(comparison_text(comparison, request) + "\n")
    elif comparison.needed is not None:
        raise ConfigError(f"no schedule fits --activation-memory-limit: {comparison.needed.text(request.in_bytes)}")
    else:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in comparison.left_out)
        raise ConfigError(f"no schedule fits: {reasons}")


RUNS = {"show": run_show, "export": run_export, "check": run_check, "compare": run_compare}


def make_request(args: argparse.Namespace) -> Request:
    """The planning flags as a Request; a placement is made last, when its size is known to be in bounds."""
    values = {name: value for name, value in vars(args).items() if name in Request.__dataclass_fields__}
    request = Request(**values | {"placement": None})
    return replace(request, placement=read_placement(args.placement, request)) if args.placement else request


def read_placement(given: str, request: Request) -> Placement:
    """The placement that --placement names. Raises ConfigError on a file that holds none."""
    if given == "loop":
        if request.chunks_per_rank is None:
            raise ConfigError(
                "--placement loop goes with any number of chunks: give --num-virtual-stages-per-pipeline-rank"
            )
        return Placement.loop(request.pp_size, request.chunks_per_rank)
    if given == "v":
        return Placement.v(request.pp_size)
    content = read_text(given, "--placement is loop, v or a file; the file")
    try:
        stages = json.loads(content)
        places = [(rank, chunk) for rank, chunk in stages]
        if not places or not all(type(number) is int for place in places for number in place):
            raise TypeError
        check_places(places, "stages")
        return Placement(name="custom", stages=tuple(places))
    except (TypeError, RecursionError, json.JSONDecodeError):
        pass
    except ValueError as error:
        raise ConfigError(f"--placement {given}: {error}") from None
    raise ConfigError(f"--placement {given}: needs a JSON list of [rank, chunk], one a stage, such as [[0, 0], [1, 0]]")


def with_messages(timeline: Timeline) -> Timeline:
    """The same schedule as a program with messages, proven and timed."""
    program = add_communication(timeline.schedule, timeline.costs)
    validate(program, timeline.costs)
    return simulate(program, timeline.costs)


# ---- files, and the end


def read_text(path: str, what: str) -> str:
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            content = file.read(LONGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {path!r} can't be read ({_reason(error)})") from None
    if len(content) > LONGEST_FILE_BYTES:
        raise ConfigError(f"{what} {path!r} is larger than {LONGEST_FILE_BYTES} bytes, more than is read")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path!r} is not UTF-8 text (byte {error.start}): it holds no schedule") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def write(text: str) -> None:
    print(text, end="", flush=True)


def _fail(text: str) -> int:
    print(f"{PROGRAM}: error: {' '.join(text.split())}", file=sys.stderr)
    return 2


def run(argv: Sequence[str]) -> None:
    args = parse(argv, PROGRAM, __doc__)
    try:
        RUNS[args.command](args)
    except ScheduleError as error:
        text, _, grid = str(error).partition("\n")
        write(f"{grid}\n" if grid else "")
        raise ConfigError(f"{args.file}: {text}" if args.command == "check" else text) from None
    except ValueError as error:
        raise ConfigError(str(error) if args.command == "check" else _with_flags(str(error))) from None


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit status. A mistake of the user's is one line on stderr and 2."""
    try:
        run(argv)
    except BrokenPipeError:
        _drop_stdout()  # whoever read the output has seen enough
    except OSError as error:
        _drop_stdout()
        return _fail(f"the output can't be written ({_reason(error)})")
    except ValueError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("out of memory: lower --num-microbatches or --pipeline-model-parallel-size")
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 0


def _drop_stdout() -> None:
    """Python flushes stdout once more when it ends, which would fail again, with a traceback."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_FLAGS_OF_TEXTS = {
    r"chunks? a rank, got|is for \d+ ranks of": "--num-virtual-stages-per-pipeline-rank",
    "num_sequence_splits": "--num-seq-splits",
    "group_size|group size": "--interleave-group-size",
    "got placement|^placement ": "--placement",
}


def _with_flags(text: str) -> str:
    """What the planner, which knows no flags, says of values that flags gave, with those flags."""
    flags = [flag for pattern, flag in _FLAGS_OF_TEXTS.items() if re.search(pattern, text)]
    return f"{text} (see {listed(flags)})" if flags and "--" not in text else text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
