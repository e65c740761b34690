"""Messages between ranks: none is taken for another, none is kept longer than needed."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.dataflow import Message
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement, Schedule
from megatron.pipeline_parallel.planning.plan import make_plan
from megatron.pipeline_parallel.runtime.channels import DistributedChannels, TensorSpec, Transport, channel_pairs
from megatron.pipeline_parallel.runtime.plan import share_plan

PLACEMENT = Placement.loop(2, 2)
"""Next and previous rank are one peer: stages 0 and 2 on rank 0, 1 and 3 on rank 1."""


def channels(num_tensors=1):
    ops = tuple(Op(OpKind.F, 0, 0, 0) for _ in range(1))
    schedule = Schedule(name="messages", placement=PLACEMENT, num_microbatches=3, ranks=(ops, ()), lowered=True)
    transport = Transport(PLACEMENT, dist.group.WORLD, torch.device("cpu"))
    spec = (TensorSpec((4,), torch.float32),) * num_tensors
    return DistributedChannels(schedule, lambda message: spec, transport), transport


def messages_to_rank_1():
    """Every message that one iteration of three microbatches sends from rank 0 to rank 1."""
    forward = [Message(True, source, source + 1, mb, 0) for source in (0, 2) for mb in range(3)]
    return forward + [Message(False, 2, 1, mb, 0) for mb in range(3)]


def content(message, index=0):
    return torch.full((4,), 100.0 * message.destination + 10 * message.microbatch + 1000 * message.forward + index)


def exchange_in_other_orders():
    mine, transport = channels(num_tensors=2)
    messages = messages_to_rank_1()
    for _ in range(2):
        if dist.get_rank() == 0:
            for message in messages:
                mine.send(message, [content(message), content(message, 1)])
        else:
            for message in reversed(messages):
                mine.post(message)
            for message in messages[3:] + messages[:3]:
                received = mine.receive(message)
                assert torch.equal(received[0], content(message)), message
                assert torch.equal(received[1], content(message, 1)), message
        mine.finish()
    transport.close()
    return len(messages)


def test_no_order_of_posting_exchanges_two_messages(tmp_path):
    assert run_ranks(exchange_in_other_orders, 2, tmp_path) == [9, 9]


def keep_until_sent():
    mine, transport = channels()
    message = messages_to_rank_1()[0]
    if dist.get_rank() == 1:
        time.sleep(0.3)
        mine.post(message)
        assert torch.equal(mine.receive(message)[0], content(message))
        dist.barrier()
        return None
    tensor = content(message)
    storage = StorageWeakRef(tensor.untyped_storage())
    mine.send(message, [tensor])
    del tensor
    alive_before = not storage.expired()
    dist.barrier()
    mine.finish()
    deadline = time.monotonic() + 5
    while not storage.expired() and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive_before, storage.expired()


def test_a_sent_tensor_lives_until_it_is_received_and_no_longer(tmp_path):
    assert run_ranks(keep_until_sent, 2, tmp_path)[0] == (True, True)


def close_transports():
    before = threading.active_count()
    for _ in range(3):
        mine, transport = channels()
        message = messages_to_rank_1()[0]
        if dist.get_rank() == 0:
            mine.send(message, [content(message)])
        else:
            mine.post(message)
            mine.receive(message)
        mine.finish()
        transport.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count() - before


def test_a_closed_transport_leaves_no_thread(tmp_path):
    assert run_ranks(close_transports, 2, tmp_path) == [0, 0]


def leave_a_receive():
    mine, _ = channels()
    if dist.get_rank() == 1:
        mine.post(Message(True, 0, 1, 0, 0))
        with pytest.raises(RuntimeError, match="receives are left over.*source=0, destination=1, microbatch=0"):
            mine.finish()
    with pytest.raises(ValueError, match="the placement has 3 ranks, the pipeline's group 2"):
        Transport(Placement.loop(3), dist.group.WORLD, torch.device("cpu"))


def test_receives_left_over_and_groups_of_another_size_are_refused(tmp_path):
    run_ranks(leave_a_receive, 2, tmp_path)


def test_pairs_that_exchange_messages():
    assert channel_pairs(Placement.loop(1, 3)) == []
    assert channel_pairs(Placement.loop(2, 2)) == [(0, 1), (1, 0)]
    assert channel_pairs(Placement.v(3)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert channel_pairs(Placement.loop(3, 2)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def share():
    problem = Problem(pp_size=2, num_microbatches=3)
    mine = make_plan("zb-h1", problem) if dist.get_rank() == 0 else None
    plan = share_plan(mine, dist.group.WORLD)
    assert plan == make_plan("zb-h1", problem)
    with pytest.raises(RuntimeError, match="has digest .* here and .* on rank 0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Schedule, "from_text", classmethod(lambda cls, text: build("1f1b", problem)))
            share_plan(mine, dist.group.WORLD)
    return plan.digest


def test_all_ranks_hold_one_plan_and_notice_another(tmp_path):
    assert len(set(run_ranks(share, 2, tmp_path))) == 1


def no_plan():
    with pytest.raises(ValueError, match="no plan to share"):
        share_plan(None, dist.group.WORLD)


def test_a_missing_plan_is_refused(tmp_path):
    run_ranks(no_plan, 1, tmp_path)
