"""The simulator: when every op of a schedule starts and ends.

Compute ops run in their rank's order. A message leaves when its maker has ended (in a lowered program: when its SEND is
the next of its channel and the peer has posted the RECV) and arrives one latency later; channels never slow each other.
A copy to the host begins when its F has ended, a copy back when its PREP has been reached and the copy to the host has ended, each
after the copy before it in its queue; that a program issues it later than that holds it up no more than it does on a real stream.
Linear in the number of ops.
"""

from collections import defaultdict

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.dataflow import MISSING, Wiring, stream_of
from megatron.pipeline_parallel.planning.link import SharedLink
from megatron.pipeline_parallel.planning.op import COMMUNICATION, RECVS, SENDS, Op, OpKind, Schedule
from megatron.pipeline_parallel.planning.timeline import Slot, Timeline, Traffic

__all__ = ["Slot", "StuckError", "Timeline", "Traffic", "check_ends", "simulate"]


class StuckError(ValueError):
    """The schedule cannot run to its end; `blocked` maps each unfinished rank to the index of the op that it waits in."""

    def __init__(self, blocked: dict[int, int], schedule: Schedule) -> None:
        self.blocked = blocked
        waits = ", ".join(f"rank {rank} in {schedule.ranks[rank][index]}" for rank, index in sorted(blocked.items()))
        super().__init__(f"schedule {schedule.name!r} never ends: {waits}")


def simulate(schedule: Schedule, costs: CostModel, *, one_queue_a_rank: bool = False) -> Timeline:
    """Time every op.

    Sends wait in a queue a channel, in program order, until the peer has posted the receive, which a rank does by itself when
    it gets there. With `one_queue_a_rank`, all messages of a rank, receives too, wait in one queue.

    What can run never depends on the times. Raises StuckError when not everything can, ValueError when `costs` are for
    another number of stages or ranks.
    """
    costs.check_fits(schedule.placement)
    simulation = _Simulation(Wiring(schedule), costs, one_queue_a_rank)
    simulation.run()
    return simulation.timeline()


def check_ends(wiring: Wiring, *, one_queue_a_rank: bool = False) -> None:
    """Raise StuckError when a schedule cannot run to its end, whatever the times; as `simulate`, without the timeline."""
    _Simulation(wiring, CostModel.uniform(wiring.schedule.placement), one_queue_a_rank).run()


