"""Schedule files: exact round trips, and one line that names the key for whatever is wrong."""

import copy
import json
import random
from dataclasses import replace

import pytest
from random_schedules import random_costs, random_links, random_offload, random_placement, random_schedule

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.dataflow import waits_for
from megatron.pipeline_parallel.planning.formats import (
    from_json,
    read_file,
    read_schedule,
    summary_differences,
    to_json,
)
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement, Schedule
from megatron.pipeline_parallel.planning.passes.communication import add_communication, forward_only
from megatron.pipeline_parallel.planning.simulate import simulate
from megatron.pipeline_parallel.planning.validate import ScheduleError, validate

BOUND = (1.5, "any schedule")


def written(schedule, costs):
    return to_json(simulate(schedule, costs), BOUND)


def random_case(rng):
    """A schedule, lowered or not, with or without offload, and costs with numbers that do not print short."""
    placement = random_placement(rng)
    schedule = random_schedule(rng, placement, rng.randint(1, 3), rng.randint(1, 2))
    if rng.random() < 0.5:
        schedule = random_offload(rng, schedule)
    costs = random_costs(rng, placement)
    costs = replace(
        costs,
        f=tuple(time * rng.random() for time in costs.f),
        comm=rng.choice((costs.comm, 0.1, 0.0)),
        message=rng.choice((costs.message, ())),
        links=random_links(rng, placement.pp_size),
        device_limit=rng.choice((None, tuple(1e3 + rng.random() for _ in range(placement.pp_size)))),
        host_limit=rng.choice((None, (1e3,) * placement.pp_size)),
    )
    if rng.random() < 0.5:
        schedule = add_communication(schedule, costs)
    return schedule, costs


def test_json_reads_back_exactly_as_it_was_written():
    rng = random.Random(0)
    lowered = set()
    for _ in range(150):
        schedule, costs = random_case(rng)
        text = written(schedule, costs)
        assert from_json(text) == (schedule, costs)
        assert written(*from_json(text)) == text
        lowered.add((schedule.lowered, schedule.pp_size == 1))
    assert len(lowered) == 4


def test_text_reads_back_without_costs():
    rng = random.Random(1)
    for _ in range(50):
        schedule, _ = random_case(rng)
        assert read_schedule(schedule.to_text()) == (schedule, None)


def test_json_and_text_are_told_apart():
    schedule = build("1f1b", Problem(pp_size=2, num_microbatches=2))
    costs = CostModel.uniform(schedule.placement)
    assert read_schedule("\n " + written(schedule, costs)) == (schedule, costs)
    assert read_schedule(schedule.to_text()) == (schedule, None)


def test_the_export_has_the_keys_of_the_format():
    schedule = build("zb-h1", Problem(pp_size=2, num_microbatches=2))
    program = add_communication(schedule, CostModel.uniform(schedule.placement))
    data = json.loads(written(program, CostModel.uniform(schedule.placement, f=3.0, comm=0.5)))
    assert list(data) == [
        "format", "version", "schedule", "placement", "stages", "pp_size", "chunks_per_rank", "microbatches",
        "sequence_splits", "costs", "ranks", "summary",
    ]  # fmt: skip
    assert (data["format"], data["version"]) == ("megatron-pipeline-schedule", 1)
    assert (data["schedule"], data["placement"], data["stages"]) == ("zb-h1", "loop", [[0, 0], [1, 0]])
    assert list(data["costs"]) == ["f", "b", "w", "r", "comm", "d2h", "h2d", "memory_b", "memory_w", "links", "limits"]
    assert (data["costs"]["f"], data["costs"]["comm"]) == ([3.0, 3.0], 0.5)
    assert data["costs"]["limits"] == {"device": None, "host": None}
    assert set(data["summary"]) == {
        "makespan", "bubble_rate", "span_bubble_rate", "peak", "lower_bound", "lower_bound_holds_for",
    }  # fmt: skip
    receive, forward = data["ranks"][1][0], next(op for op in data["ranks"][1] if op["op"] == "F")
    assert receive["stream"] == "recv 0"
    assert forward == {
        "id": "F 1.0 mb0 s0", "op": "F", "stage": 1, "chunk": 0, "microbatch": 0, "sequence_split": 0, "stream": "compute",
        "start": 3.5, "end": 6.5, "waits_for": ["RECV_FORWARD 1.0 mb0 s0"],
    }  # fmt: skip


