"""The simulator: when every op of a schedule starts and ends.

Compute ops run in their rank's order. A message leaves when its maker has ended (in a lowered program: when its SEND is
the next of its channel and the peer has posted the RECV) and arrives one latency later; channels never slow each other.
Linear in the number of ops.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.dataflow import Message, channel_of, message_of, need_of, result_of
from megatron.pipeline_parallel.planning.op import COMPUTE, RECVS, SENDS, Op, OpKind, Schedule

Queue = tuple[int, int]
"""A channel (source rank, destination rank), or (rank, -1) for all messages of one rank."""


class Slot(NamedTuple):
    """One op in time. A SEND lasts from its start on the channel, a RECV from being posted, both to the arrival."""

    op: Op
    start: float
    end: float
    stream: str


class StuckError(ValueError):
    """The schedule cannot run to its end; `blocked` maps each unfinished rank to the index of the op that it waits in."""

    def __init__(self, blocked: dict[int, int], schedule: Schedule) -> None:
        self.blocked = blocked
        waits = ", ".join(f"rank {rank} in {schedule.ranks[rank][index]}" for rank, index in sorted(blocked.items()))
        super().__init__(f"schedule {schedule.name!r} never ends: {waits}")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A schedule with times.

    `slots[i]` follows `schedule.ranks[i]`; `order` numbers the compute ops in one order in which they could all run one
    after another.
    """

    schedule: Schedule
    costs: CostModel
    slots: tuple[tuple[Slot, ...], ...]
    order: dict[Op, int]

    def compute(self, rank: int) -> list[Slot]:
        """The compute ops of one rank."""
        return [slot for slot in self.slots[rank] if slot.stream == "compute"]

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the end of the last compute op on any rank."""
        return max((slot.end for rank in range(len(self.slots)) for slot in self.compute(rank)), default=0.0)

    def busy(self, rank: int) -> float:
        return sum(self.costs.duration(slot.op) for slot in self.compute(rank))

    @property
    def bubble_rate(self) -> float:
        """Idle share of the whole rectangle: 1 - busy / (p * makespan)."""
        total = sum(self.busy(rank) for rank in range(len(self.slots)))
        area = len(self.slots) * self.makespan
        return 1 - total / area if area else 0.0

    @property
    def span_bubble_rate(self) -> float:
        """Idle share of the rank with the longest span, from its first F's start to its last op's end (arXiv 2401.10241)."""
        spans = []
        for rank in range(len(self.slots)):
            slots = self.compute(rank)
            start = min((slot.start for slot in slots if slot.op.kind == OpKind.F), default=0.0)
            spans.append((max((slot.end for slot in slots), default=0.0) - start, -rank))
        span, negative_rank = max(spans)
        return 1 - self.busy(-negative_rank) / span if span else 0.0

    def peak(self, rank: int) -> float:
        """Most activations held at once, in microbatches through all of the rank's chunks, each from F to the end of W."""
        held = most = 0
        for op in self.schedule.ranks[rank]:
            if op.kind == OpKind.F and op.saves_activation or op.kind == OpKind.R:
                held += 1
                most = max(most, held)
            elif op.kind in (OpKind.W, OpKind.BW):
                held -= 1
        return most / (self.schedule.placement.chunks_per_rank * self.schedule.num_sequence_splits)

    def peak_memory(self, rank: int) -> float:
        """Most memory booked at once: memory_b from F's start to B's end, memory_w from there to W's end."""
        held = most = 0.0
        for op in self.schedule.ranks[rank]:
            held += _booked(op, self.costs)
            most = max(most, held)
            # What B leaves for W is booked only when B's own share is gone.
            held += _released(op, self.costs)
        return most


def _booked(op: Op, costs: CostModel) -> float:
    if op.kind == OpKind.F and op.saves_activation or op.kind == OpKind.R:
        return costs.memory_b[op.stage]
    return 0.0


def _released(op: Op, costs: CostModel) -> float:
    stage = op.stage
    change = {
        OpKind.B: costs.memory_w[stage] - costs.memory_b[stage],
        OpKind.W: -costs.memory_w[stage],
        OpKind.BW: -costs.memory_b[stage],
    }
    return change.get(op.kind, 0.0)


def simulate(schedule: Schedule, costs: CostModel, *, one_queue_a_rank: bool = False) -> Timeline:
    """Time every op.

    Sends wait in a queue a channel, in program order, until the peer has posted the receive, which a rank does by itself when
    it gets there. With `one_queue_a_rank`, all messages of a rank, receives too, wait in one queue.

    What can run never depends on the times. Raises StuckError when not everything can, ValueError when `costs` are for
    another number of stages or ranks.
    """
    costs.check_fits(schedule.placement)
    return _Simulation(schedule, costs, one_queue_a_rank).run()


