"""Text in JSON lines: one object a line, the text under a key. Shared by the tools of this folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from megatron.pretrain.errors import ConfigError


class BadLine(ValueError):
    """A line that holds no text under a key that was asked for; the message says why."""


def open_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, raw line) of every line that is not blank."""
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"--input {path} can't be read ({error.strerror}): give a file of JSON lines") from error


def check_input(path: str) -> None:
    """Raise ConfigError where the input can't hold a single line."""
    if not os.path.isfile(path):
        raise ConfigError(f"--input {path} is not a file: give a file of JSON lines, one object with text a line")
    if os.path.getsize(path) == 0:
        raise ConfigError(f"--input {path} is empty: give a file of JSON lines, one object with text a line")


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """The text under each of `keys`, in their order. Raises BadLine."""
    try:
        row = json.loads(line.rstrip())
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 text (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise BadLine(f"not valid JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise BadLine("not valid JSON (nested too deeply)") from error
    if not isinstance(row, dict):
        raise BadLine(f"a JSON {type(row).__name__}, not an object")
    for key in keys:
        if key not in row:
            raise BadLine(f"no key {key!r} among {', '.join(map(repr, row)) or 'no keys at all'}: see --json-keys")
        if not isinstance(row[key], str):
            raise BadLine(f"the value under {key!r} is a {type(row[key]).__name__}, not text")
    return [row[key] for key in keys]


class BadLineBudget:
    """Counts bad lines, reports each, and ends the run past the limit that the user set."""

    def __init__(self, path: str, limit: int, report: Callable[[str], None]) -> None:
        self.count = 0
        self._path, self._limit, self._report = path, limit, report

    def spend(self, number: int, reason: str) -> None:
        """Book line `number` as bad. Raises ConfigError when more than `limit` are."""
        self.count += 1
        place = f"{self._path}:{number}: {reason}"
        if self.count > self._limit:
            passed = f"bad line {self.count}, more than " if self.count > 1 else "more than "
            raise ConfigError(
                f"{place} ({passed}--max-bad-lines {self._limit} allows): mend the line, or raise --max-bad-lines to skip it"
            )
        self._report(f"skipped {place}")


def run_tool(main: Callable[[], None]) -> int:
    """Run a tool's main and return its exit status: a mistake of the user's, or a full disk, is one line on stderr and 2."""
    try:
        main()
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
