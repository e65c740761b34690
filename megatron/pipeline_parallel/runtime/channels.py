"""Point-to-point messages between pipeline ranks.

A message is a tuple of tensors whose shapes both ends know. On gloo each tensor of a message has a tag of its own, so that
no order of posting can exchange two messages, not even where the next and the previous rank are one. NCCL ignores tags:
there each ordered pair of ranks has a 2-rank group, and both ends use it in one order, which the validator has proven.
(The NCCL path has not been run: no machine with several GPUs was at hand.)
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.pipeline_parallel.planning.dataflow import Message, channel_of
from megatron.pipeline_parallel.planning.op import Placement, Schedule


class TensorSpec(NamedTuple):
    """Shape and type of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


MessageSpec = Callable[[Message], Sequence[TensorSpec]]
"""What a message is made of; both ends must agree."""


class Channels(Protocol):
    """What the runtime asks of a transport."""

    def post(self, message: Message) -> None:
        """Allocate buffers and start to receive; never blocks."""

    def receive(self, message: Message) -> tuple[Tensor, ...]:
        """Block until a posted message is here, and give it away."""

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Start to send; never blocks. The tensors are kept alive until they are sent."""

    def finish(self) -> None:
        """Block until everything is sent."""

    def abandon(self) -> None:
        """After a failed run: messages may be under way that nobody waits for, so every later call raises RuntimeError."""


def channel_pairs(placement: Placement) -> list[tuple[int, int]]:
    """The (source, destination) pairs of ranks that carry messages, in one order for all ranks."""
    pairs = set()
    for stage in range(placement.num_stages - 1):
        if not placement.is_local(stage, stage + 1):
            here, there = placement.rank_of(stage), placement.rank_of(stage + 1)
            pairs |= {(here, there), (there, here)}
    return sorted(pairs)


class Transport:
    """What outlives a plan: the groups and the send queues of one rank of a pipeline."""

    def __init__(self, placement: Placement, pipeline_group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective over `pipeline_group`, whose ranks are the placement's ranks in order.

        Raises ValueError where their numbers differ.
        """
        self.device = device
        self.abandoned = False
        self._ranks = dist.get_process_group_ranks(pipeline_group)
        if len(self._ranks) != placement.pp_size:
            raise ValueError(f"the placement has {placement.pp_size} ranks, the pipeline's group {len(self._ranks)}")
        self._is_gloo = dist.get_backend(pipeline_group) == "gloo"
        self._groups = self._make_groups(placement, pipeline_group)
        self._senders: dict[int, _WaitingSender | _PollingSender] = {}

    def _make_groups(
        self, placement: Placement, pipeline_group: dist.ProcessGroup
    ) -> dict[tuple[int, int], dist.ProcessGroup]:
        pairs = channel_pairs(placement)
        if self._is_gloo:
            return {pair: pipeline_group for pair in pairs}
        mine = self._ranks.index(dist.get_rank())
        # One fixed order on all ranks: a group is made by its two ranks alone, which wait for each other.
        return {
            (source, destination): dist.new_group(
                [self._ranks[source], self._ranks[destination]], use_local_synchronization=True
            )
            for source, destination in pairs
            if mine in (source, destination)
        }

    def start_receive(self, pair: tuple[int, int], buffer: Tensor, tag: int) -> dist.Work:
        self._check_usable()
        return dist.irecv(buffer, self._ranks[pair[0]], group=self._groups[pair], tag=tag)

    def start_send(self, pair: tuple[int, int], tensor: Tensor, tag: int) -> None:
        """Start to send; the tensor is kept alive until it is sent."""
        self._check_usable()
        if pair[1] not in self._senders:
            self._senders[pair[1]] = _WaitingSender(f"send to {pair[1]}") if self._is_gloo else _PollingSender()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._ranks[pair[1]], group=self._groups[pair], tag=tag)
        self._senders[pair[1]].hold(work, tensor)

    def finish(self) -> None:
        """Block until everything is sent."""
        self._check_usable()
        for sender in self._senders.values():
            sender.finish()

    def close(self) -> None:
        """End the threads and groups that this object made; collective where the backend is NCCL."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        if not self._is_gloo:
            for group in self._groups.values():
                dist.destroy_process_group(group)
        self._groups.clear()

    def _check_usable(self) -> None:
        if self.abandoned:
            raise RuntimeError(
                "an iteration failed before, and its messages may still be under way: start the ranks anew"
            )


class DistributedChannels:
    """The channels of one plan over a `Transport`."""

    def __init__(self, schedule: Schedule, spec: MessageSpec, transport: Transport) -> None:
        self._schedule = schedule
        self._spec = spec
        self._transport = transport
        self._posted: dict[Message, tuple[list[Tensor], list[dist.Work]]] = {}

    def post(self, message: Message) -> None:
        pair = channel_of(message, self._schedule.placement)
        specs = self._spec(message)
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, device=self._transport.device) for spec in specs]
        works = [
            self._transport.start_receive(pair, buffer, self._tag(message, index))
            for index, buffer in enumerate(buffers)
        ]
        self._posted[message] = (buffers, works)

    def receive(self, message: Message) -> tuple[Tensor, ...]:
        buffers, works = self._posted.pop(message)
        for work in works:
            work.wait()
        return tuple(buffers)

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Raises ValueError when `tensors` are not what the receiver expects, before anything is sent."""
        self._check(message, tensors)
        pair = channel_of(message, self._schedule.placement)
        for index, tensor in enumerate(tensors):
            self._transport.start_send(pair, tensor, self._tag(message, index))

    def finish(self) -> None:
        if self._posted:
            raise RuntimeError(f"receives are left over: {sorted(self._posted)}")
        self._transport.finish()

    def abandon(self) -> None:
        self._posted.clear()
        self._transport.abandoned = True

    def _tag(self, message: Message, index: int) -> int:
        """A number that no other tensor of this plan has between the same two ranks."""
        schedule = self._schedule
        tag = message.destination * 2 + message.forward
        tag = tag * schedule.num_microbatches + message.microbatch
        tag = tag * schedule.num_sequence_splits + message.sequence_split
        return tag * _MAX_TENSORS + index

    def _check(self, message: Message, tensors: Sequence[Tensor]) -> None:
        # gloo ends the process when sizes differ, so a difference must never leave this rank.
        made = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        expected = [(tuple(spec.shape), spec.dtype) for spec in self._spec(message)]
        if made != expected or len(made) > _MAX_TENSORS:
            raise ValueError(
                f"stage {message.source} made {made} for stage {message.destination} (microbatch {message.microbatch}), "
                f"which expects {expected}, at most {_MAX_TENSORS} tensors"
            )


