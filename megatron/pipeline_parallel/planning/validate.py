"""The one validator: builders, passes, loaders and tests all call `validate`.

What it proves of a compute order: each op once and on its own rank, F before B before W, each stage in microbatch
order, a backward for every microbatch or for none, and an order across ranks in which everything can run. What it proves of a lowered program besides: every
message between ranks has one SEND behind its maker and one RECV before its user, both ends of a channel agree on the order,
and the program cannot stick even when a SEND waits for its RECV to be posted: neither with each channel a queue of its own,
nor with all messages of a rank in one queue.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.dataflow import channel_of, message_of, need_of, result_of
from megatron.pipeline_parallel.planning.grid import GRID_WIDTH, step_grid
from megatron.pipeline_parallel.planning.op import COMMUNICATION, COMPUTE, RECVS, Op, OpKind, Schedule
from megatron.pipeline_parallel.planning.simulate import StuckError, simulate


class ScheduleError(ValueError):
    """A schedule that must not run. The text says what is wrong and shows the grid around the bad cells, marked."""


class Fault(NamedTuple):
    """One thing that is wrong, and the (rank, position) cells to mark."""

    text: str
    cells: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What `validate` found out about a schedule on the way."""

    posted_receives: tuple[int, ...]
    """A rank: most receives posted whose user has not begun, whatever the timing."""


def validate(schedule: Schedule) -> Proof:
    """Check everything; raises ScheduleError on the first fault found."""
    checks: list[Callable[[Schedule], Iterator[Fault]]] = [_shape, _places, _once, _order, _microbatch_order]
    if schedule.lowered:
        checks += [_messages, _message_places, _channel_order]
    for check in checks:
        for fault in check(schedule):
            raise _error(schedule, fault)
    for one_queue_a_rank in (False, True) if schedule.lowered else (False,):
        _prove_no_deadlock(schedule, one_queue_a_rank)
    return Proof(posted_receives=tuple(_posted_receives(schedule, rank) for rank in range(schedule.pp_size)))


def _error(schedule: Schedule, fault: Fault) -> ScheduleError:
    text = f"schedule {schedule.name!r}: {fault.text}"
    if not fault.cells:
        return ScheduleError(text)
    (_, first), (_, last) = fault.cells[0], fault.cells[-1]
    grid = step_grid(schedule, frozenset(fault.cells), around=first)
    if abs(last - first) > GRID_WIDTH:
        grid += "\n\n" + step_grid(schedule, frozenset(fault.cells), around=last)
    return ScheduleError(f"{text}\n{grid}")


def _shape(schedule: Schedule) -> Iterator[Fault]:
    for word, number in (
        ("microbatches", schedule.num_microbatches),
        ("sequence splits", schedule.num_sequence_splits),
    ):
        if number < 1:
            yield Fault(f"needs at least one of its {word}, got {number}", ())
    if len(schedule.ranks) != schedule.pp_size:
        yield Fault(f"has programs for {len(schedule.ranks)} ranks, its placement has {schedule.pp_size}", ())


def _cells(schedule: Schedule) -> Iterator[tuple[int, int, Op]]:
    for rank, ops in enumerate(schedule.ranks):
        for position, op in enumerate(ops):
            yield rank, position, op


def _places(schedule: Schedule) -> Iterator[Fault]:
    placement = schedule.placement
    for rank, position, op in _cells(schedule):
        at = ((rank, position),)
        if not 0 <= op.stage < placement.num_stages:
            yield Fault(f"{op}: there is no stage {op.stage}, only 0..{placement.num_stages - 1}", at)
        elif placement.stages[op.stage] != (rank, op.chunk):
            home, chunk = placement.stages[op.stage]
            yield Fault(f"{op} is on rank {rank}, but stage {op.stage} is chunk {chunk} of rank {home}", at)
        elif not 0 <= op.microbatch < schedule.num_microbatches:
            yield Fault(f"{op}: there is no microbatch {op.microbatch}, only 0..{schedule.num_microbatches - 1}", at)
        elif not 0 <= op.sequence_split < schedule.num_sequence_splits:
            yield Fault(
                f"{op}: there is no sequence split {op.sequence_split}, only 0..{schedule.num_sequence_splits - 1}", at
            )
        elif not op.saves_activation and op.kind != OpKind.F:
            yield Fault(f"{op}: only an F can throw its activation away", at)
        elif op.kind not in COMPUTE | COMMUNICATION:
            yield Fault(f"{op}: this kind of op has no rules yet, so nothing can be proven of it", at)
        elif op.kind in COMMUNICATION and not schedule.lowered:
            yield Fault(f"{op}: a compute order holds no messages; the communication pass makes them", at)


