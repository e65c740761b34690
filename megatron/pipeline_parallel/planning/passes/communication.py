"""The communication pass: messages made explicit."""

from bisect import bisect_left

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.dataflow import Message, need_of, result_of
from megatron.pipeline_parallel.planning.op import Op, OpKind, Schedule
from megatron.pipeline_parallel.planning.simulate import Slot, simulate

Key = tuple[float, int]
"""(end, number) of an op on the compute stream: sorting by it gives one order of all ranks' ops in which everything can run."""


def add_communication(schedule: Schedule, costs: CostModel) -> Schedule:
    """Put a SEND right behind each op whose result another rank needs, and its RECV where it is needed.

    A RECV stands at the last op boundary that its rank reaches before the message is made, by the times of `costs`: it
    occupies a buffer from there, and a SEND whose RECV is not posted would hold up its channel. As each RECV is then posted
    before its SEND in one order that all ranks share, the program cannot stick, not even if a SEND blocked its whole rank.
    Stages that share a rank hand over locally and get no messages.

    Raises ValueError when `schedule` is lowered already, StuckError when its order cannot run.
    """
    if schedule.lowered:
        raise ValueError(f"schedule {schedule.name!r} has its messages already")
    timeline = simulate(schedule, costs)
    keys = [_keys(slots, numbers) for slots, numbers in zip(timeline.slots, timeline.order)]
    made = _made_when(schedule, timeline.slots, keys)
    programs = []
    for rank, ops in enumerate(schedule.ranks):
        receives = _receives(schedule, ops, keys[rank], made)
        program: list[Op] = []
        for position, op in enumerate(ops):
            program += [message.recv(schedule.placement) for _, message in sorted(receives.get(position, []))]
            program.append(op)
            result = _remote(result_of(op, schedule.placement.num_stages), schedule)
            if result is not None:
                program.append(result.send(schedule.placement))
        programs.append(program)
    return schedule.with_ranks(programs, lowered=True)


def forward_only(schedule: Schedule) -> Schedule:
    """The compute order that evaluates: a schedule's forwards alone, which save nothing."""
    forwards = ([op._replace(saves_activation=False) for op in ops if op.kind == OpKind.F] for ops in schedule.ranks)
    return schedule.with_ranks(forwards, name=f"{schedule.name} (forward only)", lowered=False)


def _remote(message: Message | None, schedule: Schedule) -> Message | None:
    if message is None or schedule.placement.is_local(message.source, message.destination):
        return None
    return message


def _keys(slots: tuple[Slot, ...], numbers: tuple[int, ...]) -> list[Key]:
    """The key of each op of a rank; an op that starts a copy is passed as soon as the compute stream gets to it."""
    keys, last = [], (0.0, -1)
    for slot, number in zip(slots, numbers):
        if slot.stream == "compute":
            last = (slot.end, number)
        keys.append(last)
    return keys


def _made_when(schedule: Schedule, slots: tuple[tuple[Slot, ...], ...], keys: list[list[Key]]) -> dict[Message, Key]:
    made = {}
    for rank_slots, rank_keys in zip(slots, keys):
        for slot, key in zip(rank_slots, rank_keys):
            result = _remote(result_of(slot.op, schedule.placement.num_stages), schedule)
            if result is not None:
                made[result] = key
    return made


def _receives(
    schedule: Schedule, ops: tuple[Op, ...], keys: list[Key], made: dict[Message, Key]
) -> dict[int, list[tuple[Key, Message]]]:
    """Position of the op before which each RECV of one rank goes, with what to sort by there."""
    receives: dict[int, list[tuple[Key, Message]]] = {}
    for position, op in enumerate(ops):
        need = _remote(need_of(op, schedule.placement.num_stages), schedule)
        if need is not None:
            boundary = min(position, bisect_left(keys, made[need]))
            receives.setdefault(boundary, []).append((made[need], need))
    return receives
