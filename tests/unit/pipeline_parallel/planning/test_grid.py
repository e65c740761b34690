import random
import re

import pytest
from random_schedules import LIFE, random_costs, random_offload, random_placement, random_schedule

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.grid import label, show_text, streams_text, time_grid
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement, Schedule
from megatron.pipeline_parallel.planning.passes.communication import add_communication
from megatron.pipeline_parallel.planning.simulate import simulate

LABEL = re.compile(r"(?:BW|[FBWR])\d+(?:c\d+|[a-z])?(?:/\d+)?")


def shown(name="1f1b", p=2, m=2, **costs):
    schedule = build(name, Problem(pp_size=p, num_microbatches=m))
    return show_text(simulate(schedule, CostModel.uniform(schedule.placement, **costs))).splitlines()


def test_a_grid_of_one_chunk():
    assert shown() == [
        "each op: kind, microbatch; a dot is idle; a column is 0.333333 of time",
        "time    0         3.33333   6.66667",
        "rank 0  F0 F1 ......BW0   ...BW1   |",
        "rank 1  ...F0 BW0   F1 BW1   ......|",
    ]


def test_the_scale_follows_the_times():
    lines = shown(f=0.1, b=0.2, w=0.2, comm=0.05)
    assert lines[0].endswith("a column is 0.025 of time")
    assert lines[2:] == [
        "rank 0  F0  F1  ....................BW0             ....BW1             |",
        "rank 1  ......F0  BW0             F1  BW1             ..................|",
    ]


def test_rounding_hides_no_common_step():
    # 0.1 has no exact binary form, so sums of it are all a little off.
    lines = shown("zb-h1", 8, 64, f=0.3, b=0.1, w=0.2, comm=0.1)
    assert lines[0].endswith("a column is 0.025 of time")


def test_the_widest_label_fits():
    lines = shown(p=1, m=101, b=0.5, w=0.5)
    assert lines[2].endswith("F99   BW99  F100  BW100 |")


def test_times_without_a_common_step_keep_the_grid_narrow():
    lines = shown("zb-h1", 3, 5, f=185.37, b=181.113, w=93.1237, comm=6.31)
    assert all(LABEL.findall(line) for line in lines[2:])
    # The shortest op is as wide as its label and one blank.
    width = max(map(len, lines))
    assert width < 8 + 3 * 15 * 3


@pytest.mark.parametrize("v", [2, 8, 27])
def test_every_chunk_has_a_letter_of_its_own(v):
    placement = Placement.loop(1, v)
    ops = [Op(OpKind.F, chunk, chunk, 0) for chunk in range(v)]
    ops += [Op(OpKind.BW, chunk, chunk, 0) for chunk in reversed(range(v))]
    schedule = Schedule(name="chunks", placement=placement, num_microbatches=1, ranks=(tuple(ops),))
    text = show_text(simulate(schedule, CostModel.uniform(placement)))
    labels = LABEL.findall(text.splitlines()[2])
    assert labels == [label(op, v) for op in ops] and len(set(labels)) == 2 * v
    assert "chunk (a = 0, b = 1" in text and ("c26 = 26" in text) == (v == 27)


def test_splits_are_told_apart():
    placement = Placement.loop(1)
    ops = [Op(OpKind.F, 0, 0, 3, 0), Op(OpKind.F, 0, 0, 3, 1), Op(OpKind.BW, 0, 0, 3, 1), Op(OpKind.BW, 0, 0, 3, 0)]
    schedule = Schedule(
        name="splits", placement=placement, num_microbatches=4, num_sequence_splits=2, ranks=(tuple(ops),)
    )
    lines = show_text(simulate(schedule, CostModel.uniform(placement))).splitlines()
    assert "/sequence split (none = 0)" in lines[0]
    assert LABEL.findall(lines[2]) == ["F3", "F3/1", "BW3/1", "BW3"]


def test_an_op_too_short_to_draw_is_listed():
    assert shown(p=1, m=1, b=0.001, w=0)[2:] == ["rank 0  F0 |", "too short to draw:", "rank 0  BW0 1..1.001"]
    assert shown(p=1, m=1, f=0, b=0, w=0)[2:] == ["rank 0  |", "too short to draw:", "rank 0  F0 0..0, BW0 0..0"]


