"""Numbers and sizes as people write them: lists of numbers, memory in bytes or without a unit, and both as text again."""

from math import floor, isfinite, log10
from typing import NamedTuple

UNITS = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
"""Bytes in each unit of memory."""

DIGITS = 6
"""Significant digits of a number that is printed to be typed in again."""


class Memory(NamedTuple):
    """One amount of memory or a list of them, all in bytes or all without a unit."""

    values: tuple[float, ...]
    in_bytes: bool


def parse_numbers(text: str) -> tuple[float, ...]:
    """``1,2.5`` as numbers. ValueError unless each is finite and not negative."""
    return tuple(_number(item, item) for item in text.split(","))


def parse_memory(text: str) -> Memory:
    """``1,2`` or ``1.5GiB,2GiB``. ValueError on a negative or infinite amount, on an unknown unit, and where only some have a unit.

    A 0 goes with either.
    """
    items = [_amount(item.strip()) for item in text.split(",")]
    kinds = {in_bytes for value, in_bytes in items if value or in_bytes}
    if len(kinds) > 1:
        raise ValueError(f"{text!r} mixes bytes and numbers without a unit: write all of them one way")
    return Memory(tuple(value for value, _ in items), kinds == {True})


def memory_text(value: float, in_bytes: bool) -> str:
    """An amount as people read it: ``1.5 GiB``, or ``2.25`` where there is no unit."""
    if not in_bytes:
        return f"{value:.{DIGITS}g}"
    unit = _fitting_unit(value)
    return f"{value / UNITS[unit]:.4g} {unit}"


def enough(value: float) -> str:
    """The shortest number that is no smaller than `value`, in `DIGITS` significant digits."""
    if value <= 0:
        return "0"
    step = 10.0 ** (floor(log10(value)) - DIGITS + 1)
    # What only rounding keeps above the next step down is that step: 0.1 + 0.2 is enough at 0.3.
    steps = -floor(-value / step * (1 - 1e-12))
    return f"{steps * step:.{DIGITS}g}"


def enough_memory(value: float) -> str:
    """The shortest amount of bytes, as a flag takes it, that is no smaller than `value`: ``1.5GiB``."""
    unit = _fitting_unit(value)
    return f"{enough(value / UNITS[unit])}{unit}"


def _fitting_unit(value: float) -> str:
    return next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if value >= UNITS[unit]), "B")


def _amount(item: str) -> tuple[float, bool]:
    number = item.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = item[len(number) :]
    if not number or not unit:
        return _number(item, item), False
    if unit not in UNITS:
        raise ValueError(f"{item!r} has the unknown unit {unit!r}; known: {', '.join(UNITS)}")
    return _number(number, item, UNITS[unit]), True


def _number(text: str, item: str, unit: int = 1) -> float:
    try:
        value = float(text) * unit
    except ValueError:
        raise ValueError(f"{item!r} is not a number") from None
    if not isfinite(value) or value < 0:
        raise ValueError(f"{item!r} is not a finite number of at least 0")
    return value