class _Simulation:
    """Walks every rank as far as it can; a rank that needs a message sleeps until the message's arrival is known."""

    def __init__(self, schedule: Schedule, costs: CostModel, one_queue: bool) -> None:
        self.schedule = schedule
        self.one_queue = one_queue
        self.costs = costs
        self.num_stages = schedule.placement.num_stages
        self.position = [0] * schedule.pp_size
        self.clock = [0.0] * schedule.pp_size
        self.slots: list[list[Slot]] = [[] for _ in schedule.ranks]
        self.order: dict[Op, int] = {}
        self.arrival: dict[Message, float] = {}
        self.issued: dict[Message, float] = {}
        self.issued_receive: dict[Message, float] = {}
        self.posted: dict[Message, float] = {}
        self.departure: dict[Message, float] = {}
        self.queues: dict[Queue, list[tuple[Message, OpKind]]] = defaultdict(list)
        self.heads: dict[Queue, int] = defaultdict(int)
        self.free: dict[Queue, float] = defaultdict(float)
        self.waiting: dict[Message, Queue] = {}
        self.sleepers: dict[Message, int] = {}
        self.awake = list(range(schedule.pp_size))

    def run(self) -> Timeline:
        while self.awake:
            self._walk(self.awake.pop())
        self._check_finished()
        slots = tuple(tuple(map(self._finished, rank_slots)) for rank_slots in self.slots)
        return Timeline(schedule=self.schedule, costs=self.costs, slots=slots, order=self.order)

    def _walk(self, rank: int) -> None:
        program = self.schedule.ranks[rank]
        while self.position[rank] < len(program):
            op = program[self.position[rank]]
            if op.kind in COMPUTE:
                if not self._compute(rank, op):
                    return
            elif op.kind in SENDS:
                self._send(rank, op)
            elif op.kind in RECVS:
                self._receive(rank, op)
            else:
                raise ValueError(f"{op}: the simulator has no stream for this kind of op")
            self.position[rank] += 1

    def _compute(self, rank: int, op: Op) -> bool:
        need = need_of(op, self.num_stages)
        start = self.clock[rank]
        if need is not None:
            if need not in self.arrival:
                self.sleepers[need] = rank
                return False
            start = max(start, self.arrival[need])
        end = start + self.costs.duration(op)
        self.clock[rank] = end
        self.order[op] = len(self.order)
        self.slots[rank].append(Slot(op, start, end, "compute"))
        result = result_of(op, self.num_stages)
        if result is not None:
            self._made(result, end)
        return True

    def _made(self, message: Message, time: float) -> None:
        source, destination = channel_of(message, self.schedule.placement)
        if source == destination:
            self._arrive(message, time)
        elif not self.schedule.lowered:
            self._arrive(message, time + self.costs.message_time(source, destination))

    def _arrive(self, message: Message, time: float) -> None:
        self.arrival[message] = time
        sleeper = self.sleepers.pop(message, None)
        if sleeper is not None:
            self.awake.append(sleeper)

    def _send(self, rank: int, op: Op) -> None:
        message = message_of(op)
        channel = channel_of(message, self.schedule.placement)
        self.issued[message] = self.clock[rank]
        self.slots[rank].append(Slot(op, self.clock[rank], self.clock[rank], f"send {channel[1]}"))
        self._enqueue((rank, -1) if self.one_queue else channel, message, op.kind)

    def _receive(self, rank: int, op: Op) -> None:
        message = message_of(op)
        source, _ = channel_of(message, self.schedule.placement)
        self.slots[rank].append(Slot(op, self.clock[rank], self.clock[rank], f"recv {source}"))
        if self.one_queue:
            self.issued_receive[message] = self.clock[rank]
            self._enqueue((rank, -1), message, op.kind)
        else:
            self._post(message, self.clock[rank])

    def _enqueue(self, queue: Queue, message: Message, kind: OpKind) -> None:
        self.queues[queue].append((message, kind))
        self._drain(queue)

    def _post(self, message: Message, time: float) -> None:
        self.posted[message] = time
        if message in self.waiting:
            self._drain(self.waiting.pop(message))

    def _drain(self, queue: Queue) -> None:
        entries = self.queues[queue]
        while self.heads[queue] < len(entries):
            message, kind = entries[self.heads[queue]]
            if kind in SENDS and message not in self.posted:
                self.waiting[message] = queue
                return
            self.heads[queue] += 1
            if kind in SENDS:
                self._depart(message, queue)
            else:
                self.free[queue] = max(self.free[queue], self.issued_receive[message])
                self._post(message, self.free[queue])

    def _depart(self, message: Message, queue: Queue) -> None:
        departure = max(self.issued[message], self.posted[message], self.free[queue])
        self.departure[message] = self.free[queue] = departure
        channel = channel_of(message, self.schedule.placement)
        self._arrive(message, departure + self.costs.message_time(*channel))

    def _finished(self, slot: Slot) -> Slot:
        """Fill in the times of a message that were not known when its op was issued."""
        if slot.op.kind in SENDS:
            message = message_of(slot.op)
            return slot._replace(start=self.departure[message], end=self.arrival[message])
        if slot.op.kind in RECVS:
            return slot._replace(end=self.arrival[message_of(slot.op)])
        return slot

    def _check_finished(self) -> None:
        blocked = {
            rank: position for rank, position in enumerate(self.position) if position < len(self.schedule.ranks[rank])
        }
        # A message that nobody computes with can be left over though every rank has ended.
        placement = self.schedule.placement
        left = [(queue[self.heads[key]]) for key, queue in self.queues.items() if self.heads[key] < len(queue)]
        ends = [message.send(placement) if kind in SENDS else message.recv(placement) for message, kind in left]
        ends += [message.recv(placement) for message in self.posted.keys() - self.arrival.keys()]
        for op in ends:
            rank = placement.rank_of(op.stage)
            blocked.setdefault(rank, self.schedule.ranks[rank].index(op))
        if blocked:
            raise StuckError(blocked, self.schedule)
