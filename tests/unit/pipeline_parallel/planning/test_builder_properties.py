"""Every builder on random sizes, times, memory and limits: sound by two independent judges, or refused for a listed reason."""

import random
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from random_schedules import random_placement
from schedule_checker import check

from megatron.pipeline_parallel.planning.bounds import lower_bound
from megatron.pipeline_parallel.planning.builders import Problem, build, names, placement, registry, takes
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.passes.communication import add_communication
from megatron.pipeline_parallel.planning.simulate import simulate
from megatron.pipeline_parallel.planning.validate import ScheduleError, validate

EXACT = 1 + 1e-9
PROBLEMS = 2400
"""Random problems in a run, over all builders together."""


def lacks(field):
    """Given, but nothing to this schedule."""
    return lambda name, problem: getattr(problem, field) not in (None, 1) and field not in takes(name)


def has_own_rule(name, rule):
    return registry._BUILDERS[name].placement is rule


def other_chunks(rule, number):
    """A number of chunks that a schedule of this placement rule does not have."""
    return lambda name, problem: has_own_rule(name, rule) and problem.chunks_per_rank not in (None, number)


REFUSALS = {
    r"has one chunk a rank, got \d+": other_chunks(registry.one_chunk, 1),
    r"has two chunks a rank, got \d+": other_chunks(registry.two_chunks_v, 2),
    r"has no sequence splits, got": lacks("num_sequence_splits"),
    r"has no groups to size, got": lambda name, problem: problem.group_size and "group_size" not in takes(name),
    r"has a placement of its own, \w+, got": lacks("placement"),
    r"needs an interleave group size of at least \d+, got": lambda name, problem: (
        problem.group_size is not None and 2 * problem.group_size < problem.pp_size
    ),
    r"limit": lambda name, problem: problem.costs is not None and problem.costs.device_limit is not None,
}
"""Why a problem may be refused: what the error says, and when it may say so."""


def some_numbers(rng, size):
    """Equal ones, small whole ones with zeros, or any."""
    style = rng.randrange(3)
    if style == 0:
        return (rng.uniform(0.5, 2),) * size
    return tuple(float(rng.choice((0, 1, 1, 2, 3))) if style == 1 else rng.uniform(0.5, 2) for _ in range(size))


def some_problem(rng, number):
    """Sizes that most schedules have, and in turn ones that few have; a search only now and then, as it takes long."""
    p = rng.randint(1, 9)
    given = None
    if number % 20 == 1:
        given = random_placement(rng, max_ranks=9, max_chunks=1 + number % 3)
        p = given.pp_size
    return Problem(
        pp_size=p,
        num_microbatches=rng.randint(1, 20),
        chunks_per_rank=rng.randint(1, 4) if number % 5 == 2 else None,
        num_sequence_splits=rng.randint(2, 4) if number % 10 == 3 else None,
        group_size=rng.randint(1, p) if number % 10 == 4 else None,
        placement=given,
        effort=None if number % 40 == 0 else 0,
    )


def some_costs(rng, place, num_microbatches):
    """Times and memory a stage, messages a pair of ranks, and in most cases a limit that is a multiple of 1F1B's memory."""
    n, p = place.num_stages, place.pp_size
    f, b, w = (some_numbers(rng, n) for _ in range(3))
    memory_b = some_numbers(rng, n) if rng.random() < 0.5 else (1.0,) * n
    memory_w = rng.choice((memory_b, tuple(size * 0.5 for size in memory_b), some_numbers(rng, n)))
    comm = rng.choice((0.0, 0.1, tuple(some_numbers(rng, p) for _ in range(p))))
    limit = None
    if rng.random() < 0.6:
        share = rng.uniform(0.3, 2.5)
        held = [sum(memory_b[stage] for stage in place.stages_of(rank)) for rank in range(p)]
        limit = tuple(share * min(num_microbatches, p) * size for size in held)
    return CostModel(f=f, b=b, w=w, r=f, comm=comm, memory_b=memory_b, memory_w=memory_w, device_limit=limit)


def refusal(name, problem, error):
    """The reason that a refusal gives; it must be a listed one that applies."""
    reasons = [text for text, applies in REFUSALS.items() if re.search(text, str(error)) and applies(name, problem)]
    assert reasons, f"{problem} was refused without a listed reason: {error}"
    assert len(str(error).splitlines()) == 1
    return reasons[0]


