import random

import pytest
from random_schedules import random_placement, random_schedule

from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement, Schedule


@pytest.mark.parametrize("kind", OpKind)
def test_every_op_prints_and_parses_back(kind):
    for op in (Op(kind, 3, 1, 5), Op(kind, 0, 0, 0, 2), Op(kind, 12, 2, 345, 1, False)):
        assert Op.parse(str(op)) == op


def test_an_op_prints_as_kind_stage_chunk_microbatch_split():
    assert str(Op(OpKind.F, 3, 1, 5)) == "F 3.1 mb5 s0"
    assert str(Op(OpKind.OFFLOAD_RECV_PREP, 0, 0, 12, 2)) == "OFFLOAD_RECV_PREP 0.0 mb12 s2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "F 3.1 mb5",
        "F 3.1 mb5 s0 more",
        "Q 3.1 mb5 s0",
        "F 3 mb5 s0",
        "F 3.1 5 s0",
        "F 3.1 mb-5 s0",
        "F 3.1 mb5 s",
        "f 3.1 mb5 s0",
        "F 3.1 mb5 s0x",
        "F ³.1 mb5 s0",
    ],
)
def test_a_malformed_op_is_refused_by_its_text(text):
    with pytest.raises(ValueError, match="op '"):
        Op.parse(text)


def test_loop_placement_deals_stages_out_in_turn():
    assert Placement.loop(3, 2).stages == ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1))


def test_v_placement_turns_at_the_last_rank():
    placement = Placement.v(3)
    assert placement.stages == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))
    assert placement.is_local(2, 3) and not placement.is_local(1, 2)
    assert placement.stages_of(0) == (0, 5)
    assert placement.stage_at(1, 1) == 4


@pytest.mark.parametrize("stages", [(), ((0, 0), (0, 0)), ((0, 0), (2, 0)), ((0, 0), (1, 0), (0, 1)), ((0, 1),)])
def test_a_placement_fills_every_rank_and_chunk_once(stages):
    with pytest.raises(ValueError, match="placement"):
        Placement(name="custom", stages=stages)


@pytest.mark.parametrize("name", ["", "two words", "line\nbreak"])
def test_a_placement_is_named_by_one_word(name):
    with pytest.raises(ValueError, match="one word"):
        Placement(name=name, stages=((0, 0),))


def test_a_schedules_name_fits_one_line():
    with pytest.raises(ValueError, match="one line"):
        Schedule(name="two\nlines", placement=Placement.loop(1), num_microbatches=1, ranks=((),))


def test_a_schedule_prints_and_parses_back():
    rng = random.Random(0)
    for _ in range(50):
        schedule = random_schedule(rng, random_placement(rng), rng.randint(1, 4))
        again = Schedule.from_text(schedule.to_text())
        assert again == schedule
        assert again.digest == schedule.digest


def test_the_digest_tells_two_orders_apart():
    schedule = random_schedule(random.Random(1), Placement.loop(2), 2)
    first = schedule.ranks[0]
    swapped = schedule.with_ranks([(first[1], first[0], *first[2:]), schedule.ranks[1]])
    assert swapped.digest != schedule.digest


@pytest.mark.parametrize(
    "line, wrong, message",
    [
        (0, "", "line 1"),
        (1, "placement loop 0,0 x", "number"),
        (2, "microbatches", "line 3"),
        (2, "microbatches many", "number"),
        (5, "F 0.0 mb0 s0", "line 6"),
        (5, "rank F 0.0 mb0", "line 6"),
    ],
)
def test_broken_schedule_text_names_the_line(line, wrong, message):
    lines = random_schedule(random.Random(2), Placement.loop(1), 1).to_text().splitlines()
    lines[line] = wrong
    with pytest.raises(ValueError, match=message):
        Schedule.from_text("\n".join(lines))
