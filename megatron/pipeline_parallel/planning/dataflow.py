"""What an op needs from other ops: the one place that knows the dataflow of a pipeline."""

from functools import cached_property
from typing import NamedTuple

from megatron.pipeline_parallel.planning.op import RECVS, SENDS, Op, OpKind, Placement, Schedule


class Message(NamedTuple):
    """One message: an activation going to the next stage, or a gradient going to the previous one."""

    forward: bool
    source: int
    """The stage that makes it."""
    destination: int
    """The stage that uses it."""
    microbatch: int
    sequence_split: int

    def send(self, placement: Placement) -> Op:
        kind = OpKind.SEND_FORWARD if self.forward else OpKind.SEND_BACKWARD
        return Op(kind, self.source, placement.chunk_of(self.source), self.microbatch, self.sequence_split)

    def recv(self, placement: Placement) -> Op:
        kind = OpKind.RECV_FORWARD if self.forward else OpKind.RECV_BACKWARD
        return Op(kind, self.destination, placement.chunk_of(self.destination), self.microbatch, self.sequence_split)


def message_of(op: Op) -> Message:
    """The message that a SEND or RECV op carries."""
    forward = op.kind in (OpKind.SEND_FORWARD, OpKind.RECV_FORWARD)
    sends = op.kind in SENDS
    step = 1 if forward == sends else -1
    source, destination = (op.stage, op.stage + step) if sends else (op.stage + step, op.stage)
    return Message(forward, source, destination, op.microbatch, op.sequence_split)


def result_of(op: Op, num_stages: int) -> Message | None:
    """What an F, B or BW hands to a neighbouring stage, by message or locally; None at the pipeline's ends."""
    if op.kind == OpKind.F and op.stage + 1 < num_stages:
        return Message(True, op.stage, op.stage + 1, op.microbatch, op.sequence_split)
    if op.kind in (OpKind.B, OpKind.BW) and op.stage > 0:
        return Message(False, op.stage, op.stage - 1, op.microbatch, op.sequence_split)
    return None


def need_of(op: Op, num_stages: int) -> Message | None:
    """What an F, B or BW waits for from a neighbouring stage; None at the pipeline's ends."""
    if op.kind == OpKind.F and op.stage > 0:
        return Message(True, op.stage - 1, op.stage, op.microbatch, op.sequence_split)
    if op.kind in (OpKind.B, OpKind.BW) and op.stage + 1 < num_stages:
        return Message(False, op.stage + 1, op.stage, op.microbatch, op.sequence_split)
    return None


def channel_of(message: Message, placement: Placement) -> tuple[int, int]:
    """(source rank, destination rank): the ordered channel that carries a message."""
    return placement.rank_of(message.source), placement.rank_of(message.destination)


def stream_of(op: Op, placement: Placement) -> str:
    """Where an op takes its time: ``compute``, ``send RANK`` or ``recv RANK`` with the other rank, ``D2H`` or ``H2D``."""
    if op.kind in SENDS:
        return f"send {placement.rank_of(message_of(op).destination)}"
    if op.kind in RECVS:
        return f"recv {placement.rank_of(message_of(op).source)}"
    return {OpKind.OFFLOAD_SEND_START: "D2H", OpKind.OFFLOAD_RECV_START: "H2D"}.get(op.kind, "compute")


MISSING = -1
"""Stands for the number of an op that a schedule lacks."""


