"""One plan for all ranks."""

import torch.distributed as dist

from megatron.pipeline_parallel.planning.op import Schedule


def share_plan(plan: Schedule | None, group: dist.ProcessGroup) -> Schedule:
    """The plan of `group`'s first rank on all of its ranks; collective. `plan` is read on that rank only.

    Raises ValueError where that rank has none, RuntimeError where what a rank reads is not what was sent.
    """
    source = dist.get_process_group_ranks(group)[0]
    if plan is None and dist.get_rank() == source:
        raise ValueError("the first rank has no plan to share")
    sent = [plan.to_text(), plan.digest] if plan is not None else [None, None]
    dist.broadcast_object_list(sent, src=source, group=group)
    text, digest = sent
    shared = Schedule.from_text(text)
    if shared.digest != digest:
        raise RuntimeError(
            f"the plan {shared.name!r} has digest {shared.digest[:12]} here and {digest[:12]} on rank {source}"
        )
    return shared
