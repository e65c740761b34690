"""The flags of tools/schedule.py: one line for each mistake, and what is not built yet refused by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from megatron.pipeline_parallel.planning import builders
from megatron.pipeline_parallel.planning.names import DESIGNED
from megatron.pipeline_parallel.planning.quantities import Memory, parse_memory, parse_numbers
from megatron.pipeline_parallel.planning.request import ONE
from megatron.pretrain.checks import listed
from megatron.pretrain.errors import ConfigError, did_you_mean

Value = TypeVar("Value")

COMMANDS = ("show", "export", "check", "compare")
NOT_BUILT_COMMANDS = ("plot",)
FORMATS = ("json", "text")
NOT_BUILT_FORMATS = ("torch-csv", "chrome-trace")
NOT_BUILT_FLAGS = frozenset(
    """
    --cpu-offload --offload-chunk-num --offload-time --offload-duplex --offload-link-groups --offload-host-memory-limit
    --recompute-method --recompute-num-layers --costs --search-seconds
    """.split()
)
"""Flags of the design whose part is not built yet: refused by name."""


class _Parser(argparse.ArgumentParser):
    """argparse, except that a mistake is raised in place of a usage text and an exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parse(argv: Sequence[str], program: str, description: str) -> argparse.Namespace:
    """The flags (without the program's name); `.command` is the command. ConfigError is one line that names the flag."""
    parser = _Parser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        "show": _add_show(commands),
        "export": _add_export(commands),
        "check": _add_check(commands),
        "compare": _add_compare(commands),
    }
    _check_command(argv)
    if argv[0] in parsers:
        _check_tokens(parsers[argv[0]], argv)
    return parser.parse_args(argv)