def test_a_grid_can_be_read_back():
    rng, drawn = random.Random(0), 0
    for _ in range(60):
        placement = random_placement(rng)
        schedule = random_schedule(rng, placement, rng.choice((1, 2, 4, 11)), rng.randint(1, 2))
        timeline = simulate(schedule, random_costs(rng, placement))
        head, _, *rows = show_text(timeline).splitlines()
        unit = float(re.search(r"a column is (\S+) of time", head)[1])
        short = {row[:6]: LABEL.findall(row[8:]) for row in rows[placement.pp_size + 1 :]}
        for rank in range(placement.pp_size):
            row = rows[rank][8:]
            slots = {label(slot.op, placement.chunks_per_rank): slot for slot in timeline.compute(rank)}
            found = {match[0]: match for match in LABEL.finditer(row)}
            listed = short.get(f"rank {rank}", [])
            assert sorted([*found, *listed]) == sorted(slots)
            assert list(found) == [cell for cell in slots if cell in found]
            for cell, match in found.items():
                assert match.start() * unit == pytest.approx(slots[cell].start, rel=1e-4, abs=unit)
                drawn += 1
            idle = timeline.makespan - timeline.busy(rank)
            assert row.count(".") * unit == pytest.approx(idle, abs=2 * unit * (len(slots) + 1))
    assert drawn > 1000


def test_a_docstring_figure_has_no_more_than_it_needs():
    schedule = build("gpipe", Problem(pp_size=2, num_microbatches=3))
    assert time_grid(simulate(schedule, CostModel.uniform(schedule.placement))).splitlines() == [
        "rank 0  F0F1F2      BW0 BW1 BW2",
        "rank 1    F0F1F2BW0 BW1 BW2",
    ]
    placement = Placement.v(1)
    ops = (Op(OpKind.F, 0, 0, 0), Op(OpKind.F, 1, 1, 0), Op(OpKind.BW, 1, 1, 0), Op(OpKind.BW, 0, 0, 0))
    schedule = Schedule(name="v", placement=placement, num_microbatches=1, ranks=(ops,))
    assert time_grid(simulate(schedule, CostModel.uniform(placement))) == "rank 0  F0aF0bBW0b  BW0a"


def test_ten_ranks_stay_in_line():
    schedule = build("1f1b", Problem(pp_size=11, num_microbatches=1))
    lines = show_text(simulate(schedule, CostModel.uniform(schedule.placement))).splitlines()
    assert lines[2].startswith("rank 0   F0 ") and lines[12].startswith("rank 10  ..")


def test_streams_show_why_an_op_may_stand_between_prep_and_start():
    kinds = [
        ("F", 0),
        (LIFE[0], 0),
        ("F", 1),
        (LIFE[1], 0),
        (LIFE[2], 0),
        ("BW", 1),
        (LIFE[3], 0),
        ("BW", 0),
        (LIFE[4], 0),
    ]
    ops = tuple(Op(OpKind(kind), stage, stage, 0) for kind, stage in kinds)
    schedule = Schedule(name="v", placement=Placement.v(1), num_microbatches=1, ranks=(ops,))
    costs = CostModel.uniform(schedule.placement, d2h=(0.25, 0.25), h2d=(0.75, 0.75))
    lines = streams_text(simulate(schedule, costs)).splitlines()
    assert [line.split() for line in lines[:2]] == [["rank", "0"], ["start", "end", "stream", "op"]]
    cells = [re.split(r"\s{2,}", line.strip().replace(" ", "  ", 1), maxsplit=4) for line in lines[2:]]
    assert cells == [
        ["0", "0.5", "compute", "F 0.0 mb0 s0"],
        ["0.5", "0.75", "D2H", "OFFLOAD_SEND_START 0.0 mb0 s0", "waits for: F 0.0 mb0 s0"],
        ["0.5", "1", "compute", "F 1.1 mb0 s0", "waits for: F 0.0 mb0 s0"],
        ["1", "1", "compute", "OFFLOAD_SEND_END 0.0 mb0 s0", "waits for: OFFLOAD_SEND_START 0.0 mb0 s0"],
        ["1", "1", "compute", "OFFLOAD_RECV_PREP 0.0 mb0 s0", "waits for: OFFLOAD_SEND_END 0.0 mb0 s0"],
        ["1", "2", "compute", "BW 1.1 mb0 s0"],
        [
            "1",
            "1.75",
            "H2D",
            "OFFLOAD_RECV_START 0.0 mb0 s0",
            "waits for: OFFLOAD_RECV_PREP 0.0 mb0 s0, OFFLOAD_SEND_START 0.0 mb0 s0",
        ],
        ["2", "3", "compute", "BW 0.0 mb0 s0", "waits for: BW 1.1 mb0 s0, OFFLOAD_RECV_START 0.0 mb0 s0"],
        ["3", "3", "compute", "OFFLOAD_RECV_END 0.0 mb0 s0", "waits for: OFFLOAD_RECV_START 0.0 mb0 s0"],
    ]


def test_streams_hold_every_op_in_issue_order():
    rng = random.Random(3)
    for _ in range(20):
        placement = random_placement(rng)
        costs = random_costs(rng, placement)
        schedule = add_communication(random_offload(rng, random_schedule(rng, placement, 3)), costs)
        found = re.findall(
            r"^ .*?  (?:\S+|send \d+|recv \d+) +(\S+ \d+\.\d+ mb\d+ s\d+)",
            streams_text(simulate(schedule, costs)),
            re.M,
        )
        assert found == [str(op) for ops in schedule.ranks for op in ops]
