import random

import pytest
from random_schedules import random_costs, random_placement, random_schedule

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.dataflow import message_of, need_of
from megatron.pipeline_parallel.planning.op import RECVS, SENDS, Op, OpKind, Placement, Schedule
from megatron.pipeline_parallel.planning.passes.communication import add_communication, forward_only
from megatron.pipeline_parallel.planning.simulate import StuckError, simulate
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
    (0, put("OFFLOAD_RECV_PREP 0.0 mb0 s0"), "no rules yet"),
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