def test_waits_streams_and_times_are_the_timelines():
    rng = random.Random(2)
    for _ in range(30):
        schedule, costs = random_case(rng)
        timeline = simulate(schedule, costs)
        data = json.loads(to_json(timeline, BOUND))
        ids = {op["id"] for ops in data["ranks"] for op in ops}
        assert len(ids) == sum(map(len, schedule.ranks))
        for ops, slots, waits in zip(data["ranks"], timeline.slots, waits_for(schedule)):
            assert [(op["stream"], op["start"], op["end"]) for op in ops] == [
                (slot.stream, slot.start, slot.end) for slot in slots
            ]
            assert [op["waits_for"] for op in ops] == [list(map(str, waited)) for waited in waits]
            assert all(wait in ids for op in ops for wait in op["waits_for"])


def test_only_a_forward_whose_activation_is_thrown_away_says_so():
    schedule = forward_only(build("1f1b", Problem(pp_size=2, num_microbatches=1)))
    costs = CostModel.uniform(schedule.placement)
    data = json.loads(written(schedule, costs))
    assert [op["saves_activation"] for ops in data["ranks"] for op in ops] == [False, False]
    assert data["ranks"][0][0]["id"] == "F 0.0 mb0 s0"
    assert from_json(json.dumps(data)) == (schedule, costs)
    assert '"saves_activation"' not in written(build("1f1b", Problem(pp_size=2, num_microbatches=1)), costs)


def test_recompute_reads_back():
    ops = (Op(OpKind.F, 0, 0, 0, 0, False), Op(OpKind.R, 0, 0, 0), Op(OpKind.BW, 0, 0, 0))
    schedule = Schedule(name="a b", placement=Placement.loop(1), num_microbatches=1, ranks=(ops,))
    validate(schedule)
    costs = CostModel.uniform(schedule.placement)
    assert from_json(written(schedule, costs)) == (schedule, costs)


def test_what_can_be_recomputed_may_be_missing_or_wrong():
    schedule = build("1f1b", Problem(pp_size=2, num_microbatches=2))
    costs = CostModel.uniform(schedule.placement)
    data = json.loads(written(schedule, costs))
    del data["summary"]
    data["made by"] = "hand"
    for ops in data["ranks"]:
        for op in ops:
            del op["id"], op["stream"], op["end"]
            op["start"], op["waits_for"] = -5, ["nothing"]
    assert from_json(json.dumps(data)) == (schedule, costs)


def test_one_limit_stands_for_every_rank():
    data = example()
    data["costs"]["limits"] = {"device": 7, "host": [1, 2]}
    _, costs = from_json(json.dumps(data))
    assert (costs.device_limit, costs.host_limit) == ((7.0, 7.0), (1.0, 2.0))


def test_a_summary_is_compared_figure_by_figure():
    schedule = build("1f1b", Problem(pp_size=2, num_microbatches=2))
    timeline = simulate(schedule, CostModel.uniform(schedule.placement))
    claimed = json.loads(to_json(timeline, BOUND))["summary"]
    assert summary_differences(claimed, timeline) == []
    assert summary_differences({}, timeline) == []
    assert summary_differences(claimed | {"makespan": 9.0000000001}, timeline) == []
    for key, wrong in (
        ("makespan", 9.001),
        ("makespan", True),
        ("bubble_rate", None),
        ("span_bubble_rate", 1),
        ("peak", [2]),
        ("peak", 2),
        ("peak", [2, "1"]),
        ("lower_bound", 9.1),
        ("lower_bound", []),
    ):
        (text,) = summary_differences(claimed | {key: wrong}, timeline)
        assert text.startswith(f"summary.{key} is ") and "\n" not in text


def example():
    """A JSON export as data, to be broken."""
    schedule = build("zb-h1", Problem(pp_size=2, num_microbatches=2))
    costs = CostModel.uniform(schedule.placement, links=())
    return json.loads(written(add_communication(schedule, costs), costs))


