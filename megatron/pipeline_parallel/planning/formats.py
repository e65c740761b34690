"""Schedule files: JSON with times and costs, written and read; and the text of `Schedule.to_text`, read.

A file may come from anyone: what is wrong with it is said in one line that names the key. What can be recomputed from order
and costs (times, streams, waits, the summary) is written for the reader's convenience and never believed.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from math import isclose
from typing import Any, NamedTuple, NoReturn

from megatron.pipeline_parallel.planning.costs import CostModel, Link
from megatron.pipeline_parallel.planning.dataflow import waits_for
from megatron.pipeline_parallel.planning.op import COMMUNICATION, Op, OpKind, Placement, Schedule
from megatron.pipeline_parallel.planning.timeline import Slot, Timeline

FORMAT = "megatron-pipeline-schedule"
VERSION = 1

MAX_OPS = 4_000_000
"""Most ops that the command line plans and reads: with their times they take some gigabytes."""

_PER_STAGE = ("f", "b", "w", "r", "d2h", "h2d", "memory_b", "memory_w")
_LIMITS = ("device", "host")


class ScheduleFile(NamedTuple):
    """What a file says: a schedule that is not validated yet, and in JSON the costs and the summary that it was written with."""

    schedule: Schedule
    costs: CostModel | None = None
    summary: dict[str, Any] | None = None


# ---- writing


def to_json(timeline: Timeline, bound: tuple[float, str]) -> str:
    """A timed schedule as JSON, one op a line. `bound` is a lower bound on its makespan and what that holds for."""
    schedule, costs = timeline.schedule, timeline.costs
    head = {
        "format": FORMAT,
        "version": VERSION,
        "schedule": schedule.name,
        "placement": schedule.placement.name,
        "stages": schedule.placement.stages,
        "pp_size": schedule.pp_size,
        "chunks_per_rank": schedule.placement.chunks_per_rank,
        "microbatches": schedule.num_microbatches,
        "sequence_splits": schedule.num_sequence_splits,
        "costs": _costs_out(costs),
    }
    if schedule.lowered and not _has_messages(schedule.ranks):
        # A reader sees by the messages that a program has them; one that needs none has to say it.
        head["lowered"] = True
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines.append(f'"ranks": [\n{_ranks_out(timeline)}\n]')
    lines.append(f'"summary": {json.dumps(summary(timeline, bound))}')
    return "{" + ",\n ".join(lines) + "}\n"


def summary(timeline: Timeline, bound: tuple[float, str]) -> dict[str, Any]:
    """The figures of a timed schedule: times in its costs' unit, `peak` a rank in microbatches through all of the rank's chunks."""
    return {
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        "span_bubble_rate": timeline.span_bubble_rate,
        "peak": [timeline.peak(rank) for rank in range(timeline.schedule.pp_size)],
        "lower_bound": bound[0],
        "lower_bound_holds_for": bound[1],
    }


def op_id(op: Op) -> str:
    """How a file names an op, such as ``F 3.1 mb5 s0``."""
    return f"{op.kind.value} {op.stage}.{op.chunk} mb{op.microbatch} s{op.sequence_split}"


def _costs_out(costs: CostModel) -> dict[str, Any]:
    out: dict[str, Any] = {name: getattr(costs, name) for name in ("f", "b", "w", "r", "comm", *_PER_STAGE[4:])}
    if costs.message:
        out["message"] = costs.message
    out["links"] = [asdict(link) for link in costs.links]
    out["limits"] = {name: getattr(costs, f"{name}_limit") for name in _LIMITS}
    return out


def _ranks_out(timeline: Timeline) -> str:
    waits = waits_for(timeline.schedule)
    return ",\n".join(
        " [" + ",\n  ".join(map(_op_out, slots, rank_waits)) + "]" for slots, rank_waits in zip(timeline.slots, waits)
    )


def _op_out(slot: Slot, waits: Sequence[Op]) -> str:
    op = slot.op
    entry = {
        "id": op_id(op),
        "op": op.kind.value,
        "stage": op.stage,
        "chunk": op.chunk,
        "microbatch": op.microbatch,
        "sequence_split": op.sequence_split,
    }
    if not op.saves_activation:
        entry["saves_activation"] = False
    entry |= {"stream": slot.stream, "start": slot.start, "end": slot.end, "waits_for": list(map(op_id, waits))}
    return json.dumps(entry)


def _has_messages(ranks: Iterable[Iterable[Op]]) -> bool:
    return any(op.kind in COMMUNICATION for ops in ranks for op in ops)


# ---- reading


def read_schedule(text: str) -> tuple[Schedule, CostModel | None]:
    """A schedule from JSON or text, with its costs where the file has them. ValueError as from `read_file`."""
    return read_file(text)[:2]


def from_json(text: str) -> tuple[Schedule, CostModel]:
    """The schedule and the costs of a JSON export. ValueError, in one line, names the key or the place that is wrong."""
    return _from_json(text)[:2]


def read_file(text: str) -> ScheduleFile:
    """What a schedule file says, JSON or text told apart by its first characters.

    The schedule is not validated. ValueError is one line and names the key or line that is wrong.
    """
    start = text.lstrip()
    if not start:
        raise ValueError("the file is empty: it needs a schedule, as JSON or as text")
    if start[0] in "{[":
        return _from_json(text)
    if re.match(r",*\d+[A-Z]", start):
        raise ValueError("this is PyTorch's CSV of a schedule, which is not built yet: give JSON or text")
    if not start.startswith("schedule "):
        raise ValueError(
            f"the file begins with {start[:20]!r}: a schedule is JSON ('{{\"format\": ...') or text ('schedule NAME')"
        )
    return ScheduleFile(_from_text(text))


def summary_differences(claimed: dict[str, Any], timeline: Timeline) -> list[str]:
    """What a file's summary says other than its order and costs do, a line each; the bound aside.

    Figures that agree to nine digits are equal: another program may add up in another order.
    """
    true = summary(timeline, (0.0, ""))
    texts = []
    for key in ("makespan", "bubble_rate", "span_bubble_rate", "peak"):
        if key in claimed and not _agree(claimed[key], true[key]):
            texts.append(f"summary.{key} is {_shown(claimed[key])}, order and costs give {_shown(true[key])}")
    bound = claimed.get("lower_bound", 0.0)
    if not _is_number(bound) or bound > timeline.makespan * (1 + 1e-9):
        texts.append(f"summary.lower_bound is {_shown(bound)}, above the makespan {timeline.makespan!r}")
    return texts


def check_places(stages: Sequence[tuple[int, int]], what: str) -> None:
    """Raise ValueError where a stage's rank or chunk is beyond what so many stages can fill.

    A Placement tells that, too, but only by counting up to the largest.
    """
    for stage, (rank, chunk) in enumerate(stages):
        if not (0 <= rank < len(stages) and 0 <= chunk < len(stages)):
            raise ValueError(
                f"{what}[{stage}] is rank {rank}, chunk {chunk}: {len(stages)} stages fill ranks and chunks from 0, one each"
            )


def _agree(claimed: Any, true: Any) -> bool:
    if isinstance(true, list):
        return isinstance(claimed, list) and len(claimed) == len(true) and all(map(_agree, claimed, true))
    return _is_number(claimed) and isclose(claimed, true, rel_tol=1e-9, abs_tol=1e-9)


def _from_text(text: str) -> Schedule:
    lines = text.lstrip().splitlines()
    places = lines[1].split()[2:] if len(lines) > 1 else []
    if all(re.fullmatch(r"\d{1,9},\d{1,9}", place) for place in places):
        check_places([tuple(map(int, place.split(","))) for place in places], "schedule text, line 2: stages")
    schedule = Schedule.from_text(text.lstrip())
    _check_size(schedule.placement.num_stages, schedule.num_microbatches, schedule.num_sequence_splits)
    return schedule


def _check_size(num_stages: int, num_microbatches: int, num_sequence_splits: int) -> None:
    ops = num_stages * max(num_microbatches, 1) * max(num_sequence_splits, 1)
    if ops > MAX_OPS:
        raise ValueError(
            f"{num_microbatches} microbatches and {num_sequence_splits} sequence splits on {num_stages} stages are "
            f"{ops} forwards: at most {MAX_OPS} ops are read"
        )


def _from_json(text: str) -> ScheduleFile:
    data = _load(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"key 'format' is {_shown(data.get('format'))}, needs {FORMAT!r}")
    if type(_get(data, "version")) is not int or data["version"] != VERSION:
        raise ValueError(f"key 'version' is {_shown(data['version'])}: this program reads version {VERSION}")
    placement = _placement_in(data)
    sizes = {name: _whole(_get(data, name), name, 1) for name in ("microbatches", "sequence_splits")}
    _check_size(placement.num_stages, *sizes.values())
    costs = _costs_in(_typed(_get(data, "costs"), dict, "costs"), placement.pp_size)
    costs.check_fits(placement)
    ranks = _ranks_in(_typed(_get(data, "ranks"), list, "ranks"), placement)
    lowered = _typed(data.get("lowered", False), bool, "lowered") or _has_messages(ranks)
    schedule = Schedule(
        name=_typed(_get(data, "schedule"), str, "schedule"),
        placement=placement,
        num_microbatches=sizes["microbatches"],
        num_sequence_splits=sizes["sequence_splits"],
        ranks=ranks,
        lowered=lowered,
    )
    return ScheduleFile(schedule, costs, _typed(data.get("summary", {}), dict, "summary"))


def _load(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg}, line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    return _typed(data, dict, "the file")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {_shown(twice)} stands twice in one object")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} stands for a number: all numbers must be finite")


def _placement_in(data: dict[str, Any]) -> Placement:
    stages = []
    for number, place in enumerate(_typed(_get(data, "stages"), list, "stages")):
        key = f"stages[{number}]"
        if len(_typed(place, list, key)) != 2:
            raise ValueError(f"{key} is {_shown(place)}, needs [rank, chunk]")
        stages.append((_whole(place[0], key), _whole(place[1], key)))
    check_places(stages, "stages")
    placement = Placement(name=_typed(_get(data, "placement"), str, "placement"), stages=tuple(stages))
    for key in ("pp_size", "chunks_per_rank"):
        if _whole(_get(data, key), key) != getattr(placement, key):
            raise ValueError(f"key {key!r} is {data[key]}, but 'stages' has {getattr(placement, key)}")
    return placement


def _costs_in(data: dict[str, Any], pp_size: int) -> CostModel:
    _no_others(data, (*_PER_STAGE, "comm", "message", "links", "limits"), "costs")
    values: dict[str, Any] = {name: _numbers(_get(data, name, "costs."), f"costs.{name}") for name in _PER_STAGE}
    if "message" in data:
        values["message"] = _numbers(data["message"], "costs.message")
    values["comm"] = _comm_in(_get(data, "comm", "costs."))
    links = _typed(_get(data, "links", "costs."), list, "costs.links")
    values["links"] = tuple(_link_in(link, f"costs.links[{number}]") for number, link in enumerate(links))
    limits = _typed(_get(data, "limits", "costs."), dict, "costs.limits")
    _no_others(limits, _LIMITS, "costs.limits")
    for name in _LIMITS:
        values[f"{name}_limit"] = _limit_in(_get(limits, name, "costs.limits."), f"costs.limits.{name}", pp_size)
    return CostModel(**values)


def _comm_in(value: Any) -> float | tuple[tuple[float, ...], ...]:
    if not isinstance(value, list):
        return _number(value, "costs.comm")
    return tuple(_numbers(row, f"costs.comm[{number}]") for number, row in enumerate(value))


def _link_in(value: Any, key: str) -> Link:
    data = _typed(value, dict, key)
    known = [field.name for field in fields(Link)]
    _no_others(data, known, key)
    ranks, duplex, factor = (_get(data, name, f"{key}.") for name in known)
    return Link(
        ranks=tuple(_whole(rank, f"{key}.ranks") for rank in _typed(ranks, list, f"{key}.ranks")),
        duplex=_typed(duplex, str, f"{key}.duplex"),
        shared_factor=_number(factor, f"{key}.shared_factor"),
    )


def _limit_in(value: Any, key: str, pp_size: int) -> tuple[float, ...] | None:
    """None, a number a rank, or one number for every rank."""
    if value is None:
        return None
    return _numbers(value, key) if isinstance(value, list) else (_number(value, key),) * pp_size


def _ranks_in(programs: list[Any], placement: Placement) -> tuple[tuple[Op, ...], ...]:
    num_ops = sum(len(program) for program in programs if isinstance(program, list))
    if num_ops > MAX_OPS:
        raise ValueError(f"'ranks' holds {num_ops} ops: at most {MAX_OPS} are read")
    return tuple(
        tuple(
            _op_in(entry, f"ranks[{rank}][{number}]", placement)
            for number, entry in enumerate(_typed(program, list, f"ranks[{rank}]"))
        )
        for rank, program in enumerate(programs)
    )


def _op_in(entry: Any, key: str, placement: Placement) -> Op:
    _no_others(_typed(entry, dict, key), _OP_KEYS, key)
    kind, *numbers = (_get(entry, name, f"{key}.") for name in _OP_NEEDS)
    if not isinstance(kind, str) or kind not in OpKind.__members__:
        raise ValueError(f"{key}.op is {_shown(kind)}; known: {', '.join(OpKind.__members__)}")
    numbers = [_whole(number, f"{key}.{name}") for number, name in zip(numbers, _OP_NEEDS[1:])]
    saves = _typed(entry.get("saves_activation", True), bool, f"{key}.saves_activation")
    op = Op(OpKind[kind], *numbers, saves)
    if op.stage >= placement.num_stages:
        raise ValueError(f"{key}.stage is {op.stage}: there are stages 0..{placement.num_stages - 1}")
    if entry.get("id", op_id(op)) != op_id(op):
        raise ValueError(f"{key}.id is {_shown(entry['id'])}, but the op beside it is {op_id(op)!r}")
    return op


_OP_NEEDS = ("op", "stage", "chunk", "microbatch", "sequence_split")
_OP_KEYS = frozenset((*_OP_NEEDS, "id", "saves_activation", "stream", "start", "end", "waits_for"))


# ---- values of a file, checked


def _get(data: dict[str, Any], key: str, within: str = "") -> Any:
    if key not in data:
        raise ValueError(f"key '{within}{key}' is missing")
    return data[key]


def _no_others(data: dict[str, Any], known: Iterable[str], what: str) -> None:
    """Refuse keys that nothing here reads, since a misspelled one would change what the file means."""
    for key in sorted(data.keys() - set(known)):
        raise ValueError(f"{what} has the unknown key {_shown(key)}; known: {', '.join(sorted(known))}")


def _typed(value: Any, kind: type, key: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{key} is {_shown(value)}, needs {_KINDS[kind]}")
    return value


_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any, key: str) -> float:
    if not _is_number(value):
        raise ValueError(f"{key} is {_shown(value)}, needs a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{key} is too large a number") from None


def _numbers(value: Any, key: str) -> tuple[float, ...]:
    return tuple(_number(item, f"{key}[{place}]") for place, item in enumerate(_typed(value, list, key)))


_MOST = 10**9
"""Counts above it are mistakes, and numbers of thousands of digits do not print."""


def _whole(value: Any, key: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError(f"{key} is {_shown(value)}, needs a whole number from {least} to {_MOST}")
    return value


def _shown(value: Any) -> str:
    """A value of a file, short enough for a line of text."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
