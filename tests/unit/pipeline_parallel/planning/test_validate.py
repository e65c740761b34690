import random
import time

import pytest
from random_schedules import LIFE, random_costs, random_offload, random_placement, random_schedule

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.dataflow import Wiring, message_of, need_of
from megatron.pipeline_parallel.planning.op import RECVS, SENDS, Op, OpKind, Placement, Schedule
from megatron.pipeline_parallel.planning.passes.communication import add_communication, forward_only
from megatron.pipeline_parallel.planning.simulate import StuckError, check_ends, simulate
from megatron.pipeline_parallel.planning.validate import ScheduleError, validate


def program(name="zb-h1", p=3, m=4):
    schedule = build(name, Problem(pp_size=p, num_microbatches=m))
    return schedule, add_communication(schedule, CostModel.uniform(schedule.placement))


def changed(schedule, rank, change):
    ranks = [list(ops) for ops in schedule.ranks]
    change(ranks[rank])
    return schedule.with_ranks(ranks)


def swap(first, second):
    def change(ops):
        i, j = (next(at for at, op in enumerate(ops) if str(op) == text) for text in (first, second))
        ops[i], ops[j] = ops[j], ops[i]

    return change


def drop(text):
    return lambda ops: ops.remove(Op.parse(text))


def put(text, before=None):
    return lambda ops: ops.insert(len(ops) if before is None else ops.index(Op.parse(before)), Op.parse(text))


ORDER_FAULTS = [
    (0, drop("F 0.0 mb1 s0"), "stage 0, microbatch 1, sequence split 0 has no F"),
    (0, drop("W 0.0 mb1 s0"), "has B; needs BW, or B and W"),
    (0, put("F 0.0 mb1 s0"), "F 0.0 mb1 s0 stands twice"),
    (0, put("BW 0.0 mb1 s0"), "has B and BW and W; needs"),
    (0, put("F 1.0 mb9 s0"), "is on rank 0, but stage 1 is chunk 0 of rank 1"),
    (0, put("F 0.1 mb0 s0"), "is on rank 0, but stage 0 is chunk 0 of rank 0"),
    (0, put("F 9.0 mb0 s0"), "there is no stage 9, only 0..2"),
    (0, put("F 0.0 mb4 s0"), "there is no microbatch 4, only 0..3"),
    (0, put("F 0.0 mb0 s1"), "there is no sequence split 1, only 0..0"),
    (
        0,
        put("OFFLOAD_RECV_PREP 0.0 mb0 s0"),
        "is offloaded without OFFLOAD_SEND_START, OFFLOAD_SEND_END, OFFLOAD_RECV_START",
    ),
    (0, put("RECV_BACKWARD 0.0 mb0 s0", "B 0.0 mb0 s0"), "a compute order holds no messages"),
    (0, swap("B 0.0 mb0 s0", "W 0.0 mb0 s0"), "W 0.0 mb0 s0 comes after F"),
    (2, swap("F 2.0 mb0 s0", "B 2.0 mb0 s0"), "B 2.0 mb0 s0 comes first"),
    (2, swap("W 2.0 mb2 s0", "W 2.0 mb3 s0"), "a stage's W go in microbatch order"),
    (0, put("R 0.0 mb0 s0", "B 0.0 mb0 s0"), "R 0.0 mb0 s0 comes after F"),
    (0, swap("F 0.0 mb0 s0", "F 0.0 mb1 s0"), "a stage's F go in microbatch order"),
    (2, put("W 2.0 mb3 s0 discard"), "only an F can throw its activation away"),
    (
        0,
        lambda ops: [drop(f"{kind} 0.0 mb1 s0")(ops) for kind in "BW"],
        "microbatch 1, sequence split 0 has no backward",
    ),
]


