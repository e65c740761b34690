import random

import pytest
from random_schedules import LIFE, random_costs, random_offload, random_placement, random_schedule

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.dataflow import stream_of, waits_for
from megatron.pipeline_parallel.planning.op import COMMUNICATION, Op, OpKind, Placement, Schedule
from megatron.pipeline_parallel.planning.passes.communication import add_communication
from megatron.pipeline_parallel.planning.simulate import simulate


def named(schedule):
    """By op, the ops that it waits for, both as text without the split."""
    return {
        str(op)[:-3]: [str(before)[:-3] for before in found]
        for ops, waits in zip(schedule.ranks, waits_for(schedule))
        for op, found in zip(ops, waits)
    }


def test_without_messages_an_op_waits_for_who_makes_its_input():
    waits = named(build("zb-h1", Problem(pp_size=2, num_microbatches=1)))
    assert waits == {
        "F 0.0 mb0": [],
        "F 1.0 mb0": ["F 0.0 mb0"],
        "B 1.0 mb0": [],
        "B 0.0 mb0": ["B 1.0 mb0"],
        "W 0.0 mb0": [],
        "W 1.0 mb0": [],
    }


def test_with_messages_an_op_waits_for_its_receive_and_a_send_for_its_maker():
    schedule = build("1f1b", Problem(pp_size=2, num_microbatches=1))
    assert named(add_communication(schedule, CostModel.uniform(schedule.placement))) == {
        "F 0.0 mb0": [],
        "SEND_FORWARD 0.0 mb0": ["F 0.0 mb0"],
        "RECV_FORWARD 1.0 mb0": [],
        "F 1.0 mb0": ["RECV_FORWARD 1.0 mb0"],
        "BW 1.0 mb0": [],
        "SEND_BACKWARD 1.0 mb0": ["BW 1.0 mb0"],
        "RECV_BACKWARD 0.0 mb0": [],
        "BW 0.0 mb0": ["RECV_BACKWARD 0.0 mb0"],
    }


def test_stages_of_one_rank_wait_for_each_other_without_a_message():
    schedule = random_schedule(random.Random(0), Placement.loop(1, 2), 1)
    waits = named(add_communication(schedule, CostModel.uniform(schedule.placement)))
    assert waits["F 1.1 mb0"] == ["F 0.0 mb0"]
    assert [found for op, found in waits.items() if op.startswith("B") and " 0.0" in op] in (
        [["B 1.1 mb0"]],
        [["BW 1.1 mb0"]],
    )


def test_the_events_in_the_life_of_an_offloaded_activation():
    kinds = (OpKind.F, *LIFE[:4], OpKind.B, OpKind.W, LIFE[4])
    ops = tuple(Op(kind, 0, 0, 0) for kind in kinds)
    schedule = Schedule(name="life", placement=Placement.loop(1), num_microbatches=1, ranks=(ops,))
    place = " 0.0 mb0"
    assert named(schedule) == {
        f"F{place}": [],
        f"OFFLOAD_SEND_START{place}": [f"F{place}"],
        f"OFFLOAD_SEND_END{place}": [f"OFFLOAD_SEND_START{place}"],
        f"OFFLOAD_RECV_PREP{place}": [f"OFFLOAD_SEND_END{place}"],
        f"OFFLOAD_RECV_START{place}": [f"OFFLOAD_RECV_PREP{place}", f"OFFLOAD_SEND_START{place}"],
        f"B{place}": [f"OFFLOAD_RECV_START{place}"],
        f"W{place}": [],
        f"OFFLOAD_RECV_END{place}": [f"OFFLOAD_RECV_START{place}"],
    }


def test_nothing_starts_before_what_it_waits_for_has_ended():
    rng, events = random.Random(1), 0
    for _ in range(60):
        placement = random_placement(rng)
        order = random_offload(rng, random_schedule(rng, placement, rng.randint(1, 4), rng.randint(1, 2)))
        costs = random_costs(rng, placement)
        for schedule in (order, add_communication(order, costs)):
            slots = [slot for slots in simulate(schedule, costs).slots for slot in slots]
            end = {slot.op: slot.end for slot in slots}
            for slot, found in zip(slots, (found for waits in waits_for(schedule) for found in waits)):
                assert all(slot.start >= end[before] for before in found)
                events += len(found)
    assert events > 1000


def test_streams_are_the_ones_that_slots_name():
    rng = random.Random(2)
    placement = Placement.v(2)
    costs = random_costs(rng, placement)
    schedule = add_communication(random_offload(rng, random_schedule(rng, placement, 3)), costs)
    slots = [slot for slots in simulate(schedule, costs).slots for slot in slots]
    assert all(slot.stream == stream_of(slot.op, placement) for slot in slots)
    assert {slot.stream for slot in slots} == {"compute", "send 0", "send 1", "recv 0", "recv 1", "D2H", "H2D"}


@pytest.mark.parametrize(
    "text, stream",
    [
        ("F 1.0 mb0 s0", "compute"),
        ("R 1.0 mb0 s0", "compute"),
        ("SEND_FORWARD 1.0 mb0 s0", "send 2"),
        ("RECV_FORWARD 1.0 mb0 s0", "recv 0"),
        ("SEND_BACKWARD 1.0 mb0 s0", "send 0"),
        ("RECV_BACKWARD 1.0 mb0 s0", "recv 2"),
        ("OFFLOAD_SEND_START 1.0 mb0 s0", "D2H"),
        ("OFFLOAD_SEND_END 1.0 mb0 s0", "compute"),
        ("OFFLOAD_RECV_PREP 1.0 mb0 s0", "compute"),
        ("OFFLOAD_RECV_START 1.0 mb0 s0", "H2D"),
        ("OFFLOAD_RECV_END 1.0 mb0 s0", "compute"),
    ],
)
def test_each_kind_has_its_stream(text, stream):
    op = Op.parse(text)
    assert op.kind in COMMUNICATION or stream in ("compute", "D2H", "H2D")
    assert stream_of(op, Placement.loop(3)) == stream
