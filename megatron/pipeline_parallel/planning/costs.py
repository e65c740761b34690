"""CostModel: the times and the memory that a schedule is timed with."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Times and memory of each stage, and the time of a message between two ranks.

    Times share one unit of the caller's choice, memory another. Raises ValueError on lists of unequal length, on negative
    or non-finite numbers, and on a `comm` that is neither a number nor a square matrix.
    """

    f: tuple[float, ...]
    """Forward, a stage."""
    b: tuple[float, ...]
    """Input gradient, a stage."""
    w: tuple[float, ...]
    """Weight gradient, a stage."""
    r: tuple[float, ...]
    """Recompute, a stage."""
    comm: float | tuple[tuple[float, ...], ...] = 0.0
    """Latency of one message: one number, or a matrix from rank to rank."""
    memory_b: tuple[float, ...]
    """Held from the start of F to the end of B, a stage."""
    memory_w: tuple[float, ...]
    """Held from the end of B to the end of W, a stage; neither of the two bounds the other."""

    def __post_init__(self) -> None:
        lists = {name: getattr(self, name) for name in ("f", "b", "w", "r", "memory_b", "memory_w")}
        lengths = {name: len(values) for name, values in lists.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"costs: lists must have one entry a stage each, got {lengths} entries")
        for name, values in lists.items():
            _check_numbers(name, values)
        if not isinstance(self.comm, (int, float)):
            if not all(hasattr(row, "__len__") and len(row) == len(self.comm) for row in self.comm):
                raise ValueError("costs: 'comm' must be one number or a square matrix from rank to rank")
            for row in self.comm:
                _check_numbers("comm", row)
        else:
            _check_numbers("comm", [self.comm])

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        *,
        f: float = 1.0,
        b: float = 1.0,
        w: float = 1.0,
        comm: float = 0.0,
        memory_b: float = 1.0,
        memory_w: float = 1.0,
    ) -> "CostModel":
        """Equal stages: each number is for one microbatch through all of one rank's chunks, of which a chunk takes 1/v."""

        def each(value: float) -> tuple[float, ...]:
            return (value / placement.chunks_per_rank,) * placement.num_stages

        return cls(
            f=each(f), b=each(b), w=each(w), r=each(f), comm=comm, memory_b=each(memory_b), memory_w=each(memory_w)
        )

    def duration(self, op: Op) -> float:
        """Time of a compute op; every other op takes no time of the compute stream."""
        if op.kind == OpKind.BW:
            return self.b[op.stage] + self.w[op.stage]
        times = {OpKind.F: self.f, OpKind.B: self.b, OpKind.W: self.w, OpKind.R: self.r}.get(op.kind)
        return times[op.stage] if times else 0.0

    def check_fits(self, placement: Placement) -> None:
        """Raise ValueError where these costs are for another number of stages or ranks."""
        if len(self.f) != placement.num_stages:
            raise ValueError(f"costs are for {len(self.f)} stages, the schedule has {placement.num_stages}")
        if not isinstance(self.comm, (int, float)) and len(self.comm) != placement.pp_size:
            raise ValueError(f"costs: 'comm' is for {len(self.comm)} ranks, the schedule has {placement.pp_size}")

    def message_time(self, source: int, destination: int) -> float:
        """Latency of one message from rank to rank."""
        return self.comm if isinstance(self.comm, (int, float)) else self.comm[source][destination]


def _check_numbers(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value < float("inf"):
            raise ValueError(f"costs: '{name}' holds {value!r}; times and memory are finite and not negative")
