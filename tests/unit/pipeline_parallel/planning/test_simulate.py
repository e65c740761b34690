import random
import time
from dataclasses import replace

import pytest
from chronological import times_of
from random_schedules import random_costs, random_links, random_offload, random_placement, random_schedule

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel, Link
from megatron.pipeline_parallel.planning.op import (
    COMMUNICATION,
    COMPUTE,
    COPIES,
    OFFLOAD,
    Op,
    OpKind,
    Placement,
    Schedule,
)
from megatron.pipeline_parallel.planning.passes.communication import add_communication
from megatron.pipeline_parallel.planning.simulate import StuckError, Traffic, simulate


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


def random_case(rng):
    """A schedule with offload and splits, its program with messages, and costs with links."""
    placement = random_placement(rng)
    order = random_schedule(rng, placement, rng.randint(1, 4), rng.choice((1, 1, 2, 3)))
    schedule = random_offload(rng, order)
    costs = replace(random_costs(rng, placement), links=random_links(rng, placement.pp_size))
    return schedule, add_communication(schedule, costs), costs


def test_offload_splits_and_shared_links_equal_an_independent_simulator():
    rng, slowed = random.Random(10), 0
    for _ in range(80):
        schedule, program, costs = random_case(rng)
        for order in (schedule, program):
            expected = times_of(order, costs)
            for slot in (slot for slots in simulate(order, costs).slots for slot in slots):
                start, end = expected[slot.op]
                assert slot.start == pytest.approx(start)
                # The other simulator knows when a message leaves, not when it arrives.
                assert slot.op.kind in COMMUNICATION or slot.end == pytest.approx(end)
                time_alone = costs.duration(slot.op, order.num_sequence_splits)
                slowed += slot.op.kind in COPIES and slot.end - slot.start > time_alone + 1e-9
    assert slowed > 30


def test_messages_made_explicit_change_no_time_of_what_is_offloaded():
    rng = random.Random(11)
    for _ in range(100):
        schedule, program, costs = random_case(rng)
        plain, explicit = simulate(schedule, costs), simulate(program, costs)
        for rank, slots in enumerate(plain.slots):
            assert [slot for slot in explicit.slots[rank] if slot.op.kind not in COMMUNICATION] == list(slots)
            assert explicit.traffic(rank) == plain.traffic(rank)
            assert explicit.peak_memory(rank) == plain.peak_memory(rank)


def test_program_order_is_kept_whatever_late_receives_do_to_the_times():
    rng, later = random.Random(12), 0
    for _ in range(60):
        _, program, costs = random_case(rng)
        ranks = []
        for ops in program.ranks:
            # Each receive goes right before its user.
            ops = list(ops)
            for recv in [op for op in ops if op.kind in (OpKind.RECV_FORWARD, OpKind.RECV_BACKWARD)]:
                users = (OpKind.F,) if recv.kind == OpKind.RECV_FORWARD else (OpKind.B, OpKind.BW)
                ops.remove(recv)
                ops.insert(next(i for i, op in enumerate(ops) if op.kind in users and op.unit == recv.unit), recv)
            ranks.append(ops)
        late = program.with_ranks(ranks)
        try:
            timeline = simulate(late, costs)
        except StuckError:
            with pytest.raises(RuntimeError, match="stuck"):
                times_of(late, costs)
            continue
        expected = times_of(late, costs)
        assert all(slot.start == pytest.approx(expected[slot.op][0]) for slots in timeline.slots for slot in slots)
        later += timeline.makespan > simulate(program, costs).makespan
    assert later > 5


def on_one_rank(*texts, chunks=1, microbatches=2):
    ops = tuple(Op.parse(f"{text.strip()} s0") for line in texts for text in line.split(","))
    placement = Placement.loop(1, chunks)
    return Schedule(name="hand", placement=placement, num_microbatches=microbatches, ranks=(ops,))


def costs_of_copies(placement, duplex="half", d2h=2.0, h2d=3.0, **others):
    size = placement.num_stages
    links = (Link(ranks=tuple(range(placement.pp_size)), duplex=duplex, **others),)
    return CostModel.uniform(placement, d2h=(d2h,) * size, h2d=(h2d,) * size, links=links)


def times(timeline):
    return {str(slot.op)[:-3]: (slot.start, slot.end) for slots in timeline.slots for slot in slots}


