"""What an op needs from other ops: the one place that knows the dataflow of a pipeline."""

from typing import NamedTuple

from megatron.pipeline_parallel.planning.op import SENDS, Op, OpKind, Placement


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
