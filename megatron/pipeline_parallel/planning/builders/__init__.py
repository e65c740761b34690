"""Builders: one function a schedule, registered by name.

To add a schedule, write a function that takes a `Problem` and returns the compute order of every rank, and register it:

    @schedule("my-schedule", "what it is good for")
    def my_schedule(problem: Problem) -> Orders: ...

Messages, validation, simulation and the runtime follow from the order.
"""

# Importing a family registers its schedules.
from megatron.pipeline_parallel.planning.builders import fitted, looped, straight, v_shape  # noqa: F401
from megatron.pipeline_parallel.planning.builders.registry import (
    Builder,
    Orders,
    Problem,
    build,
    names,
    placement,
    schedule,
    summary,
    takes,
)

__all__ = ["Builder", "Orders", "Problem", "build", "names", "placement", "schedule", "summary", "takes"]