class Wiring:
    """The ops of all ranks, numbered in one row, and which of them wait for which.

    Numbers instead of ops, since long schedules are wired, timed and checked often. Where an op stands twice, its last
    place counts. Raises ValueError on an op outside the schedule's stages, microbatches and sequence splits.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ops: list[Op] = [op for ops in schedule.ranks for op in ops]
        self.rank: list[int] = [rank for rank, ops in enumerate(schedule.ranks) for _ in ops]
        self.stride: int = schedule.num_microbatches * schedule.num_sequence_splits
        """How far apart the units of one microbatch and split are on neighbouring stages."""
        self.unit: list[int] = self._units()
        """The unit of each op, numbered by stage, then microbatch, then split."""
        self.at: dict[OpKind, dict[int, int]] = {kind: {} for kind in OpKind}
        """By kind and unit, the number of an op."""
        for number, (op, unit) in enumerate(zip(self.ops, self.unit)):
            self.at[op[0]][unit] = number
        self.backward: dict[int, int] = self.at[OpKind.B] | self.at[OpKind.BW]
        """By unit, the number of its B or BW."""
        self.recv_of: dict[int, int] = {}
        """From each SEND to the RECV at the other end of its message, or to `MISSING`."""
        self.send_of: dict[int, int] = {}
        """From each RECV to the SEND at the other end of its message, or to `MISSING`."""
        for send, recv, away in (
            (self.at[OpKind.SEND_FORWARD], self.at[OpKind.RECV_FORWARD], self.stride),
            (self.at[OpKind.SEND_BACKWARD], self.at[OpKind.RECV_BACKWARD], -self.stride),
        ):
            self.recv_of |= {number: recv.get(unit + away, MISSING) for unit, number in send.items()}
            self.send_of |= {number: send.get(unit - away, MISSING) for unit, number in recv.items()}

    def _units(self) -> list[int]:
        schedule, units = self.schedule, []
        num_microbatches, num_splits = schedule.num_microbatches, schedule.num_sequence_splits
        num_stages = schedule.placement.num_stages
        for op in self.ops:
            _, stage, _, microbatch, split, _ = op
            if not (0 <= stage < num_stages and 0 <= microbatch < num_microbatches and 0 <= split < num_splits):
                raise ValueError(
                    f"{op} is outside of schedule {schedule.name!r}, which has {num_stages} stages, {num_microbatches} "
                    f"microbatches and {num_splits} sequence splits"
                )
            units.append((stage * num_microbatches + microbatch) * num_splits + split)
        return units

    @cached_property
    def waits(self) -> list[tuple[int, ...]]:
        """For each op, those that it waits for besides the one before it on its own stream; `MISSING` for one that is missing."""
        sources = self._sources()
        resumed = self.at[OpKind.OFFLOAD_RECV_START]
        waits = []
        for op, unit in zip(self.ops, self.unit):
            found = tuple([numbers.get(unit + away, MISSING) for numbers, away in sources[op[0]][op[1]]])
            if op[0] in (OpKind.B, OpKind.BW) and unit in resumed:
                found += (resumed[unit],)
            waits.append(found)
        return waits

    def _sources(self) -> dict[OpKind, list[list[tuple[dict[int, int], int]]]]:
        """By kind and stage, where the ops that such an op waits for are found, and how far away their units are."""
        stages = range(self.schedule.placement.num_stages)
        sources = {
            kind: [[(self.at[other], 0) for other in _OF_ONE_UNIT.get(kind, ())] for _ in stages] for kind in OpKind
        }
        sources[OpKind.SEND_BACKWARD] = [[(self.backward, 0)] for _ in stages]
        for stage in stages[1:]:
            by_message = self.schedule.lowered and not self.schedule.placement.is_local(stage - 1, stage)
            activation = (self.at[OpKind.RECV_FORWARD], 0) if by_message else (self.at[OpKind.F], -self.stride)
            gradient = (self.at[OpKind.RECV_BACKWARD], 0) if by_message else (self.backward, self.stride)
            sources[OpKind.F][stage] = [activation]
            sources[OpKind.B][stage - 1] = sources[OpKind.BW][stage - 1] = [gradient]
        return sources


_OF_ONE_UNIT = {
    OpKind.SEND_FORWARD: (OpKind.F,),
    OpKind.OFFLOAD_SEND_START: (OpKind.F,),
    OpKind.OFFLOAD_SEND_END: (OpKind.OFFLOAD_SEND_START,),
    OpKind.OFFLOAD_RECV_PREP: (OpKind.OFFLOAD_SEND_END,),
    OpKind.OFFLOAD_RECV_START: (OpKind.OFFLOAD_RECV_PREP, OpKind.OFFLOAD_SEND_START),
    OpKind.OFFLOAD_RECV_END: (OpKind.OFFLOAD_RECV_START,),
}
"""What an op waits for among the ops on its own activation; the neighbouring stages' are added stage by stage."""


def waits_for(schedule: Schedule) -> list[list[tuple[Op, ...]]]:
    """For each op of each rank, the ops whose events it waits for, other than the one before it on its own stream.

    An F or B waits for its RECV, or where there is none for the op that makes its input; a SEND for its maker; a copy to the host
    for its F; SEND_END for that copy; PREP for SEND_END; the copy back for PREP and for the copy to the host; B and RECV_END for the copy
    back. Raises ValueError on an op outside the schedule's stages, microbatches and sequence splits; an op that is missing is left out.
    """
    wiring = Wiring(schedule)
    found = iter(tuple(wiring.ops[number] for number in numbers if number != MISSING) for numbers in wiring.waits)
    return [[next(found) for _ in ops] for ops in schedule.ranks]
