"""From a schedule's name to one plan that all ranks share."""

import torch.distributed as dist

from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Schedule
from megatron.pipeline_parallel.planning.passes.communication import add_communication, forward_only
from megatron.pipeline_parallel.planning.validate import validate


def make_plan(name: str, problem: Problem, *, evaluates: bool = False) -> Schedule:
    """A validated program with messages. ValueError on a name or sizes that cannot be scheduled."""
    schedule = build(name, problem)
    if evaluates:
        schedule = forward_only(schedule)
    costs = CostModel.uniform(schedule.placement)
    program = add_communication(schedule, costs)
    validate(program)
    return program


def share_plan(plan: Schedule | None, group: dist.ProcessGroup) -> Schedule:
    """Rank 0's plan on every rank of `group`; collective. Raises RuntimeError when ranks hold different plans afterwards.

    `plan` is read on the group's first rank only.
    """
    texts = [plan.to_text() if plan is not None else ""]
    source = dist.get_process_group_ranks(group)[0]
    dist.broadcast_object_list(texts, src=source, group=group)
    shared = plan if dist.get_rank() == source and plan is not None else Schedule.from_text(texts[0])
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, shared.digest, group=group)
    if len(set(digests)) != 1:
        raise RuntimeError(
            f"ranks hold different plans of {shared.name!r}: digests {[digest[:12] for digest in digests]}"
        )
    return shared
