"""The error that means "the user can fix this", and the words its messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

PROGRAM = "pretrain_gpt.py"
"""What messages of the training program begin with."""


class TrainingError(Exception):
    """A run that can't go on though nobody made a mistake, such as a loss that is not a number: said in one line, status 1."""


class ConfigError(ValueError):
    """A mistake in what the user gave: a flag, a file, or a combination of both.

    The text is one line, written for the person at the terminal: what was given, what is needed,
    which flag, and what to try. Mistakes of our own are assertions, never this.
    """


def flag_name(field: str) -> str:
    """The command-line flag of a configuration field: `num_layers` is `--num-layers`."""
    return "--" + field.replace("_", "-")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to a message: the known word closest to `word`, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def missing_package(package: str, flag: str) -> ConfigError:
    """The error for an optional Python package that `flag` needs and that is not installed."""
    return ConfigError(
        f"{flag} needs the Python package {package}, which is not installed: pip install {package}, or leave {flag} out"
    )