@pytest.mark.parametrize(
    "rank, change, message", ORDER_FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_order_is_named(rank, change, message):
    schedule, _ = program()
    with pytest.raises(ScheduleError, match=message.replace("(", r"\(")):
        validate(changed(schedule, rank, change))


PROGRAM_FAULTS = [
    (1, drop("RECV_FORWARD 1.0 mb2 s0"), "RECV_FORWARD 1.0 mb2 s0 is missing"),
    (1, drop("SEND_BACKWARD 1.0 mb2 s0"), "SEND_BACKWARD 1.0 mb2 s0 is missing"),
    (0, put("SEND_BACKWARD 0.0 mb2 s0"), "carries nothing"),
    (1, swap("SEND_FORWARD 1.0 mb0 s0", "F 1.0 mb0 s0"), "stands before F 1.0 mb0 s0, which makes it"),
    (1, swap("RECV_BACKWARD 1.0 mb0 s0", "B 1.0 mb0 s0"), "is posted after B 1.0 mb0 s0, which uses it"),
    (1, swap("RECV_BACKWARD 1.0 mb2 s0", "RECV_BACKWARD 1.0 mb3 s0"), "is posted after B 1.0 mb2"),
]


@pytest.mark.parametrize(
    "rank, change, message", PROGRAM_FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_program_is_named(rank, change, message):
    _, lowered = program()
    with pytest.raises(ScheduleError, match=message):
        validate(changed(lowered, rank, change))


def test_swapped_receives_are_an_error_never_a_wrong_number():
    _, lowered = program("gpipe", p=2, m=3)

    def both_early(ops):
        first, second = (op for op in list(ops) if str(op) in ("RECV_FORWARD 1.0 mb0 s0", "RECV_FORWARD 1.0 mb1 s0"))
        ops.remove(first)
        ops.remove(second)
        ops[:0] = [second, first]

    with pytest.raises(ScheduleError, match=r"channel 0 -> 1: SEND_FORWARD 0.0 mb0 s0 meets RECV_FORWARD 1.0 mb1 s0"):
        validate(changed(lowered, 1, both_early))


def test_the_grid_marks_the_bad_cell():
    schedule, _ = program()
    with pytest.raises(ScheduleError) as caught:
        validate(changed(schedule, 2, swap("W 2.0 mb2 s0", "W 2.0 mb3 s0")))
    lines = str(caught.value).splitlines()
    assert lines[1].split()[0] == "step"
    assert [line.count(">") for line in lines[2:]] == [0, 0, 1]
    assert ">W2.2<" in lines[4]


def test_a_deadlock_of_the_compute_order_names_where_each_rank_waits():
    placement = Placement.loop(2)
    f = [[Op(OpKind.F, stage, 0, microbatch) for microbatch in range(2)] for stage in range(2)]
    b = [[Op(OpKind.BW, stage, 0, microbatch) for microbatch in range(2)] for stage in range(2)]
    ranks = ((f[0][0], b[0][0], f[0][1], b[0][1]), (f[1][0], f[1][1], b[1][0], b[1][1]))
    with pytest.raises(ScheduleError, match="rank 0 in BW 0.0 mb0 s0, rank 1 in F 1.0 mb1 s0"):
        validate(Schedule(name="wait", placement=placement, num_microbatches=2, ranks=ranks))


def test_a_send_that_blocks_all_messages_of_its_rank_is_seen():
    schedule, lowered = program("1f1b", p=2, m=2)

    def post_at_the_last_moment(ops):
        for recv in [op for op in ops if op.kind in RECVS]:
            ops.remove(recv)
            need = message_of(recv)
            user = next(at for at, op in enumerate(ops) if need_of(op, 2) == need)
            ops.insert(user, recv)

    ranks = [list(ops) for ops in lowered.ranks]
    for ops in ranks:
        post_at_the_last_moment(ops)
    late = lowered.with_ranks(ranks)
    costs = CostModel.uniform(late.placement)
    # Rank 0 sends microbatch 1 before it posts the gradient of microbatch 0; rank 1 sends that gradient before it posts
    # microbatch 1.
    simulate(late, costs)
    with pytest.raises(StuckError) as caught:
        simulate(late, costs, one_queue_a_rank=True)
    assert set(caught.value.blocked) == {0, 1}
    with pytest.raises(ScheduleError, match="deadlock of the program with all messages of a rank in one queue"):
        validate(late)


def blocks_everything(schedule):
    """An independent, stricter judge: a SEND blocks its whole rank until its RECV is posted. True when all ranks end."""
    at, posted, sent = [0] * schedule.pp_size, set(), set()
    stages, placement = schedule.placement.num_stages, schedule.placement
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ranks):
            while at[rank] < len(ops):
                op = ops[at[rank]]
                need = need_of(op, stages)
                local = need is not None and placement.is_local(need.source, need.destination)
                if op.kind in RECVS:
                    posted.add(message_of(op))
                elif op.kind in SENDS and message_of(op) not in posted:
                    break
                elif op.kind in SENDS:
                    sent.add(message_of(op))
                elif need is not None and not local and need not in sent:
                    break
                at[rank] += 1
                moved = True
    return all(position == len(ops) for position, ops in zip(at, schedule.ranks))


def runs_with_one_queue_a_rank(schedule):
    """Another independent judge: a rank's messages wait in one line, in which a SEND waits for its RECV to be posted."""
    stages, placement = schedule.placement.num_stages, schedule.placement
    at, lines = [0] * schedule.pp_size, [[] for _ in schedule.ranks]
    posted, arrived = set(), set()
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ranks):
            while lines[rank] and (lines[rank][0].kind in RECVS or message_of(lines[rank][0]) in posted):
                op = lines[rank].pop(0)
                (posted if op.kind in RECVS else arrived).add(message_of(op))
                moved = True
            while at[rank] < len(ops):
                op = ops[at[rank]]
                need = need_of(op, stages)
                local = need is not None and placement.is_local(need.source, need.destination)
                if op.kind in SENDS | RECVS:
                    lines[rank].append(op)
                elif need is not None and not local and need not in arrived:
                    break
                at[rank] += 1
                moved = True
    return not any(lines) and all(position == len(ops) for position, ops in zip(at, schedule.ranks))