def _add_show(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    show = commands.add_parser("show", help="print a schedule as a grid of ranks and time", allow_abbrev=False)
    _add_planning_flags(show, names_one=True)
    show.add_argument(
        "--streams", action="store_true", help="print one line an op instead, with its stream and what it waits for"
    )
    return show


def _add_export(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    export = commands.add_parser("export", help="write a schedule with its messages to a file", allow_abbrev=False)
    _add_planning_flags(export, names_one=True)
    export.add_argument("--format", type=_format, required=True, metavar="|".join(FORMATS), help="what to write")
    export.add_argument("--output", metavar="FILE", default="-", help="file to write; stdout where absent or -")
    return export


def _add_check(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    check = commands.add_parser("check", help="validate and time a schedule file, JSON or text", allow_abbrev=False)
    check.add_argument("file", metavar="FILE", help="the schedule file; - for stdin")
    return check


def _add_compare(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    text = "print a table of all schedules that fit; flags that mean nothing to a schedule are left out for it"
    comparing = commands.add_parser("compare", help=text, allow_abbrev=False)
    _add_planning_flags(comparing, names_one=False)
    return comparing


def _add_planning_flags(parser: argparse.ArgumentParser, *, names_one: bool) -> None:
    """The flags that say what to plan; the fields of Request are named as they are, but for Megatron's names."""
    sizes = parser.add_argument_group("what to plan")
    if names_one:
        sizes.add_argument("--schedule", type=_schedule, required=True, metavar="NAME", help=_listed_names())
    sizes.add_argument("--pipeline-model-parallel-size", dest="pp_size", type=_count, required=True, metavar="P",
                       help="pipeline ranks")  # fmt: skip
    sizes.add_argument("--num-virtual-stages-per-pipeline-rank", dest="chunks_per_rank", type=_count, metavar="V",
                       help="chunks a rank (default: what the schedule has by nature)")  # fmt: skip
    sizes.add_argument("--num-microbatches", type=_count, required=True, metavar="M", help="microbatches")
    sizes.add_argument("--num-seq-splits", dest="num_sequence_splits", type=_count, metavar="S",
                       help="sequence splits a microbatch (default: 2 in seq-1f1b, else none)")  # fmt: skip
    sizes.add_argument("--interleave-group-size", dest="group_size", type=_count, metavar="G",
                       help="microbatches that go through a chunk before the next chunk's turn (default in gis-h: ceil(P/2))")  # fmt: skip
    sizes.add_argument("--placement", metavar="loop|v|FILE",
                       help="where stages lie; FILE is a JSON list of [rank, chunk], one a stage (default: the schedule's own)")  # fmt: skip
    costs = parser.add_argument_group(
        "costs", "One number is for one microbatch through all chunks of a rank, of which a chunk takes 1/V; or P*V numbers with "
        "commas between, one a stage, taken as they are. Memory is in bytes, such as 1.5GiB, or without a unit."
    )  # fmt: skip
    for word, what in (("f", "forward"), ("b", "input gradient"), ("w", "weight gradient")):
        costs.add_argument(f"--time-{word}", type=_value(parse_numbers), default=(1.0,), metavar="T",
                           help=f"time of a {what} (default: 1)".replace("a input", "an input"))  # fmt: skip
    costs.add_argument("--time-comm", type=_value(parse_numbers), default=(0.0,), metavar="T",
                       help="latency of a message; or P*P numbers, a row a rank of the times from it to each (default: 0)")  # fmt: skip
    costs.add_argument("--memory-b", type=_value(parse_memory), default=ONE, metavar="X",
                       help="held from the start of F to the end of B (default: 1)")  # fmt: skip
    costs.add_argument("--memory-w", type=_value(parse_memory), default=ONE, metavar="X",
                       help="held from the end of B to the end of W (default: 1)")  # fmt: skip
    costs.add_argument("--memory-message", type=_value(parse_memory), metavar="X",
                       help="size of one message, or P*V sizes of what each stage hands on")  # fmt: skip
    costs.add_argument("--activation-memory-limit", type=_value(_one_memory), metavar="X",
                       help="most memory a rank: 1 is what 1F1B holds there, min(M, P) microbatches; or bytes, such as 40GiB")  # fmt: skip


def _listed_names() -> str:
    return ", ".join(builders.names())


def _value(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A reader of a flag's value whose own message reaches the user; argparse hides that of a ValueError."""

    def read(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _one_memory(text: str) -> Memory:
    memory = parse_memory(text)
    if len(memory.values) != 1:
        raise ValueError(f"{text!r} is {len(memory.values)} amounts: needs one, for every rank")
    return memory


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:16]) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    if len(text) > 15:
        raise argparse.ArgumentTypeError("a number of more than 15 digits is more than can be planned")
    return int(text)


def _schedule(name: str) -> str:
    built = builders.names()
    if name in built:
        return name
    if name in DESIGNED:
        raise argparse.ArgumentTypeError(f"{name} is not built yet: choose one of {listed(built)}")
    raise argparse.ArgumentTypeError(f"{name!r} is unknown{did_you_mean(name, built)}: choose one of {listed(built)}")


def _format(name: str) -> str:
    if name in FORMATS:
        return name
    if name in NOT_BUILT_FORMATS:
        raise argparse.ArgumentTypeError(f"{name} is not built yet: choose one of {listed(FORMATS)}")
    raise argparse.ArgumentTypeError(
        f"{name!r} is unknown{did_you_mean(name, FORMATS)}: choose one of {listed(FORMATS)}"
    )


def _check_command(argv: Sequence[str]) -> None:
    if not argv:
        raise ConfigError(f"a command is missing: give one of {listed(COMMANDS)}; --help says more")
    if argv[0] in NOT_BUILT_COMMANDS:
        raise ConfigError(f"{argv[0]} is not built yet: give one of {listed(COMMANDS)}")
    if argv[0] not in (*COMMANDS, "-h", "--help"):
        raise ConfigError(
            f"unknown command {argv[0]!r}{did_you_mean(argv[0], COMMANDS)}: the command comes first, one of {listed(COMMANDS)}"
        )


def _check_tokens(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Refuse unknown and repeated flags, ahead of argparse: it would report missing ones first, and take the last of two."""
    known = [flag for action in parser._actions for flag in action.option_strings]  # argparse has no public way
    is_flag = [token.startswith("--") or token[:1] == "-" and token[1:2].isalpha() for token in argv]
    given = [token.partition("=")[0] for token, is_one in zip(argv, is_flag) if is_one]
    for flag in given:
        if flag in NOT_BUILT_FLAGS:
            raise ConfigError(f"{flag} is not built yet in this program: leave it out (--help lists what is)")
        if flag not in known:
            raise ConfigError(
                f"{argv[0]} has no flag {flag}{did_you_mean(flag, known)}: {argv[0]} --help lists its flags"
            )
        if given.count(flag) > 1:
            raise ConfigError(f"{flag} is given {given.count(flag)} times: give it once")