TWO_OFFLOADED = (
    "F 0.0 mb0, OFFLOAD_SEND_START 0.0 mb0, F 0.0 mb1, OFFLOAD_SEND_END 0.0 mb0, OFFLOAD_RECV_PREP 0.0 mb0",
    "OFFLOAD_SEND_START 0.0 mb1, OFFLOAD_RECV_START 0.0 mb0, BW 0.0 mb0, OFFLOAD_RECV_END 0.0 mb0",
    "OFFLOAD_SEND_END 0.0 mb1, OFFLOAD_RECV_PREP 0.0 mb1, OFFLOAD_RECV_START 0.0 mb1, BW 0.0 mb1",
    "OFFLOAD_RECV_END 0.0 mb1",
)


@pytest.mark.parametrize(
    "duplex, expected",
    [
        # One queue: to the host 1..3, to the host 3..5, back 5..8; BW 8..10, back 10..13.
        ("half", {"SEND1": (3, 5), "RECV0": (5, 8), "BW0": (8, 10), "RECV1": (10, 13), "BW1": (13, 15)}),
        # The copy back of microbatch 0 goes while microbatch 1 still leaves: both begin at 3.
        ("full", {"SEND1": (3, 5), "RECV0": (3, 6), "BW0": (6, 8), "RECV1": (8, 11), "BW1": (11, 13)}),
    ],
)
def test_copies_of_one_rank_go_in_one_queue_or_in_one_each_way(duplex, expected):
    schedule = on_one_rank(*TWO_OFFLOADED)
    found = times(simulate(schedule, costs_of_copies(schedule.placement, duplex)))
    assert found["OFFLOAD_SEND_START 0.0 mb0"] == (1, 3)
    # SEND_END of microbatch 0 holds the compute stream up from 2 to 3, when its copy ends.
    assert found["OFFLOAD_SEND_END 0.0 mb0"] == found["OFFLOAD_RECV_PREP 0.0 mb0"] == (3, 3)
    names = {"SEND": "OFFLOAD_SEND_START", "RECV": "OFFLOAD_RECV_START", "BW": "BW"}
    assert {name: found[f"{names[name[:-1]]} 0.0 mb{name[-1]}"] for name in expected} == expected


def test_without_a_link_of_its_own_a_rank_has_a_half_duplex_one():
    schedule = on_one_rank(*TWO_OFFLOADED)
    costs = costs_of_copies(schedule.placement)
    assert simulate(schedule, replace(costs, links=())).slots == simulate(schedule, costs).slots


def test_an_op_between_prep_and_start_does_not_hold_the_copy_up():
    schedule = on_one_rank(
        "F 0.0 mb0, OFFLOAD_SEND_START 0.0 mb0, F 1.1 mb0, OFFLOAD_SEND_END 0.0 mb0, OFFLOAD_RECV_PREP 0.0 mb0",
        "BW 1.1 mb0, OFFLOAD_RECV_START 0.0 mb0, BW 0.0 mb0, OFFLOAD_RECV_END 0.0 mb0",
        chunks=2,
        microbatches=1,
    )
    found = times(simulate(schedule, costs_of_copies(schedule.placement, d2h=0.25, h2d=0.25)))
    assert found["OFFLOAD_RECV_PREP 0.0 mb0"] == (1, 1)
    assert found["BW 1.1 mb0"] == (1, 2)
    assert found["OFFLOAD_RECV_START 0.0 mb0"] == (1, 1.25)
    assert found["BW 0.0 mb0"] == (2, 3)


def one_copy_each(**link):
    """Two ranks, one microbatch, both activations offloaded while the gradient is far away."""
    placement = Placement.loop(2)
    kinds = ["F", *sorted(OFFLOAD - {OpKind.OFFLOAD_RECV_END}, key=list(OpKind).index), "BW", OpKind.OFFLOAD_RECV_END]
    ranks = tuple(tuple(Op(OpKind(kind), rank, 0, 0) for kind in kinds) for rank in range(2))
    schedule = Schedule(name="shared", placement=placement, num_microbatches=1, ranks=ranks)
    return times(simulate(schedule, costs_of_copies(placement, d2h=2.0, h2d=4.0, **link)))