REMOVED = object()
BROKEN = [
    (("format",), "other", "key 'format' is \"other\", needs 'megatron-pipeline-schedule'"),
    (("format",), REMOVED, "key 'format' is null"),
    (("version",), 2, "key 'version' is 2: this program reads version 1"),
    (("version",), REMOVED, "key 'version' is missing"),
    (("schedule",), REMOVED, "key 'schedule' is missing"),
    (("schedule",), 7, "schedule is 7, needs a text"),
    (("schedule",), "two\nlines", "one line"),
    (("placement",), "two words", "one word"),
    (("stages",), REMOVED, "key 'stages' is missing"),
    (("stages",), {}, "stages is an object of 0, needs a list"),
    (("stages",), [], "at least one stage"),
    (("stages", 1), [1], "stages[1] is a list of 1, needs [rank, chunk]"),
    (("stages", 1), [1, "0"], 'stages[1] is "0", needs a whole number'),
    (("stages", 1), [10**8, 0], "stages[1] is rank 100000000, chunk 0: 2 stages fill"),
    (("stages", 1), [0, 0], "exactly once"),
    (("pp_size",), 3, "key 'pp_size' is 3, but 'stages' has 2"),
    (("chunks_per_rank",), REMOVED, "key 'chunks_per_rank' is missing"),
    (("microbatches",), 0, "microbatches is 0, needs a whole number from 1"),
    (("microbatches",), 2.0, "microbatches is 2.0, needs a whole number"),
    (("microbatches",), True, "microbatches is true, needs a whole number"),
    (("microbatches",), 10**9, "at most 4000000 ops are read"),
    (("sequence_splits",), "1", 'sequence_splits is "1"'),
    (("lowered",), 1, "lowered is 1, needs true or false"),
    (("summary",), [], "summary is a list of 0, needs an object"),
    (("costs",), REMOVED, "key 'costs' is missing"),
    (("costs", "f"), REMOVED, "key 'costs.f' is missing"),
    (("costs", "f"), 1.0, "costs.f is 1.0, needs a list"),
    (("costs", "f"), [1.0], "one entry a stage"),
    (("costs", "f", 0), "1", 'costs.f[0] is "1", needs a number'),
    (("costs", "f", 0), -1, "'f' holds -1"),
    (("costs", "f", 0), 10**400, "costs.f[0] is too large a number"),
    (("costs", "b", 1), None, "costs.b[1] is null, needs a number"),
    (("costs", "memry_b"), [], "costs has the unknown key \"memry_b\"; known: "),
    (("costs", "comm"), "fast", 'costs.comm is "fast"'),
    (("costs", "comm"), [[0, 1]], "square matrix"),
    (("costs", "comm"), [0, 1], "costs.comm[0] is 0, needs a list"),
    (("costs", "comm"), [[0]], "'comm' is for 1 ranks, the schedule has 2"),
    (("costs", "d2h"), [1.0], "one entry a stage"),
    (("costs", "links"), [{"ranks": [0], "duplex": "half"}], "key 'costs.links[0].shared_factor' is missing"),
    (("costs", "links"), [{"ranks": [0], "duplex": "both", "shared_factor": 1}], "duplex 'both'"),
    (("costs", "links"), [{"ranks": [5], "duplex": "half", "shared_factor": 1}], "a link names rank 5"),
    (("costs", "links"), [[]], "costs.links[0] is a list of 0, needs an object"),
    (("costs", "limits"), {"device": None}, "key 'costs.limits.host' is missing"),
    (("costs", "limits", "device"), [1.0], "'device_limit' is for 1 ranks, the schedule has 2"),
    (("costs", "limits", "gpu"), 1, 'costs.limits has the unknown key "gpu"'),
    (("ranks",), REMOVED, "key 'ranks' is missing"),
    (("ranks",), "none", 'ranks is "none", needs a list'),
    (("ranks", 1), {}, "ranks[1] is an object of 0, needs a list"),
    (("ranks", 0, 3), "F 0.0 mb0 s0", "ranks[0][3] is "),
    (("ranks", 0, 0, "op"), REMOVED, "key 'ranks[0][0].op' is missing"),
    (("ranks", 0, 0, "op"), "Q", 'ranks[0][0].op is "Q"; known: F, B, W'),
    (("ranks", 0, 0, "op"), ["F"], "ranks[0][0].op is a list of 1; known"),
    (("ranks", 0, 0, "stage"), 2, "ranks[0][0].stage is 2: there are stages 0..1"),
    (("ranks", 0, 0, "stage"), -1, "ranks[0][0].stage is -1, needs a whole number from 0"),
    (("ranks", 0, 0, "microbatch"), 0.5, "ranks[0][0].microbatch is 0.5"),
    (("ranks", 0, 0, "sequence_split"), REMOVED, "key 'ranks[0][0].sequence_split' is missing"),
    (("ranks", 0, 0, "saves_activation"), 0, "ranks[0][0].saves_activation is 0, needs true or false"),
    (("ranks", 0, 0, "saves_activaton"), False, 'ranks[0][0] has the unknown key "saves_activaton"'),
    (("ranks", 0, 0, "id"), "F 0.0 mb1 s0", "ranks[0][0].id is \"F 0.0 mb1 s0\", but the op beside it is 'F 0.0 mb0 s0'"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"), BROKEN)
def test_a_broken_key_is_named_in_one_line(path, value, message):
    data = example()
    within = data
    for key in path[:-1]:
        within = within[key]
    if value is REMOVED:
        del within[path[-1]]
    else:
        within[path[-1]] = value
    with pytest.raises(ValueError) as error:
        read_schedule(json.dumps(data))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ("{", "not valid JSON: .* line 1, column 2"),
        ("[]", "the file is a list of 0, needs an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"format": NaN}', "NaN stands for a number"),
        ('{"format": 1, "format": 2}', 'key "format" stands twice'),
        ('{"version": ' + "9" * 5000 + "}", "digits"),
        ("0F0,0F1", "PyTorch's CSV"),
        ("\x00\x01", "the file begins with"),
        ("schedule x", "line 2"),
    ],
)
def test_what_is_no_schedule_file_is_told_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        read_file(text)
    assert "\n" not in str(error.value)


def test_a_damaged_export_is_refused_or_still_means_a_schedule():
    """Random damage to values and text: a ValueError in one line or a schedule, and the validator then copes with it."""
    rng = random.Random(3)
    values = [None, True, -1, 0, 1, 2, 3, 1.5, 1e400, "", "F", "RECV_FORWARD", [], {}, [[0, 0]], [1, 2]]
    outcomes = {"refused": 0, "invalid": 0, "valid": 0}
    offloaded = random_offload(rng, build("zb-h1", Problem(pp_size=2, num_microbatches=2)))
    wholes = [example(), json.loads(written(offloaded, CostModel.uniform(offloaded.placement, d2h=(1, 1), h2d=(1, 1))))]
    for number in range(1500):
        data = copy.deepcopy(wholes[number % 2])
        within = data
        while True:
            key = rng.choice(list(within) if isinstance(within, dict) else range(len(within)))
            if not (isinstance(within[key], (dict, list)) and within[key]) or rng.random() < 0.1:
                break
            within = within[key]
        if rng.random() < 0.2:
            del within[key]
        else:
            within[key] = rng.choice(values)
        text = json.dumps(data)
        if rng.random() < 0.1:
            cut = rng.randrange(len(text))
            text = text[:cut] + rng.choice(("", "x", "\u2603", "]")) + text[cut + 1 :]
        outcomes[_outcome(text)] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_damaged_text_is_refused_or_still_means_a_schedule():
    rng = random.Random(4)
    schedule = build("zb-h1", Problem(pp_size=2, num_microbatches=2))
    whole = add_communication(schedule, CostModel.uniform(schedule.placement)).to_text()
    outcomes = {"refused": 0, "invalid": 0, "valid": 0}
    for _ in range(1000):
        cut = rng.randrange(len(whole))
        text = whole[:cut] + rng.choice(("", "0", "1", "9", ";", " ", "\n", "B", "W")) + whole[cut + rng.randrange(2) :]
        outcomes[_outcome(text)] += 1
    assert min(outcomes.values()) > 10, outcomes


def _outcome(text):
    try:
        schedule, costs, claimed = read_file(text)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        return "refused"
    try:
        validate(schedule, costs)
    except ScheduleError:
        return "invalid"
    timeline = simulate(schedule, costs or CostModel.uniform(schedule.placement))
    assert all("\n" not in line for line in summary_differences(claimed or {}, timeline))
    return "valid"
