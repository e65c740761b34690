"""An independent simulator: one clock for everything, moved from event to event; slow, and simple to believe."""

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Op, OpKind, Schedule

SENDS = (OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD)
RECVS = (OpKind.RECV_FORWARD, OpKind.RECV_BACKWARD)
COPIES = (OpKind.OFFLOAD_SEND_START, OpKind.OFFLOAD_RECV_START)


def times_of(schedule: Schedule, costs: CostModel) -> dict[Op, tuple[float, float]]:
    """(start, end) of every op, where a SEND ends when it departs and a RECV when it is posted."""
    return _Clock(schedule, costs).run()


class _Clock:
    def __init__(self, schedule: Schedule, costs: CostModel) -> None:
        self.schedule, self.costs, self.now = schedule, costs, 0.0
        self.streams: dict[tuple, list[Op]] = {}
        self.ops = {op for ops in schedule.ranks for op in ops}
        self.issued_after: dict[Op, Op] = {}
        for rank, ops in enumerate(schedule.ranks):
            for op in ops:
                stream = self.stream(rank, op)
                compute = self.streams.get((rank, "compute"))
                if stream != (rank, "compute") and compute:
                    self.issued_after[op] = compute[-1]
                self.streams.setdefault(stream, []).append(op)
        self.start: dict[Op, float] = {}
        self.end: dict[Op, float] = {}
        self.running: dict[Op, float] = {}

    def stream(self, rank: int, op: Op) -> tuple:
        if op.kind in SENDS:
            return rank, "to", self.rank(op.stage + (1 if op.kind == OpKind.SEND_FORWARD else -1))
        if op.kind in COPIES:
            return rank, "copy", op.kind if self.costs.link_of(rank).duplex == "full" else "both"
        return rank, "compute"

    def rank(self, stage: int) -> int:
        return self.schedule.placement.rank_of(stage)

    def other(self, op: Op, *kinds: OpKind, stage: int | None = None) -> Op | None:
        """The op of one of `kinds` on the same microbatch and split, if there is one."""
        stage = op.stage if stage is None else stage
        chunk = self.schedule.placement.chunk_of(stage)
        found = [Op(kind, stage, chunk, op.microbatch, op.sequence_split) for kind in kinds]
        return next((op for op in found if op in self.ops), None)

    def ready_at(self, op: Op) -> float:
        """When all that it needs is there; infinity while that is not known."""
        return max((self.end.get(need, float("inf")) + lag for need, lag in self.needs(op)), default=0.0)

    def needs(self, op: Op) -> list[tuple[Op, float]]:
        if op.kind in SENDS:
            forward = op.kind == OpKind.SEND_FORWARD
            recv = self.other(op, RECVS[0] if forward else RECVS[1], stage=op.stage + (1 if forward else -1))
            return [(recv, 0.0), (self.issued_after[op], 0.0)]
        if op.kind == OpKind.OFFLOAD_SEND_START:
            return [(self.other(op, OpKind.F), 0.0)]
        if op.kind == OpKind.OFFLOAD_RECV_START:
            return [(self.other(op, kind), 0.0) for kind in (OpKind.OFFLOAD_SEND_START, OpKind.OFFLOAD_RECV_PREP)]
        if op.kind == OpKind.OFFLOAD_SEND_END:
            return [(self.other(op, OpKind.OFFLOAD_SEND_START), 0.0)]
        if op.kind == OpKind.OFFLOAD_RECV_END:
            return [(self.other(op, OpKind.OFFLOAD_RECV_START), 0.0)]
        if op.kind == OpKind.F and op.stage > 0:
            return [self.handed_over(op, op.stage - 1, SENDS[0], OpKind.F)]
        if op.kind in (OpKind.B, OpKind.BW):
            copy = self.other(op, OpKind.OFFLOAD_RECV_START)
            needs = [] if copy is None else [(copy, 0.0)]
            if op.stage + 1 < self.schedule.placement.num_stages:
                needs.append(self.handed_over(op, op.stage + 1, SENDS[1], OpKind.B, OpKind.BW))
            return needs
        return []

    def handed_over(self, op: Op, stage: int, send: OpKind, *makers: OpKind) -> tuple[Op, float]:
        maker = self.other(op, *makers, stage=stage)
        source, destination = self.rank(stage), self.rank(op.stage)
        if source == destination:
            return maker, 0.0
        return self.other(op, send, stage=stage) or maker, self.costs.message_time(source, destination)

    def slowness(self, op: Op) -> float:
        rank = self.rank(op.stage)
        link = self.costs.link_of(rank)
        for other in self.running:
            shares = other.kind in COPIES and self.rank(other.stage) in link.ranks and self.rank(other.stage) != rank
            if op.kind in COPIES and shares and (link.duplex == "half" or other.kind == op.kind):
                return link.shared_factor
        return 1.0

    def run(self) -> dict[Op, tuple[float, float]]:
        while len(self.end) < len(self.ops):
            while any([self.begin(ops) for ops in self.streams.values()]):
                pass
            rates = {op: 1 / self.slowness(op) for op in self.running}
            events = [self.now + left / rates[op] for op, left in self.running.items()]
            events += [self.ready_at(ops[0]) for ops in self.streams.values() if ops and ops[0] not in self.running]
            events = [time for time in events if time < float("inf")]
            if not events and len(self.end) < len(self.ops):
                raise RuntimeError("stuck")
            if events:
                self.move(min(events), rates)
        return {op: (self.start[op], self.end[op]) for op in self.ops}

    def begin(self, ops: list[Op]) -> bool:
        """Begin the first op of a stream if it can."""
        if not ops or ops[0] in self.running or self.ready_at(ops[0]) > self.now:
            return False
        self.start[ops[0]] = self.now
        time = self.costs.duration(ops[0], self.schedule.num_sequence_splits)
        if time:
            self.running[ops[0]] = time
        else:
            self.end[ops.pop(0)] = self.now
        return True

    def move(self, then: float, rates: dict[Op, float]) -> None:
        for op in list(self.running):
            self.running[op] -= (then - self.now) * rates[op]
            if self.running[op] < 1e-9:
                del self.running[op]
                self.end[op] = then
                next(ops for ops in self.streams.values() if ops and ops[0] == op).pop(0)
        self.now = then
