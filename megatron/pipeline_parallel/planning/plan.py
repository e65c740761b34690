"""From a schedule's name to a program that is proven to run."""

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Schedule
from megatron.pipeline_parallel.planning.passes.communication import add_communication, forward_only
from megatron.pipeline_parallel.planning.validate import validate


def make_plan(name: str, problem: Problem, *, evaluates: bool = False) -> Schedule:
    """A validated program with messages, placed by the times in `problem.costs` (equal ones without) and within its limits.

    With `evaluates`, of the schedule's forwards alone. ValueError on a name, sizes or limits that cannot be scheduled.
    """
    schedule = build(name, problem)
    if evaluates:
        schedule = forward_only(schedule)
    costs = problem.costs or CostModel.uniform(schedule.placement)
    program = add_communication(schedule, costs)
    validate(program, costs)
    return program