_Key = tuple[OpKind, int, int, int, int]
"""An op without `saves_activation`."""


def _positions(schedule: Schedule) -> dict[_Key, tuple[int, int]]:
    return {op[:5]: (rank, position) for rank, position, op in _cells(schedule)}


def _once(schedule: Schedule) -> Iterator[Fault]:
    seen: dict[_Key, tuple[int, int]] = {}
    for rank, position, op in _cells(schedule):
        if op[:5] in seen:
            yield Fault(f"{op} stands twice", (seen[op[:5]], (rank, position)))
        seen[op[:5]] = (rank, position)
    kinds: dict[tuple[int, int, int], set[OpKind]] = defaultdict(set)
    for _, _, op in _cells(schedule):
        if op.kind in COMPUTE:
            kinds[op.unit].add(op.kind)
    trains = _trains(schedule)
    for stage in range(schedule.placement.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for split in range(schedule.num_sequence_splits):
                what = f"stage {stage}, microbatch {microbatch}, sequence split {split}"
                yield from _complete(kinds[stage, microbatch, split], trains, what)


def _trains(schedule: Schedule) -> bool:
    """Whether there is any backward; a schedule that evaluates has forwards alone."""
    return any(op.kind in COMPUTE and op.kind != OpKind.F for _, _, op in _cells(schedule))


def _complete(kinds: set[OpKind], trains: bool, what: str) -> Iterator[Fault]:
    backward = kinds - {OpKind.F, OpKind.R}
    if OpKind.F not in kinds:
        yield Fault(f"{what} has no F", ())
    elif trains and backward not in ({OpKind.BW}, {OpKind.B, OpKind.W}):
        yield Fault(f"{what} has {' and '.join(sorted(backward)) or 'no backward'}; needs BW, or B and W", ())


def _order(schedule: Schedule) -> Iterator[Fault]:
    """F, then R if any, then B and W or BW; a throw-away forward has its R, another has none."""
    for rank, ops in enumerate(schedule.ranks):
        done: dict[tuple[int, int, int], OpKind] = {}
        discarded: set[tuple[int, int, int]] = set()
        for position, op in enumerate(ops):
            if op.kind not in COMPUTE:
                continue
            before = done.get(op.unit)
            if op.kind == OpKind.F and not op.saves_activation:
                discarded.add(op.unit)
            ready = OpKind.R if op.unit in discarded else OpKind.F
            wanted = {OpKind.F: None, OpKind.R: OpKind.F, OpKind.W: OpKind.B}.get(op.kind, ready)
            if before != wanted or op.kind == OpKind.R and op.unit not in discarded:
                after = f"after {before}" if before else "first"
                yield Fault(
                    f"{op} comes {after} on its activation, needs {wanted or 'nothing'} right before it",
                    ((rank, position),),
                )
            done[op.unit] = op.kind


def _microbatch_order(schedule: Schedule) -> Iterator[Fault]:
    """F, B and W of a stage in microbatch order.

    Batches are read in the order of the F, and gradients are summed as the plain model sums them, bit for bit.
    """
    for rank, ops in enumerate(schedule.ranks):
        last: dict[tuple[OpKind, int], int] = {}
        for position, op in enumerate(ops):
            for kind in _ORDERED.get(op.kind, ()):
                before = last.get((kind, op.stage), 0)
                if op.microbatch < before:
                    text = f"{op} comes after microbatch {before}; a stage's {kind} go in microbatch order"
                    yield Fault(text, ((rank, position),))
                last[kind, op.stage] = op.microbatch


_ORDERED = {
    OpKind.F: (OpKind.F,),
    OpKind.B: (OpKind.B,),
    OpKind.W: (OpKind.W,),
    # A BW takes part in both orders.
    OpKind.BW: (OpKind.B, OpKind.W),
}


def _prove_no_deadlock(schedule: Schedule, one_queue_a_rank: bool) -> None:
    """Some order across ranks exists in which every op finds what it needs."""
    try:
        simulate(schedule, CostModel.uniform(schedule.placement), one_queue_a_rank=one_queue_a_rank)
    except StuckError as error:
        model = "compute order"
        if schedule.lowered:
            model = "program with all messages of a rank in one queue" if one_queue_a_rank else "program"
        raise _error(
            schedule, Fault(f"deadlock of the {model}: {error}", tuple(sorted(error.blocked.items())))
        ) from None


def _messages(schedule: Schedule) -> Iterator[Fault]:
    """One SEND and one RECV for each hand-over between two ranks, none for a local one."""
    placement, present = schedule.placement, {op for _, _, op in _cells(schedule)}
    wanted: set[Op] = set()
    for rank, position, op in _cells(schedule):
        message = result_of(op, placement.num_stages)
        if message is None or placement.is_local(message.source, message.destination):
            continue
        for end in (message.send(placement), message.recv(placement)):
            wanted.add(end)
            if end not in present:
                yield Fault(f"{op} makes a message for another rank, but {end} is missing", ((rank, position),))
    for rank, position, op in _cells(schedule):
        if op.kind in COMMUNICATION and op not in wanted:
            yield Fault(
                f"{op} carries nothing: its maker is missing, or both stages are on rank {rank}", ((rank, position),)
            )


def _message_places(schedule: Schedule) -> Iterator[Fault]:
    """A SEND behind its maker, a RECV before its user."""
    positions, placement = _positions(schedule), schedule.placement
    for rank, position, op in _cells(schedule):
        need = need_of(op, placement.num_stages)
        if need is not None and not placement.is_local(need.source, need.destination):
            recv = positions[need.recv(placement)[:5]]
            if recv[1] > position:
                yield Fault(
                    f"{schedule.ranks[rank][recv[1]]} is posted after {op}, which uses it", (recv, (rank, position))
                )
        result = result_of(op, placement.num_stages)
        if result is not None and not placement.is_local(result.source, result.destination):
            send = positions[result.send(placement)[:5]]
            if send[1] < position:
                yield Fault(
                    f"{schedule.ranks[rank][send[1]]} stands before {op}, which makes it", (send, (rank, position))
                )


def _channel_order(schedule: Schedule) -> Iterator[Fault]:
    """Both ends of a channel name the same messages in the same order."""
    ends: dict[tuple[int, int], tuple[list, list]] = defaultdict(lambda: ([], []))
    for rank, position, op in _cells(schedule):
        if op.kind in COMMUNICATION:
            message = message_of(op)
            ends[channel_of(message, schedule.placement)][op.kind in RECVS].append((message, (rank, position)))
    for (source, destination), (sends, recvs) in sorted(ends.items()):
        for (sent, send_at), (received, recv_at) in zip(sends, recvs):
            if sent != received:
                send_op, recv_op = schedule.ranks[send_at[0]][send_at[1]], schedule.ranks[recv_at[0]][recv_at[1]]
                text = f"channel {source} -> {destination}: {send_op} meets {recv_op}"
                yield Fault(f"{text}; sends and receives of a channel go in one order", (send_at, recv_at))


def _posted_receives(schedule: Schedule, rank: int) -> int:
    posted = most = 0
    num_stages, placement = schedule.placement.num_stages, schedule.placement
    for op in schedule.ranks[rank]:
        if op.kind in RECVS:
            posted += 1
            most = max(most, posted)
        need = need_of(op, num_stages)
        if need is not None and schedule.lowered and not placement.is_local(need.source, need.destination):
            posted -= 1
    return most
