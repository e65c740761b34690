"""The schedule as data: `OpKind`, `Op`, `Placement`, `Schedule`.

An op prints as ``F 3.1 mb5 s0`` (kind, stage.chunk, microbatch, sequence split) and parses back; so does a whole schedule.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class OpKind(str, Enum):
    """What an op does; the value is the word that is printed."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    R = "R"
    SEND_FORWARD = "SEND_FORWARD"
    RECV_FORWARD = "RECV_FORWARD"
    SEND_BACKWARD = "SEND_BACKWARD"
    RECV_BACKWARD = "RECV_BACKWARD"
    OFFLOAD_SEND_START = "OFFLOAD_SEND_START"
    OFFLOAD_SEND_END = "OFFLOAD_SEND_END"
    OFFLOAD_RECV_PREP = "OFFLOAD_RECV_PREP"
    OFFLOAD_RECV_START = "OFFLOAD_RECV_START"
    OFFLOAD_RECV_END = "OFFLOAD_RECV_END"

    # Ops are hashed by the hundred thousand; Enum's own hash is a Python function, str's is not.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.value


COMPUTE = frozenset({OpKind.F, OpKind.B, OpKind.W, OpKind.BW, OpKind.R})
SENDS = frozenset({OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD})
RECVS = frozenset({OpKind.RECV_FORWARD, OpKind.RECV_BACKWARD})
COMMUNICATION = SENDS | RECVS
COPIES = frozenset({OpKind.OFFLOAD_SEND_START, OpKind.OFFLOAD_RECV_START})
"""Ops that start a copy between device and host."""
OFFLOAD = frozenset(kind for kind in OpKind if kind.startswith("OFFLOAD_"))


