"""The one validator: builders, passes, loaders and tests all call `validate`.

What it proves of a compute order: each op once and on its own rank, F before B before W, each stage in microbatch
order, a backward for every microbatch or for none, and an order across ranks in which everything can run. An offloaded activation leaves and
comes back once, between its F and its B. What it proves of a lowered program besides: every
message between ranks has one SEND behind its maker and one RECV before its user, both ends of a channel agree on the order,
and the program cannot stick even when a SEND waits for its RECV to be posted: neither with each channel a queue of its own,
nor with all messages of a rank in one queue. With costs: no rank ever holds more than its limits.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.dataflow import Wiring, result_of
from megatron.pipeline_parallel.planning.grid import GRID_WIDTH, step_grid
from megatron.pipeline_parallel.planning.memory import Held, held_on_device, held_on_host, most_held
from megatron.pipeline_parallel.planning.op import COMMUNICATION, OFFLOAD, RECVS, SENDS, Op, OpKind, Schedule
from megatron.pipeline_parallel.planning.simulate import StuckError, check_ends


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
    peak_memory: tuple[float, ...] | None
    """A rank: most device memory booked at once; None when no costs were given."""


def validate(schedule: Schedule, costs: CostModel | None = None) -> Proof:
    """Check everything; raises ScheduleError on the first fault found, ValueError when `costs` are for another number of stages or ranks.

    With `costs`, memory is checked against their limits at every instant; a limit is kept when it is passed by no more than a
    billionth of it, which rounding can cause.
    """
    if costs is not None:
        costs.check_fits(schedule.placement)
    for check in (_shape, _places):
        _raise_first(schedule, check(schedule))
    wiring = Wiring(schedule)
    _raise_first(schedule, _faults(wiring, costs))
    peaks = None
    if costs is not None:
        peaks = tuple(most_held(held_on_device(schedule, rank, costs)) for rank in range(schedule.pp_size))
    return Proof(posted_receives=tuple(_posted_receives(wiring)), peak_memory=peaks)


def _faults(wiring: Wiring, costs: CostModel | None) -> Iterator[Fault]:
    yield from _once(wiring)
    yield from _order(wiring)
    yield from _microbatch_order(wiring.schedule)
    if wiring.schedule.lowered:
        yield from _messages(wiring)
        yield from _message_places(wiring)
        yield from _channel_order(wiring)
    yield from _deadlock(wiring)
    if costs is not None:
        yield from _memory(wiring, costs)


def _raise_first(schedule: Schedule, faults: Iterator[Fault]) -> None:
    for fault in faults:
        raise _error(schedule, fault)


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
    places, num_stages = schedule.placement.stages, schedule.placement.num_stages
    num_microbatches, num_splits = schedule.num_microbatches, schedule.num_sequence_splits
    for rank, position, op in _cells(schedule):
        kind, stage, chunk, microbatch, split, saves = op
        text = None
        if not 0 <= stage < num_stages:
            text = f"{op}: there is no stage {stage}, only 0..{num_stages - 1}"
        elif places[stage] != (rank, chunk):
            home, home_chunk = places[stage]
            text = f"{op} is on rank {rank}, but stage {stage} is chunk {home_chunk} of rank {home}"
        elif not 0 <= microbatch < num_microbatches:
            text = f"{op}: there is no microbatch {microbatch}, only 0..{num_microbatches - 1}"
        elif not 0 <= split < num_splits:
            text = f"{op}: there is no sequence split {split}, only 0..{num_splits - 1}"
        elif not saves and kind != OpKind.F:
            text = f"{op}: only an F can throw its activation away"
        elif kind in COMMUNICATION and not schedule.lowered:
            text = f"{op}: a compute order holds no messages; the communication pass makes them"
        if text is not None:
            yield Fault(text, ((rank, position),))


def _once(wiring: Wiring) -> Iterator[Fault]:
    seen: dict[tuple[OpKind, int], tuple[int, int]] = {}
    for number, (rank, position, op) in enumerate(_cells(wiring.schedule)):
        key = (op[0], wiring.unit[number])
        if key in seen:
            yield Fault(f"{op} stands twice", (seen[key], (rank, position)))
        seen[key] = (rank, position)
    kinds_at = {kind: wiring.at[kind] for kind in (*_BACKWARD, OpKind.F, *_OFFLOAD_CHAIN) if wiring.at[kind]}
    # A schedule that evaluates has forwards alone.
    trains = any(kind in kinds_at for kind in _BACKWARD) or bool(wiring.at[OpKind.R])
    splits, microbatches = wiring.schedule.num_sequence_splits, wiring.schedule.num_microbatches
    for unit in range(wiring.stride * wiring.schedule.placement.num_stages):
        kinds = [kind for kind, numbers in kinds_at.items() if unit in numbers]
        fault = _incomplete(kinds, trains)
        if fault is not None:
            above, split = divmod(unit, splits)
            stage, microbatch = divmod(above, microbatches)
            cells = sorted(_cell(wiring, kinds_at[kind][unit]) for kind in kinds)
            yield Fault(f"stage {stage}, microbatch {microbatch}, sequence split {split} {fault}", tuple(cells))


_BACKWARD = (OpKind.B, OpKind.BW, OpKind.W)

_OFFLOAD_CHAIN = (
    OpKind.OFFLOAD_SEND_START,
    OpKind.OFFLOAD_SEND_END,
    OpKind.OFFLOAD_RECV_PREP,
    OpKind.OFFLOAD_RECV_START,
    OpKind.OFFLOAD_RECV_END,
)


def _incomplete(kinds: list[OpKind], trains: bool) -> str | None:
    """What the ops on one activation lack; `kinds` in the order of the two tuples above."""
    backward = [kind for kind in kinds if kind in _BACKWARD]
    offload = [kind for kind in kinds if kind in OFFLOAD]
    if OpKind.F not in kinds:
        return "has no F"
    if trains and backward not in ([OpKind.BW], [OpKind.B, OpKind.W]):
        return f"has {' and '.join(backward) or 'no backward'}; needs BW, or B and W"
    if offload and len(offload) != len(OFFLOAD):
        lacking = ", ".join(kind for kind in _OFFLOAD_CHAIN if kind not in offload)
        return f"is offloaded without {lacking}; needs all five offload ops, or none"
    return None


def _order(wiring: Wiring) -> Iterator[Fault]:
    """The life of an activation, op by op.

    F, then R if it was thrown away, or the copies if it is offloaded, then B and W or BW, and the end of an offload.
    """
    done: dict[int, OpKind] = {}
    discarded = {unit for unit, number in wiring.at[OpKind.F].items() if not wiring.ops[number].saves_activation}
    offloaded = wiring.at[OpKind.OFFLOAD_SEND_START]
    for number, (rank, position, op) in enumerate(_cells(wiring.schedule)):
        kind, unit = op[0], wiring.unit[number]
        if kind in COMMUNICATION:
            continue
        before, text = done.get(unit), None
        if kind in _LIFE:
            wanted = _LIFE[kind]
        elif unit in discarded:
            wanted = (OpKind.R,)
        else:
            wanted = (OpKind.OFFLOAD_RECV_START,) if unit in offloaded else (OpKind.F,)
        if kind in OFFLOAD and unit in discarded:
            text = f"{op}: its F throws the activation away, so there is nothing to offload"
        elif before not in wanted or kind == OpKind.R and unit not in discarded:
            after = f"after {before}" if before else "first"
            need = " or ".join(want or "nothing" for want in wanted)
            text = f"{op} comes {after} on its activation, needs {need} right before it"
        if text is not None:
            yield Fault(text, ((rank, position),))
        done[unit] = kind


_LIFE: dict[OpKind, tuple[OpKind | None, ...]] = {
    OpKind.F: (None,),
    OpKind.R: (OpKind.F,),
    OpKind.W: (OpKind.B,),
    OpKind.OFFLOAD_SEND_START: (OpKind.F,),
    OpKind.OFFLOAD_SEND_END: (OpKind.OFFLOAD_SEND_START,),
    OpKind.OFFLOAD_RECV_PREP: (OpKind.OFFLOAD_SEND_END,),
    OpKind.OFFLOAD_RECV_START: (OpKind.OFFLOAD_RECV_PREP,),
    OpKind.OFFLOAD_RECV_END: (OpKind.W, OpKind.BW),
}
"""What comes right before an op on its activation; what comes before a B depends on the activation."""


def _microbatch_order(schedule: Schedule) -> Iterator[Fault]:
    """F, B and W of a stage in microbatch order; inside a microbatch F first split first, B last split first.

    Batches are read in the order of the F, and gradients are summed as the plain model sums them, bit for bit. Attention carries
    keys and values forward from split to split, and their gradients backward.
    """
    last: dict[tuple[OpKind, int], tuple[int, int]] = {}
    for rank, position, op in _cells(schedule):
        for kind in _ORDERED.get(op[0], ()):
            key = (kind, op[1])
            microbatch, split = op[3], op[4]
            if key in last:
                before, split_before = last[key]
                text = None
                if microbatch < before:
                    text = f"{op} comes after microbatch {before}; a stage's {kind} go in microbatch order"
                elif microbatch == before and kind == OpKind.F and split < split_before:
                    text = f"{op} comes after sequence split {split_before}; F of a microbatch go first split first"
                elif microbatch == before and kind == OpKind.B and split > split_before:
                    text = f"{op} comes after sequence split {split_before}; B of a microbatch go last split first"
                if text is not None:
                    yield Fault(text, ((rank, position),))
            last[key] = (microbatch, split)


_ORDERED = {
    OpKind.F: (OpKind.F,),
    OpKind.B: (OpKind.B,),
    OpKind.W: (OpKind.W,),
    # A BW takes part in both orders.
    OpKind.BW: (OpKind.B, OpKind.W),
}


def _deadlock(wiring: Wiring) -> Iterator[Fault]:
    """Some order across ranks exists in which every op finds what it needs.

    A program that runs with all messages of a rank in one queue runs with a queue a channel, too: each channel's order is a part
    of the rank's. The weaker question is asked only to say which of the two fails.
    """
    model, error = "compute order", _stuck(wiring, one_queue_a_rank=wiring.schedule.lowered)
    if error is None:
        return
    if wiring.schedule.lowered:
        weaker = _stuck(wiring, one_queue_a_rank=False)
        model = "program with all messages of a rank in one queue" if weaker is None else "program"
        error = weaker or error
    yield Fault(f"deadlock of the {model}: {error}", tuple(sorted(error.blocked.items())))


def _stuck(wiring: Wiring, *, one_queue_a_rank: bool) -> StuckError | None:
    try:
        check_ends(wiring, one_queue_a_rank=one_queue_a_rank)
    except StuckError as error:
        return error
    return None


def _cell(wiring: Wiring, number: int) -> tuple[int, int]:
    rank = wiring.rank[number]
    return rank, number - sum(map(len, wiring.schedule.ranks[:rank]))


def _messages(wiring: Wiring) -> Iterator[Fault]:
    """One SEND and one RECV for each hand-over between two ranks, none for a local one."""
    placement, wanted = wiring.schedule.placement, set()
    remote = [not placement.is_local(stage, stage + 1) for stage in range(placement.num_stages - 1)]
    forward = (wiring.at[OpKind.SEND_FORWARD], wiring.at[OpKind.RECV_FORWARD], wiring.stride)
    backward = (wiring.at[OpKind.SEND_BACKWARD], wiring.at[OpKind.RECV_BACKWARD], -wiring.stride)
    # By kind and stage, where the two ends of the message that an op makes are found; absent where it makes none.
    ends = {(OpKind.F, stage): forward for stage, far in enumerate(remote) if far}
    ends |= {(kind, stage + 1): backward for stage, far in enumerate(remote) if far for kind in (OpKind.B, OpKind.BW)}
    for number, op in enumerate(wiring.ops):
        if (op[0], op[1]) not in ends:
            continue
        sends, recvs, away = ends[op[0], op[1]]
        unit = wiring.unit[number]
        send, recv = sends.get(unit), recvs.get(unit + away)
        if send is None or recv is None:
            message = result_of(op, placement.num_stages)
            missing = message.send(placement) if send is None else message.recv(placement)
            yield Fault(f"{op} makes a message for another rank, but {missing} is missing", (_cell(wiring, number),))
        wanted |= {send, recv}
    for number, op in enumerate(wiring.ops):
        if op[0] in COMMUNICATION and number not in wanted:
            rank = wiring.rank[number]
            yield Fault(
                f"{op} carries nothing: its maker is missing, or both stages are on rank {rank}",
                (_cell(wiring, number),),
            )


def _message_places(wiring: Wiring) -> Iterator[Fault]:
    """A SEND behind its maker, a RECV before its user."""
    for number, found in enumerate(wiring.waits):
        for before in found:
            if before < number:
                continue
            op, other = wiring.ops[number], wiring.ops[before]
            cells = (_cell(wiring, before), _cell(wiring, number))
            if other.kind in RECVS:
                yield Fault(f"{other} is posted after {op}, which uses it", cells)
            elif op.kind in SENDS:
                yield Fault(f"{op} stands before {other}, which makes it", cells[::-1])


def _channel_order(wiring: Wiring) -> Iterator[Fault]:
    """Both ends of a channel name the same messages in the same order."""
    # By (source rank, destination rank), the SENDs in the order of either end.
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    rank_of = wiring.rank
    for number, op in enumerate(wiring.ops):
        if op[0] in SENDS:
            sent[rank_of[number], rank_of[wiring.recv_of[number]]].append(number)
        elif op[0] in RECVS:
            send = wiring.send_of[number]
            received[rank_of[send], rank_of[number]].append(send)
    for (source, destination), sends in sorted(sent.items()):
        for send, other in zip(sends, received[source, destination]):
            if send != other:
                recv = wiring.recv_of[other]
                text = f"channel {source} -> {destination}: {wiring.ops[send]} meets {wiring.ops[recv]}"
                cells = (_cell(wiring, send), _cell(wiring, recv))
                yield Fault(f"{text}; sends and receives of a channel go in one order", cells)


def _posted_receives(wiring: Wiring) -> list[int]:
    posted, most = [0] * wiring.schedule.pp_size, [0] * wiring.schedule.pp_size
    waits = wiring.waits if wiring.schedule.lowered else []
    for number, found in enumerate(waits):
        rank = wiring.rank[number]
        if number in wiring.send_of:
            posted[rank] += 1
            most[rank] = max(most[rank], posted[rank])
        elif found and found[0] in wiring.send_of:
            posted[rank] -= 1
    return most


_TOLERANCE = 1e-9
"""How far, relative to a limit, rounding may carry a schedule over it."""


def _memory(wiring: Wiring, costs: CostModel) -> Iterator[Fault]:
    """Every rank within its limits at every instant, and copies that take a known time."""
    schedule = wiring.schedule
    if wiring.at[OpKind.OFFLOAD_SEND_START] and not (costs.d2h and costs.h2d):
        yield Fault("offloads activations, but its costs have no times of copies: needs both d2h and h2d", ())
    for where, limits, held_on in (
        ("device", costs.device_limit, held_on_device),
        ("host", costs.host_limit, held_on_host),
    ):
        for rank, limit in enumerate(limits or ()):
            yield from _over(schedule, rank, held_on(schedule, rank, costs), where, limit)


def _over(schedule: Schedule, rank: int, changes: list[Held], where: str, limit: float) -> Iterator[Fault]:
    for index, during, after in changes:
        held = max(during, after)
        if held > limit * (1 + _TOLERANCE):
            op = schedule.ranks[rank][index]
            yield Fault(
                f"rank {rank} holds {held:.12g} of {where} memory at {op}, its limit is {limit:.12g}; the smallest limit that "
                f"this order keeps there is {most_held(changes):.12g}",
                ((rank, index),),
            )