def test_what_sticks_with_one_queue_a_rank_is_seen_and_what_runs_there_runs_with_a_queue_a_channel():
    rng, stuck = random.Random(14), 0
    for _ in range(300):
        placement = random_placement(rng)
        lowered = add_communication(random_schedule(rng, placement, rng.randint(1, 4)), random_costs(rng, placement))
        ranks = [list(ops) for ops in lowered.ranks]
        for ops in ranks:
            for recv in [op for op in ops if op.kind in RECVS and rng.random() < 0.5]:
                ops.remove(recv)
                need = message_of(recv)
                user = next(at for at, op in enumerate(ops) if need_of(op, placement.num_stages) == need)
                ops.insert(rng.randint(max(0, user - 4), user), recv)
        program = lowered.with_ranks(ranks)
        wiring = Wiring(program)
        try:
            check_ends(wiring, one_queue_a_rank=True)
        except StuckError:
            stuck += 1
            assert not runs_with_one_queue_a_rank(program)
            with pytest.raises(ScheduleError):
                validate(program)
        else:
            assert runs_with_one_queue_a_rank(program)
            check_ends(wiring)
    assert 20 < stuck < 280


def test_programs_of_random_orders_are_valid_and_never_stick():
    rng = random.Random(5)
    for _ in range(300):
        placement = random_placement(rng)
        schedule = random_schedule(rng, placement, rng.randint(1, 5))
        validate(schedule)
        lowered = add_communication(schedule, random_costs(rng, placement))
        validate(lowered)
        assert blocks_everything(lowered)
        messages = sum(not placement.is_local(s, s + 1) for s in range(placement.num_stages - 1))
        assert sum(op.kind in SENDS for ops in lowered.ranks for op in ops) == 2 * messages * schedule.num_microbatches


def test_stages_that_share_a_rank_exchange_no_messages():
    lowered = add_communication(
        random_schedule(random.Random(6), Placement.loop(1, 3), 2), CostModel.uniform(Placement.loop(1, 3))
    )
    assert validate(lowered).posted_receives == (0,)
    assert {op.kind for op in lowered.ranks[0]} <= {OpKind.F, OpKind.B, OpKind.W, OpKind.BW}


@pytest.mark.parametrize("name, most", [("gpipe", [2, 2, 2, 2]), ("1f1b", [1, 2, 2, 2]), ("zb-h1", [1, 2, 2, 2])])
def test_receives_posted_at_once_are_counted(name, most):
    _, lowered = program(name, p=4, m=16)
    assert list(validate(lowered).posted_receives) == most


def test_both_ends_of_the_summation_order_are_one_for_joint_and_split_backwards():
    kinds = [OpKind.F, OpKind.F, OpKind.B, OpKind.W, OpKind.BW]
    ops = tuple(Op(kind, 0, 0, microbatch) for kind, microbatch in zip(kinds, (0, 1, 1, 1, 0)))
    with pytest.raises(
        ScheduleError, match="BW 0.0 mb0 s0 comes after microbatch 1; a stage's B go in microbatch order"
    ):
        validate(Schedule(name="mixed", placement=Placement.loop(1), num_microbatches=2, ranks=(ops,)))


