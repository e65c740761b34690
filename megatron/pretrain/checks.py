"""Checks of one value each, and the small sums and lists that their messages need."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.pretrain.errors import ConfigError, flag_name


def at_least(group: object, lowest: int, *names: str) -> None:
    """Refuse a named field of `group` that is below `lowest`, infinite or NaN; None passes."""
    for name in names:
        value = getattr(group, name)
        if value is not None and not lowest <= value < math.inf:  # written so that NaN fails too
            finite = " and finite" if isinstance(value, float) else ""
            raise ConfigError(f"{flag_name(name)} is {value}: it must be at least {lowest}{finite}")


def above_zero(group: object, *names: str) -> None:
    """Refuse a named field of `group` that is not above 0 and finite."""
    for name in names:
        value = getattr(group, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{flag_name(name)} is {value}: it must be above 0 and finite")


def share(group: object, *names: str) -> None:
    """Refuse a named field of `group` outside [0, 1); None passes."""
    for name in names:
        value = getattr(group, name)
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{flag_name(name)} is {value}: it must be from 0 to below 1")


def is_number(text: str) -> bool:
    """Whether `text` reads as a float."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending, 1 and itself included."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def nearest_multiples(number: int, step: int) -> str:
    """The multiples of `step` around `number`, as words; never 0."""
    below = number // step * step
    return listed([multiple for multiple in (below, below + step) if multiple])


def listed(items: Sequence[object]) -> str:
    """`a, b or c`."""
    *most, last = [str(item) for item in items]
    return f"{', '.join(most)} or {last}" if most else last
