import random

import pytest
from random_schedules import random_costs, random_placement, random_schedule

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import COMPUTE, Op, OpKind, Placement, Schedule
from megatron.pipeline_parallel.planning.passes.communication import add_communication
from megatron.pipeline_parallel.planning.simulate import StuckError, simulate


def ends(schedule, costs):
    """An independent clock: relax every op's end until nothing moves."""
    stages = schedule.placement.num_stages
    end = {op: 0.0 for ops in schedule.ranks for op in ops}
    for _ in range(len(end) + 1):
        for rank, ops in enumerate(schedule.ranks):
            clock = 0.0
            for op in ops:
                near = {OpKind.F: -1, OpKind.B: 1, OpKind.BW: 1}.get(op.kind, 0)
                peer = op.stage + near
                if near and 0 <= peer < stages:
                    kinds = (OpKind.F,) if near < 0 else (OpKind.B, OpKind.BW)
                    source, chunk = schedule.placement.stages[peer]
                    made = max(end.get(Op(kind, peer, chunk, op.microbatch), 0.0) for kind in kinds)
                    clock = max(clock, made + (costs.message_time(source, rank) if source != rank else 0.0))
                clock += costs.duration(op)
                end[op] = clock
    return end


def test_times_equal_an_independent_clock():
    rng = random.Random(3)
    for _ in range(150):
        placement = random_placement(rng)
        schedule, costs = random_schedule(rng, placement, rng.randint(1, 4)), random_costs(rng, placement)
        timeline = simulate(schedule, costs)
        expected = ends(schedule, costs)
        assert {slot.op: slot.end for slots in timeline.slots for slot in slots} == expected
        assert timeline.makespan == max(expected.values())


def test_messages_made_explicit_change_no_time():
    rng = random.Random(4)
    for _ in range(300):
        placement = random_placement(rng)
        schedule, costs = random_schedule(rng, placement, rng.randint(1, 4)), random_costs(rng, placement)
        program = simulate(add_communication(schedule, costs), costs)
        plain = simulate(schedule, costs)
        assert [program.compute(rank) for rank in range(placement.pp_size)] == [list(slots) for slots in plain.slots]


def test_a_message_lasts_from_its_send_to_its_arrival():
    schedule = build("1f1b", Problem(pp_size=2, num_microbatches=1))
    costs = CostModel.uniform(schedule.placement, comm=0.5)
    slots = simulate(add_communication(schedule, costs), costs).slots
    times = {str(slot.op): (slot.start, slot.end, slot.stream) for rank in slots for slot in rank}
    assert times == {
        "F 0.0 mb0 s0": (0.0, 1.0, "compute"),
        "SEND_FORWARD 0.0 mb0 s0": (1.0, 1.5, "send 1"),
        "RECV_FORWARD 1.0 mb0 s0": (0.0, 1.5, "recv 0"),
        "F 1.0 mb0 s0": (1.5, 2.5, "compute"),
        "BW 1.0 mb0 s0": (2.5, 4.5, "compute"),
        "SEND_BACKWARD 1.0 mb0 s0": (4.5, 5.0, "send 0"),
        "RECV_BACKWARD 0.0 mb0 s0": (1.0, 5.0, "recv 1"),
        "BW 0.0 mb0 s0": (5.0, 7.0, "compute"),
    }


def test_both_bubble_rates_by_hand():
    schedule = build("1f1b", Problem(pp_size=2, num_microbatches=1))
    timeline = simulate(schedule, CostModel.uniform(schedule.placement, f=1, b=2, w=1))
    # Rank 0: F at 0..1, BW at 5..8. Rank 1: F at 1..2, BW at 2..5.
    assert timeline.makespan == 8
    assert timeline.bubble_rate == pytest.approx(1 - 8 / 16)
    assert timeline.span_bubble_rate == pytest.approx(1 - 4 / 8)


def test_memory_is_booked_b_until_its_end_then_w():
    placement = Placement.loop(1)
    ops = [
        Op(OpKind.F, 0, 0, 0),
        Op(OpKind.B, 0, 0, 0),
        Op(OpKind.F, 0, 0, 1),
        Op(OpKind.B, 0, 0, 1),
        Op(OpKind.W, 0, 0, 0),
        Op(OpKind.W, 0, 0, 1),
    ]
    schedule = Schedule(name="hand", placement=placement, num_microbatches=2, ranks=(tuple(ops),))
    for memory_b, memory_w, peak in ((2.0, 1.0, 3.0), (1.0, 3.0, 6.0), (5.0, 0.0, 5.0)):
        timeline = simulate(schedule, CostModel.uniform(placement, memory_b=memory_b, memory_w=memory_w))
        assert timeline.peak_memory(0) == peak
        assert timeline.peak(0) == 2


def test_an_order_that_waits_in_a_circle_is_stuck_where_it_waits():
    placement = Placement.loop(2)
    forward = [Op(OpKind.F, stage, 0, microbatch) for stage in range(2) for microbatch in range(2)]
    schedule = Schedule(
        name="circle",
        placement=placement,
        num_microbatches=2,
        ranks=((forward[0], Op(OpKind.BW, 0, 0, 0), forward[1]), (forward[3], forward[2], Op(OpKind.BW, 1, 0, 0))),
    )
    with pytest.raises(StuckError) as caught:
        simulate(schedule, CostModel.uniform(placement))
    assert caught.value.blocked == {0: 1, 1: 0}


def test_costs_for_another_number_of_stages_are_refused():
    schedule = build("1f1b", Problem(pp_size=2, num_microbatches=1))
    with pytest.raises(ValueError, match="costs are for 3 stages, the schedule has 2"):
        simulate(schedule, CostModel.uniform(Placement.loop(3)))
    with pytest.raises(ValueError, match="'comm' is for 1 ranks, the schedule has 2"):
        simulate(schedule, CostModel.uniform(Placement.loop(2), comm=((0.0,),)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"f": (1.0,)}, "one entry a stage"),
        ({"b": (1.0, -1.0)}, "'b' holds -1.0"),
        ({"w": (1.0, float("nan"))}, "'w' holds nan"),
        ({"comm": ((0.0, 1.0),)}, "square matrix"),
        ({"comm": float("inf")}, "'comm' holds inf"),
        ({"comm": [1.0, 2.0]}, "square matrix"),
    ],
)
def test_costs_check_themselves(change, message):
    fields = dict.fromkeys(("f", "b", "w", "r", "memory_b", "memory_w"), (1.0, 1.0)) | {"comm": 0.0} | change
    with pytest.raises(ValueError, match=message):
        CostModel(**fields)


def test_a_chunk_takes_its_share_of_the_rank():
    costs = CostModel.uniform(Placement.v(2), f=3, b=4, w=1, memory_b=2)
    assert costs.f == (1.5,) * 4 and costs.b == (2.0,) * 4 and costs.w == (0.5,) * 4 and costs.memory_b == (1.0,) * 4


def test_all_compute_kinds_take_time():
    costs = CostModel.uniform(Placement.loop(1), f=1, b=2, w=4)
    assert {kind: costs.duration(Op(kind, 0, 0, 0)) for kind in COMPUTE} == {
        OpKind.F: 1, OpKind.B: 2, OpKind.W: 4, OpKind.BW: 6, OpKind.R: 1,
    }  # fmt: skip
