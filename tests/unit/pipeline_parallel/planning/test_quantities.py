"""Numbers and sizes as people write them."""

import random

import pytest

from megatron.pipeline_parallel.planning.quantities import (
    Memory,
    enough,
    enough_memory,
    memory_text,
    parse_memory,
    parse_numbers,
)


def test_numbers_are_separated_by_commas():
    assert parse_numbers("1") == (1.0,)
    assert parse_numbers("1,2.5, 1e3") == (1.0, 2.5, 1000.0)


@pytest.mark.parametrize("text", ["", ",", "1,", "x", "1 2", "-1", "nan", "inf", "1e999", "1GiB"])
def test_what_is_no_list_of_numbers_is_refused(text):
    with pytest.raises(ValueError, match="is not a"):
        parse_numbers(text)


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("2", Memory((2.0,), False)),
        ("1,2", Memory((1.0, 2.0), False)),
        ("1.5GiB", Memory((1.5 * 2**30,), True)),
        ("1 KiB,2kB,3KB", Memory((1024.0, 2000.0, 3000.0), True)),
        ("7B", Memory((7.0,), True)),
        ("0,1MiB", Memory((0.0, 2.0**20), True)),
        ("0B", Memory((0.0,), True)),
        ("1e3MB", Memory((1e9,), True)),
        ("1TB,1TiB", Memory((1e12, 2.0**40), True)),
    ],
)
def test_memory_is_in_bytes_or_without_a_unit(text, memory):
    assert parse_memory(text) == memory


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2GiB", "mixes bytes and numbers"),
        ("1gib", "unknown unit 'gib'; known: B, kB"),
        ("GiB", "is not a number"),
        ("-1GiB", "'-1GiB' is not a finite number of at least 0"),
        ("1e308TiB", "is not a finite number"),
        ("infGiB", "is not a number"),
        ("nan", "is not a finite number"),
        ("", "is not a number"),
    ],
)
def test_what_is_no_memory_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_memory(text)


def test_memory_is_printed_in_the_unit_that_suits_it():
    assert [memory_text(value, True) for value in (0, 1023, 1536, 2**20, 1.5 * 2**30, 2.0**41)] == [
        "0 B", "1023 B", "1.5 KiB", "1 MiB", "1.5 GiB", "2 TiB",
    ]  # fmt: skip
    assert memory_text(2.25, False) == "2.25"


def test_a_number_to_type_in_again_is_never_too_small_and_hardly_too_large():
    rng = random.Random(0)
    for _ in range(2000):
        value = rng.random() * 10 ** rng.randint(-8, 14)
        assert value * (1 - 1e-11) <= float(enough(value)) <= value * (1 + 1e-5)
        (read,), in_bytes = parse_memory(enough_memory(value))
        assert in_bytes and value * (1 - 1e-11) <= read <= value * (1 + 1e-5)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (1, "1"), (0.1 + 0.2, "0.3"), (2 / 3, "0.666667"), (12, "12"), (1e6, "1e+06")])  # fmt: skip
def test_a_number_to_type_in_again_is_short(value, text):
    assert enough(value) == text