def test_a_forward_that_throws_its_activation_away_has_its_recompute():
    discarding = Op(OpKind.F, 0, 0, 0, 0, False)
    later = [Op(kind, 0, 0, 0) for kind in (OpKind.R, OpKind.B, OpKind.W)]
    for ops, fault in [
        ((discarding, *later), None),
        ((discarding, *later[1:]), "B 0.0 mb0 s0 comes after F"),
        ((discarding, later[0]), "no backward"),
    ]:
        schedule = Schedule(name="recompute", placement=Placement.loop(1), num_microbatches=1, ranks=(ops,))
        if fault is None:
            validate(schedule)
            continue
        with pytest.raises(ScheduleError, match=fault):
            validate(schedule)


def test_what_an_activation_has_is_marked_where_something_is_missing():
    schedule, _ = program()
    with pytest.raises(ScheduleError, match="has B; needs BW") as caught:
        validate(changed(schedule, 1, drop("W 1.0 mb1 s0")))
    assert ">F1.1<" in str(caught.value) and ">B1.1<" in str(caught.value)
    with pytest.raises(ScheduleError, match="is offloaded without OFFLOAD_RECV_END") as caught:
        validate(changed(offloading(), 0, drop("OFFLOAD_RECV_END 0.0 mb0 s0")))
    assert all(f">{cell}0.0<" in str(caught.value) for cell in ("F", "OSS", "OSE", "ORP", "ORS", "B", "W"))


def test_faults_far_apart_are_both_shown():
    schedule, _ = program(m=12)
    with pytest.raises(ScheduleError) as caught:
        validate(changed(schedule, 0, put("F 0.0 mb0 s0")))
    assert str(caught.value).count(">F0.0<") == 2


def test_a_lowered_schedule_is_not_lowered_again():
    _, lowered = program()
    with pytest.raises(ValueError, match="has its messages already"):
        add_communication(lowered, CostModel.uniform(lowered.placement))


def test_an_evaluation_holds_nothing():
    schedule, _ = program()
    evaluation = forward_only(schedule)
    validate(evaluation)
    assert [simulate(evaluation, CostModel.uniform(evaluation.placement)).peak(rank) for rank in range(3)] == [0, 0, 0]


def offloading():
    """Two chunks of one rank: the first is offloaded, with ops of the second between its own."""
    kinds = [("F", 0), (LIFE[0], 0), ("F", 1), (LIFE[1], 0), ("BW", 1), (LIFE[2], 0), (LIFE[3], 0)]
    ops = [Op(OpKind(kind), stage, stage, 0) for kind, stage in kinds]
    ops += [Op(kind, 0, 0, 0) for kind in (OpKind.B, OpKind.W, LIFE[4])]
    return Schedule(name="offload", placement=Placement.loop(1, 2), num_microbatches=1, ranks=(tuple(ops),))


OFFLOAD_FAULTS = [
    (drop("OFFLOAD_SEND_END 0.0 mb0 s0"), "is offloaded without OFFLOAD_SEND_END; needs all five offload ops, or none"),
    (put("OFFLOAD_SEND_END 0.0 mb0 s0"), "OFFLOAD_SEND_END 0.0 mb0 s0 stands twice"),
    (swap("F 0.0 mb0 s0", "OFFLOAD_SEND_START 0.0 mb0 s0"), ">OSS0.0<"),
    (swap("OFFLOAD_SEND_START 0.0 mb0 s0", "OFFLOAD_SEND_END 0.0 mb0 s0"), ">OSE0.0<"),
    (swap("OFFLOAD_SEND_END 0.0 mb0 s0", "OFFLOAD_RECV_PREP 0.0 mb0 s0"), ">ORP0.0<"),
    (swap("OFFLOAD_RECV_PREP 0.0 mb0 s0", "OFFLOAD_RECV_START 0.0 mb0 s0"), ">ORS0.0<"),
    (swap("OFFLOAD_RECV_START 0.0 mb0 s0", "B 0.0 mb0 s0"), ">B0.0<"),
    (swap("W 0.0 mb0 s0", "OFFLOAD_RECV_END 0.0 mb0 s0"), ">ORE0.0<"),
    (swap("B 0.0 mb0 s0", "OFFLOAD_RECV_END 0.0 mb0 s0"), ">ORE0.0<"),
]


