"""Timeline: a schedule with times, and what follows from them: bubbles, memory over time, traffic."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.memory import Held, held_on_device, held_on_host, most_held
from megatron.pipeline_parallel.planning.op import COMPUTE, COPIES, SENDS, Op, OpKind, Schedule


class Slot(NamedTuple):
    """One op in time. A SEND lasts from its start on the channel, a RECV from being posted, both to the arrival; an op that
    starts a copy lasts as long as the copy."""

    op: Op
    start: float
    end: float
    stream: str


class Traffic(NamedTuple):
    """What leaves one rank, and what it copies."""

    messages: int
    """Messages sent."""
    message_size: float | None
    """Their size together, in units of `CostModel.message`; None when that is not known."""
    copies: int
    """Copies to the host and back."""
    copy_size: float
    """Their size together, in units of memory."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A schedule with times.

    `slots[i]` follows `schedule.ranks[i]`, and so does `order[i]`, which numbers the ops in one order in which all ranks' ops could run
    one after another.

    `memory.py` says what memory is booked from when to when; buffers of messages are not.
    """

    schedule: Schedule
    costs: CostModel
    slots: tuple[tuple[Slot, ...], ...]
    order: tuple[tuple[int, ...], ...]

    def compute(self, rank: int) -> list[Slot]:
        """The compute ops of one rank: F, B, W, BW, R."""
        return [slot for slot in self.slots[rank] if slot.op.kind in COMPUTE]

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the end of the last compute op on any rank."""
        return max((slot.end for rank in range(len(self.slots)) for slot in self.compute(rank)), default=0.0)

    def busy(self, rank: int) -> float:
        """Time that a rank computes."""
        splits = self.schedule.num_sequence_splits
        return sum(self.costs.duration(slot.op, splits) for slot in self.compute(rank))

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
        """Most activations on the device at once, in microbatches through all of the rank's chunks, each from F to the end of W."""
        most = most_held(held_on_device(self.schedule, rank, None))
        return most / self.schedule.placement.chunks_per_rank

    def peak_memory(self, rank: int) -> float:
        """Most device memory booked at once."""
        return most_held(held_on_device(self.schedule, rank, self.costs))

    def peak_host_memory(self, rank: int) -> float:
        """Most host memory booked at once."""
        return most_held(held_on_host(self.schedule, rank, self.costs))

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Device memory over time: (time, what is held from then on). Of several steps at one time the last holds."""
        return self._steps(rank, held_on_device(self.schedule, rank, self.costs))

    def host_memory(self, rank: int) -> list[tuple[float, float]]:
        """Host memory over time, as `memory`. What a copy needs is booked when the compute stream gets to where the copy is issued."""
        return self._steps(rank, held_on_host(self.schedule, rank, self.costs))

    def _steps(self, rank: int, changes: list[Held]) -> list[tuple[float, float]]:
        reached = self._reached(rank)
        steps, before = [(0.0, 0.0)], 0.0
        for index, during, after in changes:
            slot = self.slots[rank][index]
            on_compute = slot.stream == "compute"
            if during != before:
                steps.append((slot.start if on_compute else reached[index], during))
            if after != during:
                steps.append((slot.end if on_compute else reached[index], after))
            before = after
        return steps

    def _reached(self, rank: int) -> list[float]:
        """For each op, when the compute stream has done all before it."""
        clock, reached = 0.0, []
        for slot in self.slots[rank]:
            reached.append(clock)
            if slot.stream == "compute":
                clock = slot.end
        return reached

    def traffic(self, rank: int) -> Traffic:
        """What a rank sends to others and copies; before messages are made explicit, those that are implied."""
        splits = self.schedule.num_sequence_splits
        sources = [source for source in map(self._sent, self.schedule.ranks[rank]) if source is not None]
        copied = [op for op in self.schedule.ranks[rank] if op.kind in COPIES]
        return Traffic(
            messages=len(sources),
            message_size=sum(self.costs.message[source] for source in sources) / splits if self.costs.message else None,
            copies=len(copied),
            copy_size=sum(self.costs.memory_b[op.stage] for op in copied) / splits,
        )

    def _sent(self, op: Op) -> int | None:
        """The stage whose output, or whose output's gradient, an op sends to another rank; None when it sends nothing."""
        placement = self.schedule.placement
        forward = op.kind in (OpKind.SEND_FORWARD, OpKind.F)
        kinds = SENDS if self.schedule.lowered else (OpKind.F, OpKind.B, OpKind.BW)
        source = op.stage if forward else op.stage - 1
        if op.kind not in kinds or not 0 <= source < placement.num_stages - 1:
            return None
        return None if placement.is_local(source, source + 1) else source