_MAX_TENSORS = 16


class _WaitingSender:
    """Send queue of one gloo channel: a thread waits, since a gloo send says that it is done only to who waits for it."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        # A daemon: after a failure the peer may never receive, and the process must still be able to end.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def hold(self, work: dist.Work, tensor: Tensor) -> None:
        self._raise_failure()
        self._queue.put((work, tensor))

    def finish(self) -> None:
        done = threading.Event()
        self._queue.put((None, done))
        done.wait()
        self._raise_failure()

    def close(self) -> None:
        self._queue.put((None, None))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while True:
            work, held = self._queue.get()
            if held is None:
                return
            try:
                if work is None:
                    held.set()
                elif self._failure is None:
                    work.wait()
            except BaseException as failure:
                self._failure = failure
            # Else the last tensor would live until the next send.
            del work, held


class _PollingSender:
    """Send queue of one NCCL channel: waiting there would stall the compute stream, so what is sent is let go at the next
    send or at the end."""

    def __init__(self) -> None:
        self._held: list[tuple[dist.Work, Tensor]] = []

    def hold(self, work: dist.Work, tensor: Tensor) -> None:
        self._held = [item for item in self._held if not item[0].is_completed()]
        self._held.append((work, tensor))

    def finish(self) -> None:
        for work, _ in self._held:
            work.wait()
        self._held.clear()

    def close(self) -> None:
        self._held.clear()