def test_copies_on_a_shared_link_slow_each_other_while_both_last():
    found = one_copy_each(shared_factor=2.0)
    # Rank 0 copies 1..2 alone, half of it; then rank 1 begins, too, and the other half takes 2.
    assert found["OFFLOAD_SEND_START 0.0 mb0"] == (1, 4)
    # At 4 rank 1 has 1 left, and rank 0 begins to copy back at once: 2 more.
    assert found["OFFLOAD_SEND_START 1.0 mb0"] == (2, 6)
    # Rank 0 has 3 left at 6, when rank 1 copies back 4: 3 at half speed until 12, and of rank 1's 4 then 1 alone.
    assert found["OFFLOAD_RECV_START 0.0 mb0"] == (4, 12)
    assert found["OFFLOAD_RECV_START 1.0 mb0"] == (6, 13)
    assert found["BW 1.0 mb0"] == (13, 15)


def test_on_a_full_duplex_link_only_copies_of_one_direction_slow_each_other():
    found = one_copy_each(duplex="full", shared_factor=2.0)
    assert found["OFFLOAD_SEND_START 0.0 mb0"] == (1, 4)
    # Alone on its way from 4 on.
    assert found["OFFLOAD_SEND_START 1.0 mb0"] == (2, 5)
    # 1 alone, then two at once: 3 more at half speed until 11, when rank 1 has 1 left.
    assert found["OFFLOAD_RECV_START 0.0 mb0"] == (4, 11)
    assert found["OFFLOAD_RECV_START 1.0 mb0"] == (5, 12)


def test_a_link_that_does_not_slow_is_as_good_as_one_of_its_own():
    assert one_copy_each(shared_factor=1.0)["OFFLOAD_SEND_START 0.0 mb0"] == (1, 3)
    assert one_copy_each(shared_factor=1.0)["OFFLOAD_SEND_START 1.0 mb0"] == (2, 4)


def test_an_offload_that_waits_for_itself_is_stuck_where_it_waits():
    schedule = on_one_rank("OFFLOAD_SEND_END 0.0 mb0, F 0.0 mb0, OFFLOAD_SEND_START 0.0 mb0", microbatches=1)
    with pytest.raises(StuckError, match="rank 0 in OFFLOAD_SEND_END 0.0 mb0 s0") as caught:
        simulate(schedule, CostModel.uniform(schedule.placement))
    assert caught.value.blocked == {0: 0}


def test_a_receive_of_a_message_that_nobody_sends_is_stuck_though_nobody_computes_with_it():
    ranks = ((Op.parse("F 0.0 mb0 s0"),), (Op.parse("RECV_FORWARD 1.0 mb0 s0"),))
    schedule = Schedule(name="lost", placement=Placement.loop(2), num_microbatches=1, ranks=ranks, lowered=True)
    for one_queue in (False, True):
        with pytest.raises(StuckError, match="never ends: rank 1 in RECV_FORWARD 1.0 mb0 s0$"):
            simulate(schedule, CostModel.uniform(schedule.placement), one_queue_a_rank=one_queue)


def test_an_op_outside_of_the_schedule_is_refused():
    with pytest.raises(ValueError, match="F 0.0 mb5 s0 is outside of schedule 'hand', which has 1 stages, 2 microb"):
        simulate(on_one_rank("F 0.0 mb5"), CostModel.uniform(Placement.loop(1)))


def test_what_computes_is_neither_a_copy_nor_a_wait():
    schedule = on_one_rank(*TWO_OFFLOADED)
    timeline = simulate(schedule, costs_of_copies(schedule.placement))
    assert {slot.op.kind for slot in timeline.compute(0)} == {OpKind.F, OpKind.BW}
    assert timeline.busy(0) == 6 and timeline.makespan == 15
    assert timeline.bubble_rate == timeline.span_bubble_rate == pytest.approx(1 - 6 / 15)


