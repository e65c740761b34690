"""CostModel: the times, the memory and the links that a schedule is timed with."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement


@dataclass(frozen=True, kw_only=True)
class Link:
    """Ranks whose copies to and from the host share one link, such as a PCIe switch.

    Raises ValueError on an unknown duplex, on a factor below 1 and on a rank named twice.
    """

    ranks: tuple[int, ...]
    duplex: str = "half"
    """``half``: a rank's copies to and from the host go one after another; ``full``: a queue each way."""
    shared_factor: float = 1.0
    """How many times longer a copy takes while another rank of the link copies, too."""

    def __post_init__(self) -> None:
        if self.duplex not in ("half", "full"):
            raise ValueError(f"link: duplex {self.duplex!r}; known: half, full")
        if not 1 <= self.shared_factor < float("inf"):
            raise ValueError(f"link: shared_factor {self.shared_factor!r}; needs a finite number of at least 1")
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"link: ranks {list(self.ranks)}; needs at least one rank, each once")


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Times and memory of each stage, the time of a message between two ranks, copies to the host, and limits.

    Times share one unit of the caller's choice, memory another. What a stage has is for one whole microbatch; an op of one of s
    sequence splits takes 1/s of it. Raises ValueError on lists of unequal length, on negative or non-finite numbers, on a
    `comm` that is neither a number nor a square matrix, and on a rank with two links.
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
    message: tuple[float, ...] = ()
    """Size of what a stage hands on, and of the gradient that comes back for it, a stage; empty when not known."""
    d2h: tuple[float, ...] = ()
    """Copy of one activation to the host, a stage; empty when nothing is offloaded."""
    h2d: tuple[float, ...] = ()
    """Copy of one activation back, a stage; empty when nothing is offloaded."""
    links: tuple[Link, ...] = ()
    """Which ranks share a link to the host; a rank in none of them has a half-duplex link of its own."""
    device_limit: tuple[float, ...] | None = None
    """Most memory for activations, a rank; None for no limit."""
    host_limit: tuple[float, ...] | None = None
    """Most host memory for offloaded activations, a rank; None for no limit."""

    def __post_init__(self) -> None:
        lists = {name: getattr(self, name) for name in ("f", "b", "w", "r", "memory_b", "memory_w")}
        lists |= {name: getattr(self, name) for name in ("message", "d2h", "h2d") if getattr(self, name)}
        lengths = {name: len(values) for name, values in lists.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"costs: lists must have one entry a stage each, got {lengths} entries")
        if isinstance(self.comm, (int, float)):
            lists["comm"] = (self.comm,)
        elif not all(hasattr(row, "__len__") and len(row) == len(self.comm) for row in self.comm):
            raise ValueError("costs: 'comm' must be one number or a square matrix from rank to rank")
        else:
            lists["comm"] = tuple(time for row in self.comm for time in row)
        lists |= {name: getattr(self, name) or () for name in ("device_limit", "host_limit")}
        for name, values in lists.items():
            _check_numbers(name, values)
        linked = [rank for link in self.links for rank in link.ranks]
        if len(set(linked)) != len(linked):
            raise ValueError(f"costs: a rank has one link to the host, got links of ranks {linked}")

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        *,
        f: float = 1.0,
        b: float = 1.0,
        w: float = 1.0,
        memory_b: float = 1.0,
        memory_w: float = 1.0,
        **others: object,
    ) -> "CostModel":
        """Equal stages: each number is for one microbatch through all of one rank's chunks, of which a chunk takes 1/v.

        `others` are fields of CostModel, taken as they are.
        """

        def each(value: float) -> tuple[float, ...]:
            return (value / placement.chunks_per_rank,) * placement.num_stages

        return cls(
            f=each(f), b=each(b), w=each(w), r=each(f), memory_b=each(memory_b), memory_w=each(memory_w), **others
        )

    def duration(self, op: Op, num_sequence_splits: int = 1) -> float:
        """Time of a compute op, or of the copy that an OFFLOAD_SEND_START or OFFLOAD_RECV_START begins; else 0."""
        stage = op.stage
        if op.kind == OpKind.BW:
            return (self.b[stage] + self.w[stage]) / num_sequence_splits
        times = {
            OpKind.F: self.f,
            OpKind.B: self.b,
            OpKind.W: self.w,
            OpKind.R: self.r,
            OpKind.OFFLOAD_SEND_START: self.d2h,
            OpKind.OFFLOAD_RECV_START: self.h2d,
        }.get(op.kind)
        return times[stage] / num_sequence_splits if times else 0.0

    def check_fits(self, placement: Placement) -> None:
        """Raise ValueError where these costs are for another number of stages or ranks."""
        if len(self.f) != placement.num_stages:
            raise ValueError(f"costs are for {len(self.f)} stages, the schedule has {placement.num_stages}")
        if not isinstance(self.comm, (int, float)) and len(self.comm) != placement.pp_size:
            raise ValueError(f"costs: 'comm' is for {len(self.comm)} ranks, the schedule has {placement.pp_size}")
        for name in ("device_limit", "host_limit"):
            limit = getattr(self, name)
            if limit is not None and len(limit) != placement.pp_size:
                raise ValueError(f"costs: '{name}' is for {len(limit)} ranks, the schedule has {placement.pp_size}")
        beyond = [rank for link in self.links for rank in link.ranks if not 0 <= rank < placement.pp_size]
        if beyond:
            raise ValueError(f"costs: a link names rank {beyond[0]}, the schedule has ranks 0..{placement.pp_size - 1}")

    def message_time(self, source: int, destination: int) -> float:
        """Latency of one message from rank to rank; none within a rank, where stages hand over locally."""
        if source == destination:
            return 0.0
        return self.comm if isinstance(self.comm, (int, float)) else self.comm[source][destination]

    def link_of(self, rank: int) -> Link:
        """The link that a rank's copies go over."""
        return next((link for link in self.links if rank in link.ranks), Link(ranks=(rank,)))


def _check_numbers(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value < float("inf"):
            raise ValueError(f"costs: '{name}' holds {value!r}; times and memory are finite and not negative")