class Op(NamedTuple):
    """One step of one rank's program.

    `stage` and `chunk` are where the op runs. A SEND is named by the stage that made the message, a RECV by the stage
    that uses it: ``SEND_FORWARD 0.0 mb2 s0`` pairs with ``RECV_FORWARD 1.0 mb2 s0``.
    `saves_activation` is False for a forward whose activation is thrown away for a later R.
    """

    kind: OpKind
    stage: int
    chunk: int
    microbatch: int
    sequence_split: int = 0
    saves_activation: bool = True

    def __str__(self) -> str:
        mark = "" if self.saves_activation else " discard"
        return f"{self.kind} {self.stage}.{self.chunk} mb{self.microbatch} s{self.sequence_split}{mark}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """The op that prints as `text`; ValueError says which part is wrong."""
        words = text.split()
        discard = len(words) == 5 and words[4] == "discard"
        if len(words) != 4 and not discard:
            raise ValueError(f"op {text!r}: expected 'KIND STAGE.CHUNK mbMICROBATCH sSPLIT', such as 'F 3.1 mb5 s0'")
        kind, place, microbatch, split = words[:4]
        if kind not in OpKind.__members__:
            raise ValueError(f"op {text!r}: unknown kind {kind!r}; known: {', '.join(OpKind.__members__)}")
        stage, dot, chunk = place.partition(".")
        numbers = (stage, chunk, microbatch.removeprefix("mb"), split.removeprefix("s"))
        well_formed = dot and microbatch.startswith("mb") and split.startswith("s")
        if not (well_formed and all(number.isascii() and number.isdigit() for number in numbers)):
            raise ValueError(f"op {text!r}: expected 'KIND STAGE.CHUNK mbMICROBATCH sSPLIT', such as 'F 3.1 mb5 s0'")
        return cls(OpKind(kind), *map(int, numbers), not discard)

    @property
    def unit(self) -> tuple[int, int, int]:
        """(stage, microbatch, sequence split): what all ops on one activation share."""
        return self.stage, self.microbatch, self.sequence_split


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which rank and chunk each stage lives on; stages are counted in the order of the dataflow.

    Raises ValueError unless every (rank, chunk) of `pp_size` ranks times `chunks_per_rank` chunks holds exactly one stage,
    and unless `name` is one word.
    """

    name: str
    stages: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.name.split() != [self.name]:
            raise ValueError(f"placement: its name must be one word, got {self.name!r}")
        if not self.stages:
            raise ValueError("placement: needs at least one stage")
        wanted = [(rank, chunk) for rank in range(self.pp_size) for chunk in range(self.chunks_per_rank)]
        if sorted(self.stages) != wanted:
            raise ValueError(
                f"placement {self.name!r}: stages {list(self.stages)} do not fill ranks 0..{self.pp_size - 1} x chunks "
                f"0..{self.chunks_per_rank - 1} exactly once each"
            )

    @classmethod
    def loop(cls, pp_size: int, chunks_per_rank: int = 1) -> "Placement":
        """Stage s on rank s % p, chunk s // p: Megatron's (virtual) pipeline."""
        return cls(name="loop", stages=tuple((s % pp_size, s // pp_size) for s in range(pp_size * chunks_per_rank)))

    @classmethod
    def v(cls, pp_size: int) -> "Placement":
        """Two chunks a rank: down the ranks with chunk 0, back up with chunk 1 (arXiv 2405.15362)."""
        down = [(rank, 0) for rank in range(pp_size)]
        return cls(name="v", stages=tuple(down + [(rank, 1) for rank in reversed(range(pp_size))]))

    @cached_property
    def pp_size(self) -> int:
        return 1 + max(rank for rank, _ in self.stages)

    @cached_property
    def chunks_per_rank(self) -> int:
        return 1 + max(chunk for _, chunk in self.stages)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def rank_of(self, stage: int) -> int:
        return self.stages[stage][0]

    def chunk_of(self, stage: int) -> int:
        return self.stages[stage][1]

    @cached_property
    def _stage_at(self) -> dict[tuple[int, int], int]:
        return {place: stage for stage, place in enumerate(self.stages)}

    def stage_at(self, rank: int, chunk: int) -> int:
        return self._stage_at[rank, chunk]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, by chunk."""
        return tuple(self._stage_at[rank, chunk] for chunk in range(self.chunks_per_rank))

    def is_local(self, stage: int, other: int) -> bool:
        """True when both stages share a rank, so that what passes between them needs no message."""
        return self.stages[stage][0] == self.stages[other][0]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What every rank does, in order.

    `ranks[i]` is the program of rank i in issue order. With `lowered` False it holds compute ops only and messages are
    implied; the communication pass makes them explicit and sets `lowered`. Raises ValueError unless `name` fits one line.
    """

    name: str
    placement: Placement
    num_microbatches: int
    num_sequence_splits: int = 1
    ranks: tuple[tuple[Op, ...], ...]
    lowered: bool = False

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name.splitlines()) != 1:
            raise ValueError(f"schedule: its name must fit one line, got {self.name!r}")

    @property
    def pp_size(self) -> int:
        return self.placement.pp_size

    def with_ranks(self, ranks: Iterable[Iterable[Op]], **changes: object) -> "Schedule":
        """The same schedule with other programs."""
        return replace(self, ranks=tuple(tuple(ops) for ops in ranks), **changes)

    def to_text(self) -> str:
        """The whole schedule as text that `from_text` reads back."""
        head = [
            f"schedule {self.name}",
            f"placement {self.placement.name} " + " ".join(f"{rank},{chunk}" for rank, chunk in self.placement.stages),
            f"microbatches {self.num_microbatches}",
            f"sequence_splits {self.num_sequence_splits}",
            f"lowered {int(self.lowered)}",
        ]
        return "\n".join(head + ["rank " + "; ".join(map(str, ops)) for ops in self.ranks]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """Read `to_text` back; ValueError names the line that is wrong. The result is not validated."""
        lines = text.splitlines()
        fields = dict(_head_line(lines, number, word) for number, word in enumerate(_HEAD))
        placement_name, *places = fields["placement"].split()
        try:
            stages = tuple((int(rank), int(chunk)) for rank, chunk in (place.split(",") for place in places))
            numbers = {word: int(fields[word]) for word in ("microbatches", "sequence_splits", "lowered")}
        except ValueError as error:
            raise ValueError(
                f"schedule text: a number is missing or malformed in its first {len(_HEAD)} lines: {error}"
            ) from None
        programs = [_program(line, number) for number, line in enumerate(lines[len(_HEAD) :], len(_HEAD) + 1)]
        return cls(
            name=fields["schedule"],
            placement=Placement(name=placement_name, stages=stages),
            num_microbatches=numbers["microbatches"],
            num_sequence_splits=numbers["sequence_splits"],
            ranks=tuple(programs),
            lowered=bool(numbers["lowered"]),
        )

    @cached_property
    def digest(self) -> str:
        """A hash of everything above: two ranks with equal digests run the same plan."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()


_HEAD = ("schedule", "placement", "microbatches", "sequence_splits", "lowered")


def _head_line(lines: Sequence[str], number: int, word: str) -> tuple[str, str]:
    line = lines[number] if number < len(lines) else ""
    key, _, value = line.partition(" ")
    if key != word or not value.strip():
        raise ValueError(f"schedule text, line {number + 1}: expected '{word} ...', got {line!r}")
    return word, value.strip()


def _program(line: str, number: int) -> tuple[Op, ...]:
    word, _, rest = line.partition(" ")
    if word != "rank":
        raise ValueError(f"schedule text, line {number}: expected 'rank OP; OP; ...', got {line!r}")
    try:
        return tuple(Op.parse(text) for text in rest.split(";") if text.strip())
    except ValueError as error:
        raise ValueError(f"schedule text, line {number}: {error}") from None