def test_an_offloaded_activation_is_on_the_device_until_send_end_and_again_from_prep():
    schedule = on_one_rank(*TWO_OFFLOADED)
    timeline = simulate(schedule, costs_of_copies(schedule.placement))
    # F0 at 0, F1 at 1, both held; SEND_END and PREP of microbatch 0 at 3; BW0 ends at 10, and so microbatch 1 leaves and
    # comes back; BW1 ends at 15.
    steps = [(0, 0), (0, 1), (1, 2), (3, 1), (3, 2), (10, 1), (10, 0), (10, 1), (15, 0)]
    assert timeline.memory(0) == steps
    # SEND_START stands behind F1 for microbatch 1, and behind SEND_END of microbatch 0.
    assert timeline.host_memory(0) == [(0, 0), (1, 1), (3, 2), (10, 1), (15, 0)]
    assert (timeline.peak(0), timeline.peak_memory(0), timeline.peak_host_memory(0)) == (2, 2, 2)


def test_memory_over_time_peaks_at_the_peak_and_ends_at_nothing():
    rng = random.Random(13)
    for _ in range(100):
        schedule, program, costs = random_case(rng)
        timeline = simulate(rng.choice((schedule, program)), costs)
        for rank in range(schedule.pp_size):
            for steps, peak in (
                (timeline.memory(rank), timeline.peak_memory(rank)),
                (timeline.host_memory(rank), timeline.peak_host_memory(rank)),
            ):
                assert max(held for _, held in steps) == peak
                assert steps[-1][1] == 0
                assert [moment for moment, _ in steps] == sorted(moment for moment, _ in steps)


def test_a_split_takes_its_share_of_time_and_memory():
    ops = [Op(OpKind.F, 0, 0, 0, split) for split in (0, 1)] + [Op(OpKind.BW, 0, 0, 0, split) for split in (1, 0)]
    schedule = Schedule(
        name="split", placement=Placement.loop(1), num_microbatches=1, num_sequence_splits=2, ranks=(tuple(ops),)
    )
    timeline = simulate(schedule, CostModel.uniform(schedule.placement, memory_b=8))
    assert [(slot.start, slot.end) for slot in timeline.slots[0]] == [(0, 0.5), (0.5, 1), (1, 2), (2, 3)]
    assert timeline.memory(0) == [(0, 0), (0, 4), (0.5, 8), (2, 4), (3, 0)]
    assert (timeline.peak(0), timeline.busy(0), timeline.bubble_rate) == (1, 3, 0)


def test_traffic_counts_messages_and_copies():
    schedule = build("1f1b", Problem(pp_size=3, num_microbatches=4))
    costs = CostModel.uniform(schedule.placement, message=(10.0, 20.0, 40.0))
    for order in (schedule, add_communication(schedule, costs)):
        # Stage 1 hands on 20 and returns the gradient of what stage 0 handed on, 10, four times each.
        expected = [Traffic(4, 40, 0, 0), Traffic(8, 120, 0, 0), Traffic(4, 80, 0, 0)]
        assert [simulate(order, costs).traffic(rank) for rank in range(3)] == expected
    unknown = simulate(schedule, CostModel.uniform(schedule.placement))
    assert unknown.traffic(1) == Traffic(8, None, 0, 0)
    offload = on_one_rank(*TWO_OFFLOADED)
    copied = simulate(offload, CostModel.uniform(offload.placement, memory_b=3.0)).traffic(0)
    assert copied == Traffic(0, None, 4, 12)


def test_long_programs_are_simulated_in_a_second_or_so():
    schedule = build("zb-h1", Problem(pp_size=32, num_microbatches=512))
    costs = CostModel.uniform(schedule.placement, comm=0.1)
    program = add_communication(schedule, costs)
    assert (sum(map(len, schedule.ranks)), sum(map(len, program.ranks))) == (49_152, 112_640)
    for order, bound in ((schedule, 2), (program, 5)):
        start = time.perf_counter()
        simulate(order, costs)
        # About 0.3 and 0.7 seconds; the bounds leave room for a busy machine.
        assert time.perf_counter() - start < bound


def test_time_grows_as_the_number_of_ops():
    def seconds(m):
        schedule = build("zb-h1", Problem(pp_size=8, num_microbatches=m))
        schedule = add_communication(random_offload(random.Random(0), schedule), CostModel.uniform(schedule.placement))
        costs = replace(costs_of_copies(schedule.placement, shared_factor=2.0), h2d=(0.1,) * 8, d2h=(0.1,) * 8)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            simulate(schedule, costs)
            best = min(best, time.perf_counter() - start)
        return best

    # Eight times the ops: quadratic would be 64 times.
    assert seconds(400) < 24 * seconds(50)