def check_schedule(schedule, costs, unlimited):
    """What holds for every schedule that a builder returns; `unlimited` is what it returns without a limit."""
    place, m, splits = schedule.placement, schedule.num_microbatches, schedule.num_sequence_splits
    makespan, peaks = check(schedule, costs)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == pytest.approx(makespan)
    assert [timeline.peak_memory(rank) for rank in range(place.pp_size)] == pytest.approx(peaks)
    limit = costs.device_limit
    fits = limit is None or all(peak <= most * EXACT + 1e-12 for peak, most in zip(peaks, limit))
    if fits:
        assert validate(schedule, costs).peak_memory == pytest.approx(peaks)
    else:
        # An order that does not depend on the limit may be over it, and is then refused.
        assert schedule == unlimited
        with pytest.raises(ScheduleError, match="limit"):
            validate(schedule, costs)
    for held in [tuple(peaks)] + [limit] * (limit is not None and fits):
        bound = lower_bound(place, m, costs, held, num_sequence_splits=splits)
        assert bound.value <= makespan * EXACT, bound
    return fits


def run_problems(name, seeds):
    """Counts of what became of each problem."""
    counts = Counter()
    for seed in seeds:
        rng = random.Random(f"{name} {seed}")
        problem = some_problem(rng, seed)
        try:
            place = placement(name, problem)
            costs = some_costs(rng, place, problem.num_microbatches)
            problem = replace(problem, costs=costs)
            schedule = build(name, problem)
        except ValueError as error:
            counts[refusal(name, problem, error)] += 1
            continue
        unlimited = schedule
        if costs.device_limit is not None:
            unlimited = build(name, replace(problem, costs=replace(costs, device_limit=None)))
        fits = check_schedule(schedule, costs, unlimited)
        counts["fits" if fits else "over its limit"] += 1
        if seed % 4 == 0:
            validate(add_communication(schedule, costs))
    return counts


@pytest.mark.parametrize("name", names())
def test_random_problems(name):
    counts = run_problems(name, range(PROBLEMS // len(names())))
    assert counts["fits"] > 0.2 * counts.total(), counts
    # No row of the list is there for nothing: each was met where it applies to this schedule.
    optional = {"num_sequence_splits", "group_size", "placement"} - takes(name)
    rows = {"num_sequence_splits": "sequence splits", "group_size": "groups", "placement": "placement"}
    for field in optional:
        assert any(rows[field] in reason for reason in counts), (field, counts)
    if has_own_rule(name, registry.one_chunk) or has_own_rule(name, registry.two_chunks_v):
        assert any("a rank, got" in reason for reason in counts), counts


def readme_table(header):
    """Rows of the table of README.md that begins with `header`, as lists of cells."""
    lines = (Path(__file__).parents[4] / "README.md").read_text().splitlines()
    rows = lines[lines.index(header) + 2 :]
    end = next(number for number, line in enumerate(rows) if not line.startswith("|"))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[:end]]


def test_the_readme_lists_every_schedule_and_every_refusal():
    assert [
        row[0].strip("`") for row in readme_table("| schedule | what it is | peak, in microbatches | source |")
    ] == names()
    refused = {row[0]: row[1] for row in readme_table("| refused | by | why |")}
    assert len(refused) == len(REFUSALS)
    for what, rule in (("other than 1", registry.one_chunk), ("other than 2", registry.two_chunks_v)):
        assert refused[f"chunks a rank {what}"] == " ".join(f"`{name}`" for name in names() if has_own_rule(name, rule))
    for what, field in (
        ("sequence splits", "num_sequence_splits"),
        ("a group size", "group_size"),
        ("a placement", "placement"),
    ):
        assert refused[what] == "all but " + " and ".join(f"`{name}`" for name in names() if field in takes(name))


@pytest.mark.full
@pytest.mark.parametrize("name", names())
def test_random_problems_at_length(name):
    assert run_problems(name, range(10**6, 10**6 + 3000))["fits"]


@pytest.mark.parametrize("name", names())
def test_time_to_plan(name):
    """32 ranks and 128 microbatches, two chunks a rank where there are chunks, in under two seconds."""
    chunks = 1 if has_own_rule(name, registry.one_chunk) else 2
    problem = Problem(pp_size=32, num_microbatches=128, chunks_per_rank=chunks)
    seconds = []
    for _ in range(2):
        start = time.process_time()
        schedule = build(name, problem)
        seconds.append(time.process_time() - start)
    assert schedule.placement.chunks_per_rank == chunks
    assert min(seconds) < 2, seconds