@pytest.mark.parametrize("change, message", OFFLOAD_FAULTS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_activation_leaves_and_comes_back_in_order(change, message):
    schedule = offloading()
    validate(schedule)
    with pytest.raises(ScheduleError, match=message):
        validate(changed(schedule, 0, change))


def test_what_is_thrown_away_is_not_offloaded():
    ops = [Op(OpKind.F, 0, 0, 0, 0, False), Op(LIFE[0], 0, 0, 0), Op(LIFE[1], 0, 0, 0), Op(OpKind.R, 0, 0, 0)]
    ops += [Op(kind, 0, 0, 0) for kind in (LIFE[2], LIFE[3], OpKind.BW, LIFE[4])]
    schedule = Schedule(name="both", placement=Placement.loop(1), num_microbatches=1, ranks=(tuple(ops),))
    with pytest.raises(ScheduleError, match="OFFLOAD_SEND_START 0.0 mb0 s0: its F throws the activation away"):
        validate(schedule)


def test_random_offloads_are_valid_with_and_without_messages():
    rng, copied = random.Random(7), 0
    for _ in range(80):
        placement = random_placement(rng)
        order = random_schedule(rng, placement, rng.randint(1, 4), rng.randint(1, 3))
        schedule, costs = random_offload(rng, order), random_costs(rng, placement)
        validate(schedule, costs)
        lowered = add_communication(schedule, costs)
        validate(lowered, costs)
        assert blocks_everything(lowered)
        for ops, program in zip(schedule.ranks, lowered.ranks):
            assert [op for op in program if op.kind not in SENDS | RECVS] == list(ops)
        copied += sum(op.kind == LIFE[0] for ops in schedule.ranks for op in ops)
    assert copied > 300


def test_a_lost_or_doubled_op_is_never_accepted():
    rng = random.Random(8)
    for _ in range(150):
        placement = random_placement(rng)
        order = random_offload(rng, random_schedule(rng, placement, rng.randint(1, 3), rng.randint(1, 2)))
        schedule = add_communication(order, random_costs(rng, placement)) if rng.random() < 0.5 else order
        rank = rng.randrange(placement.pp_size)
        at = rng.randrange(len(schedule.ranks[rank]))

        def lose(ops, at=at):
            del ops[at]

        def double(ops, at=at):
            ops.insert(rng.randint(0, len(ops)), ops[at])

        for change in (lose, double):
            with pytest.raises(ScheduleError):
                validate(changed(schedule, rank, change))


def test_a_program_that_needs_another_order_of_one_activation_is_never_accepted():
    rng = random.Random(9)
    for _ in range(200):
        placement = random_placement(rng)
        schedule = random_offload(rng, random_schedule(rng, placement, rng.randint(1, 3)), share=0.8)
        rank = rng.randrange(placement.pp_size)
        unit = rng.choice(schedule.ranks[rank]).unit
        first, second = sorted(rng.sample([at for at, op in enumerate(schedule.ranks[rank]) if op.unit == unit], 2))

        def exchange(ops, first=first, second=second):
            ops[first], ops[second] = ops[second], ops[first]

        with pytest.raises(ScheduleError):
            validate(changed(schedule, rank, exchange))


def in_splits(*texts, splits=2, microbatches=2):
    ops = tuple(Op.parse(text.strip()) for line in texts for text in line.split(","))
    return Schedule(
        name="splits",
        placement=Placement.loop(1),
        num_microbatches=microbatches,
        num_sequence_splits=splits,
        ranks=(ops,),
    )


FORWARDS = "F 0.0 mb0 s0, F 0.0 mb0 s1, F 0.0 mb1 s0, F 0.0 mb1 s1"


def test_splits_go_forward_first_to_last_and_backward_last_to_first():
    validate(in_splits(FORWARDS, "BW 0.0 mb0 s1, BW 0.0 mb0 s0, BW 0.0 mb1 s1, BW 0.0 mb1 s0"))
    mixed = "B 0.0 mb0 s1, B 0.0 mb0 s0, W 0.0 mb0 s0, W 0.0 mb0 s1, BW 0.0 mb1 s1, B 0.0 mb1 s0, W 0.0 mb1 s0"
    validate(in_splits(FORWARDS, mixed))


@pytest.mark.parametrize(
    "lines, message, cell",
    [
        (
            ("F 0.0 mb0 s1, F 0.0 mb0 s0", "BW 0.0 mb0 s1, BW 0.0 mb0 s0"),
            "F 0.0 mb0 s0 comes after sequence split 1; F of a microbatch go first split first",
            ">F0.0<",
        ),
        (
            ("F 0.0 mb0 s0, F 0.0 mb0 s1", "BW 0.0 mb0 s0, BW 0.0 mb0 s1"),
            "BW 0.0 mb0 s1 comes after sequence split 0; B of a microbatch go last split first",
            ">BW0.0/1<",
        ),
        (
            ("F 0.0 mb0 s0, F 0.0 mb0 s1", "B 0.0 mb0 s0, W 0.0 mb0 s0, B 0.0 mb0 s1, W 0.0 mb0 s1"),
            "B 0.0 mb0 s1 comes after sequence split 0; B of a microbatch go last split first",
            ">B0.0/1<",
        ),
        (("F 0.0 mb0 s0", "BW 0.0 mb0 s0"), "stage 0, microbatch 0, sequence split 1 has no F", ""),
    ],
)
def test_splits_in_another_order_are_refused(lines, message, cell):
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(in_splits(*lines, microbatches=1))
    assert cell in str(caught.value)


def test_the_weight_gradients_of_two_microbatches_keep_their_order_in_splits():
    backward = "B 0.0 mb0 s1, B 0.0 mb0 s0, W 0.0 mb0 s1, B 0.0 mb1 s1, W 0.0 mb1 s1, W 0.0 mb0 s0, BW 0.0 mb1 s0"
    with pytest.raises(
        ScheduleError, match="W 0.0 mb0 s0 comes after microbatch 1; a stage's W go in microbatch order"
    ):
        validate(in_splits(FORWARDS, backward))


def test_a_limit_that_is_passed_names_the_rank_and_the_smallest_that_is_not():
    schedule, lowered = program("1f1b", p=3, m=4)
    for order in (schedule, lowered):
        proof = validate(order, CostModel.uniform(order.placement, device_limit=(3.0, 2.0, 1.0)))
        assert proof.peak_memory == (3.0, 2.0, 1.0)
        with pytest.raises(ScheduleError) as caught:
            validate(order, CostModel.uniform(order.placement, device_limit=(3.0, 1.5, 1.0)))
        text, *grid = str(caught.value).splitlines()
        assert "rank 1 holds 2 of device memory at F 1.0 mb1 s0, its limit is 1.5; the smallest limit that" in text
        assert text.endswith("keeps there is 2")
        assert [line.count(">F1.1<") for line in grid] == [0, 0, 1, 0]
    assert validate(schedule).peak_memory is None


def test_what_rounding_adds_to_a_peak_breaks_no_limit():
    schedule, _ = program("gpipe", p=1, m=3)
    costs = CostModel.uniform(schedule.placement, memory_b=0.1, device_limit=(0.3,))
    assert validate(schedule, costs).peak_memory[0] > 0.3
    with pytest.raises(ScheduleError, match="its limit is 0.2999"):
        validate(schedule, CostModel.uniform(schedule.placement, memory_b=0.1, device_limit=(0.2999,)))


def test_the_limits_of_device_and_host_hold_for_what_is_offloaded():
    schedule = offloading()
    times = {"d2h": (1.0, 1.0), "h2d": (1.0, 1.0)}
    # Both chunks are on the device until SEND_END, one after it.
    for device, host, fault in [
        (1.0, 0.5, None),
        (0.9, 0.5, "rank 0 holds 1 of device memory at F 1.1 mb0 s0, its limit is 0.9"),
        (1.0, 0.4, "rank 0 holds 0.5 of host memory at OFFLOAD_SEND_START 0.0 mb0 s0, its limit is 0.4"),
    ]:
        costs = CostModel.uniform(schedule.placement, device_limit=(device,), host_limit=(host,), **times)
        if fault is None:
            assert validate(schedule, costs).peak_memory == (1.0,)
            continue
        with pytest.raises(ScheduleError, match=fault):
            validate(schedule, costs)


def test_copies_without_times_are_refused():
    with pytest.raises(ScheduleError, match="no times of copies: needs both d2h and h2d"):
        validate(offloading(), CostModel.uniform(Placement.loop(1, 2)))


def test_costs_for_another_placement_are_refused():
    schedule, _ = program()
    with pytest.raises(ValueError, match="costs are for 2 stages, the schedule has 3"):
        validate(schedule, CostModel.uniform(Placement.loop(2)))


def test_long_programs_are_validated_in_seconds():
    _, lowered = program("zb-h1", p=32, m=512)
    assert sum(map(len, lowered.ranks)) > 110_000
    start = time.perf_counter()
    validate(lowered)
    # About 1 second; the bound leaves room for a busy machine.
    assert time.perf_counter() - start < 6
