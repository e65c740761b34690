"""What each rank books on the device and on the host, in the order of its program, whatever the times.

Memory is booked for activations alone: memory_b from the start of F (or R) to the end of B, memory_w from there to the end of W. An
activation that is offloaded leaves the device at SEND_END and is back at PREP; on the host it is from SEND_START to RECV_END. An op
of one of s sequence splits books 1/s. Buffers of messages are not booked.
"""

from typing import NamedTuple

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import OpKind, Schedule


class Held(NamedTuple):
    """What a rank holds at an op that changes it."""

    index: int
    """The op's place in its program."""
    during: float
    """Held from the op's start."""
    after: float
    """Held from the op's end."""


def most_held(changes: list[Held]) -> float:
    return max((max(held.during, held.after) for held in changes), default=0.0)


def held_on_device(schedule: Schedule, rank: int, costs: CostModel | None) -> list[Held]:
    """What a rank books on the device, in program order; without `costs`, the number of activations until the end of their W."""
    stages, splits = schedule.placement.stages_of(rank), schedule.num_sequence_splits
    memory_b, memory_w = (costs.memory_b, costs.memory_w) if costs else ((1.0,) * schedule.placement.num_stages,) * 2
    for_b, for_w = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)

    def total() -> float:
        # Counted anew, since a running sum of fractions would drift.
        return sum([memory_b[stage] * for_b[stage] + memory_w[stage] * for_w[stage] for stage in stages]) / splits

    changes, before = [], 0.0
    for index, op in enumerate(schedule.ranks[rank]):
        kind, stage = op.kind, op.stage
        if kind == OpKind.F and op.saves_activation or kind in (OpKind.R, OpKind.OFFLOAD_RECV_PREP):
            for_b[stage] += 1
            before = total()
            changes.append(Held(index, before, before))
        elif kind in _LETS_GO:
            of_b, of_w = _LETS_GO[kind]
            for_b[stage] += of_b
            for_w[stage] += of_w
            changes.append(Held(index, before, total()))
            before = changes[-1].after
    return changes


_LETS_GO = {
    OpKind.B: (-1, 1),
    OpKind.W: (0, -1),
    OpKind.BW: (-1, 0),
    OpKind.OFFLOAD_SEND_END: (-1, 0),
}
"""What ends with an op: the change in activations that wait for their B, and in those that wait for their W."""


def held_on_host(schedule: Schedule, rank: int, costs: CostModel) -> list[Held]:
    """What a rank books on the host, in program order."""
    stages, splits = schedule.placement.stages_of(rank), schedule.num_sequence_splits
    copies = dict.fromkeys(stages, 0)
    changes, before = [], 0.0
    for index, op in enumerate(schedule.ranks[rank]):
        starts = op.kind == OpKind.OFFLOAD_SEND_START
        if not starts and op.kind != OpKind.OFFLOAD_RECV_END:
            continue
        copies[op.stage] += 1 if starts else -1
        held = sum([costs.memory_b[stage] * copies[stage] for stage in stages]) / splits
        changes.append(Held(index, held if starts else before, held))
        before = held
    return changes