class _Simulation:
    """Walks every stream as far as it can; a stream that waits for an op sleeps until the op's end is known.

    Times follow from the order alone, whichever stream is walked first; only on a shared link does it matter what happens at the
    same time. Links therefore move only when every stream sleeps, the one with the earliest event first: whatever is still
    to come then depends on a copy, so that it cannot start before that event.

    A SEND ends here when it departs and a RECV when it is posted; the latency lies between a SEND and who uses the message.
    """

    def __init__(self, wiring: Wiring, costs: CostModel, one_queue: bool) -> None:
        self.schedule = wiring.schedule
        self.costs = costs
        self.wiring = wiring
        size = len(self.wiring.ops)
        self.start = [0.0] * size
        # One more for MISSING, which never ends.
        self.end: list[float | None] = [None] * (size + 1)
        self.order: list[int] = [0] * size
        self.num_ended = 0
        self.issued_after = [MISSING] * size
        """Of each op on another stream than its rank's compute stream, the op of that stream that was issued last before it."""
        self.streams, self.link_of = self._streams(one_queue)
        self.latency = self._latencies()
        self.waits = self._waits()
        self.duration = self._durations()
        self.position = [0] * len(self.streams)
        self.clock = [0.0] * len(self.streams)
        self.sleepers: dict[int, list[int]] = defaultdict(list)
        self.awake = list(range(len(self.streams)))

    def _streams(self, one_queue: bool) -> tuple[list[list[int]], dict[int, SharedLink]]:
        """The numbers of each stream's ops, the ranks' compute streams first, and the links of those whose copies can be slowed."""
        ops, issued_after = self.wiring.ops, self.issued_after
        compute: list[list[int]] = [[] for _ in self.schedule.ranks]
        others: dict[tuple[int, str], list[int]] = {}
        found: dict[tuple[int, OpKind, int], list[int]] = {}
        for number, (op, rank) in enumerate(zip(ops, self.wiring.rank)):
            key = (rank, op[0], op[1])
            if key not in found:
                word = self._stream_word(op, rank, one_queue)
                found[key] = compute[rank] if word == "compute" else others.setdefault((rank, word), [])
            stream = found[key]
            if stream is not compute[rank] and compute[rank]:
                issued_after[number] = compute[rank][-1]
            stream.append(number)
        links: dict[tuple[int, ...], SharedLink] = {}
        link_of = {}
        for index, (rank, word) in enumerate(others, len(compute)):
            link = self.costs.link_of(rank)
            if word in _COPY_QUEUES and len(link.ranks) > 1 and link.shared_factor > 1:
                link_of[index] = links.setdefault((*link.ranks, word), SharedLink(link.shared_factor))
        return [*compute, *others.values()], link_of

    def _stream_word(self, op: Op, rank: int, one_queue: bool) -> str:
        if op.kind in SENDS or op.kind in RECVS:
            if one_queue:
                return "messages"
            # Posting a receive takes no time and never waits.
            return "compute" if op.kind in RECVS else stream_of(op, self.schedule.placement)
        stream = stream_of(op, self.schedule.placement)
        return "copies" if stream in _COPY_QUEUES and self.costs.link_of(rank).duplex == "half" else stream

    def _latencies(self) -> dict[int, float]:
        """Of each SEND with a RECV, the time that its message is under way."""
        rank_of, comm = self.wiring.rank, self.costs.message_time
        return {
            send: comm(rank_of[send], rank_of[recv]) for send, recv in self.wiring.recv_of.items() if recv != MISSING
        }

    def _waits(self) -> list[tuple[tuple[int, float], ...]]:
        """For each op, (the op that it waits for, how long after that op's end) of those that are not before it on its stream."""
        waits, lowered = [], self.schedule.lowered
        rank_of, send_of, recv_of = self.wiring.rank, self.wiring.send_of, self.wiring.recv_of
        lag = self.costs.message_time
        for number, found in enumerate(self.wiring.waits):
            kind = self.wiring.ops[number][0]
            if kind in COMMUNICATION:
                issue = self.issued_after[number]
                found = ((issue, 0.0),) if issue != MISSING else ()
                waits.append(((recv_of[number], 0.0), *found) if kind in SENDS else found)
            elif not found:
                waits.append(())
            elif lowered:
                sends = [send_of.get(before, before) for before in found]
                waits.append(tuple([(before, self.latency.get(before, 0.0)) for before in sends]))
            else:
                waits.append(tuple([(before, lag(rank_of[before], rank_of[number])) for before in found]))
        return waits

    def _durations(self) -> list[float]:
        splits = self.schedule.num_sequence_splits
        stages = range(self.schedule.placement.num_stages)
        times = {kind: [self.costs.duration(Op(kind, stage, 0, 0), splits) for stage in stages] for kind in OpKind}
        return [times[op[0]][op[1]] for op in self.wiring.ops]

    def run(self) -> None:
        """Run everything; StuckError when that is not possible."""
        links = list(dict.fromkeys(self.link_of.values()))
        while True:
            while self.awake:
                self._walk(self.awake.pop())
            link = min(links, key=SharedLink.next_event, default=None)
            if link is None or link.next_event() == float("inf"):
                break
            copied = link.advance()
            if copied is not None:
                stream, time = copied
                self._ended(self.streams[stream][self.position[stream]], time)
                self.clock[stream] = time
                self.position[stream] += 1
                self.awake.append(stream)
        self._check_finished()

    def _walk(self, stream: int) -> None:
        numbers, waits, end = self.streams[stream], self.waits, self.end
        clock, link = self.clock[stream], self.link_of.get(stream)
        for position in range(self.position[stream], len(numbers)):
            number = numbers[position]
            start = clock
            for before, lag in waits[number]:
                time = end[before]
                if time is None:
                    self._sleep(stream, position, clock, before)
                    return
                if time + lag > start:
                    start = time + lag
            self.start[number] = start
            if link is not None:
                link.add(stream, start, self.duration[number])
                self.position[stream] = position
                return
            clock = start + self.duration[number]
            self._ended(number, clock)
        self.position[stream] = len(numbers)

    def _sleep(self, stream: int, position: int, clock: float, before: int) -> None:
        self.position[stream], self.clock[stream] = position, clock
        self.sleepers[before].append(stream)

    def _ended(self, number: int, time: float) -> None:
        self.end[number] = time
        self.order[number] = self.num_ended
        self.num_ended += 1
        if number in self.sleepers:
            self.awake += self.sleepers.pop(number)

    def _check_finished(self) -> None:
        rank_of, blocked = self.wiring.rank, {}
        firsts = [0]
        for ops in self.schedule.ranks:
            firsts.append(firsts[-1] + len(ops))
        heads = [numbers[at] for numbers, at in zip(self.streams, self.position) if at < len(numbers)]
        # A receive of a message that nobody sends, or computes with, can be left over though every stream has ended.
        heads += [recv for recv, send in self.wiring.send_of.items() if self.end[send] is None]
        for number in heads:
            blocked.setdefault(rank_of[number], number - firsts[rank_of[number]])
        if blocked:
            raise StuckError(blocked, self.schedule)

    def timeline(self) -> Timeline:
        slots, order = iter(self._slots()), iter(self.order)
        return Timeline(
            schedule=self.schedule,
            costs=self.costs,
            slots=tuple(tuple([next(slots) for _ in ops]) for ops in self.schedule.ranks),
            order=tuple(tuple([next(order) for _ in ops]) for ops in self.schedule.ranks),
        )

    def _slots(self) -> list[Slot]:
        slots, streams = [], {}
        send_of, start, end = self.wiring.send_of, self.start, self.end
        for number, op in enumerate(self.wiring.ops):
            kind, stage = op[0], op[1]
            if (kind, stage) not in streams:
                streams[kind, stage] = stream_of(op, self.schedule.placement)
            last = end[number]
            if kind in COMMUNICATION:
                send = send_of.get(number, number)
                last = start[send] + self.latency[send]
            slots.append(Slot(op, start[number], last, streams[kind, stage]))
        return slots


_COPY_QUEUES = frozenset({"copies", "D2H", "H2D"})
