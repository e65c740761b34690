"""A checker of compute orders that shares no code with the validator and the simulator, to judge both by."""

from itertools import accumulate

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Op, Schedule


class Broken(Exception):
    """The order is no training schedule; the text says why."""


def check(schedule: Schedule, costs: CostModel) -> tuple[float, list[float]]:
    """(makespan, peak memory a rank) of a compute order of F, B, W, BW that saves every activation; raises Broken."""
    _check_places(schedule)
    return max(_ends(schedule, costs).values()), [_peak(ops, costs, schedule) for ops in schedule.ranks]


def _check_places(schedule: Schedule) -> None:
    """Each op once, on its rank, and each stage's microbatches in order."""
    kinds: dict[tuple, list[str]] = {}
    turns: dict[tuple, list[tuple[int, int]]] = {}
    for rank, ops in enumerate(schedule.ranks):
        for op in ops:
            if schedule.placement.stages[op.stage] != (rank, op.chunk):
                raise Broken(f"{op} on rank {rank}")
            kinds.setdefault(op.unit, []).append(op.kind.value)
            for letter in op.kind.value:
                # Forward the splits of a microbatch go first to last, backward last to first; W in any order.
                turn = {"F": op.sequence_split, "B": -op.sequence_split, "W": 0}[letter]
                turns.setdefault((letter, op.stage), []).append((op.microbatch, turn))
    wanted = schedule.placement.num_stages * schedule.num_microbatches * schedule.num_sequence_splits
    if len(kinds) != wanted or any(sorted(found) not in (["B", "F", "W"], ["BW", "F"]) for found in kinds.values()):
        raise Broken("an op is missing or stands twice")
    for (letter, stage), turn in turns.items():
        if turn != sorted(turn):
            raise Broken(f"{letter} of stage {stage} out of order: {turn}")


def _ends(schedule: Schedule, costs: CostModel) -> dict[tuple, float]:
    """When each op ends, by passing over the ranks until nothing more can start."""
    ends: dict[tuple, float] = {}
    position, clock = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ranks):
            while position[rank] < len(ops):
                op = ops[position[rank]]
                arrivals = _arrivals(op, rank, schedule, costs, ends)
                if None in arrivals:
                    break
                clock[rank] = max([clock[rank], *arrivals]) + _time(op, costs) / schedule.num_sequence_splits
                # A BW makes what a B makes.
                ends[op.kind.value[0], op.unit] = clock[rank]
                position[rank] += 1
                moved = True
    if position != [len(ops) for ops in schedule.ranks]:
        raise Broken(f"stuck at {position}")
    return ends


def _time(op: Op, costs: CostModel) -> float:
    return sum({"F": costs.f, "B": costs.b, "W": costs.w}[letter][op.stage] for letter in op.kind.value)


def _arrivals(op: Op, rank: int, schedule: Schedule, costs: CostModel, ends: dict[tuple, float]) -> list[float | None]:
    """When each thing that an op needs is there; None for what has not been made yet."""
    letter, (stage, *rest) = op.kind.value[0], op.unit
    arrivals = [ends.get((made, op.unit)) for made in {"F": "", "B": "F", "W": "B"}[letter]]
    source_stage = {"F": stage - 1, "B": stage + 1, "W": -1}[letter]
    if 0 <= source_stage < schedule.placement.num_stages:
        source = schedule.placement.rank_of(source_stage)
        made = ends.get((letter, (source_stage, *rest)))
        message = 0.0 if source == rank else costs.message_time(source, rank)
        arrivals.append(None if made is None else made + message)
    return arrivals


def _peak(ops: tuple[Op, ...], costs: CostModel, schedule: Schedule) -> float:
    """Most memory over the positions of a rank's order: memory_b from F through B, memory_w from there through W."""
    change = [0.0] * (len(ops) + 1)
    for position, op in enumerate(ops):
        memory_b, memory_w = costs.memory_b[op.stage], costs.memory_w[op.stage]
        changes = {"F": memory_b, "B": memory_w - memory_b, "W": -memory_w, "BW": -memory_b}
        change[position + (op.kind.value != "F")] += changes[op.kind.value]
    return max(accumulate(change)) / schedule.num_sequence_splits
