"""Schedules that are made for given times under a given memory limit."""

from megatron.pipeline_parallel.planning.bounds import lower_bound
from megatron.pipeline_parallel.planning.builders.registry import Orders, Problem, build, chunks, schedule
from megatron.pipeline_parallel.planning.greedy import Codes, make_task, to_codes, to_ops, without_w
from megatron.pipeline_parallel.planning.op import Placement
from megatron.pipeline_parallel.planning.search import EFFORT, search


@schedule(
    "zb-auto", "the best found for the times and the memory limit given, on any placement", chunks(1), {"placement"}
)
def zb_auto(problem: Problem) -> Orders:
    """Searched as ZB-1P and ZB-2P are (arXiv 2401.10241, section 3.1), for any limit.

    Raises ValueError where the limit is less than one microbatch needs on a rank. The figure has none, p=4, m=8 and F = B = W.

    rank 0  F0F1F2F3F4F5F6B0F7B1W0B2W1B3W2B4W3B5W4B6W5B7W6W7
    rank 1    F0F1F2F3F4B0F5B1F6B2F7B3W0B4W1B5W2B6W3B7W4W5W6W7
    rank 2      F0F1F2B0F3B1F4B2F5B3F6B4F7B5W0B6W1B7W2W3W4W5W6W7
    rank 3        F0B0F1B1F2B2F3B3F4B4F5B5F6B6F7B7W0W1W2W3W4W5W6W7
    """
    task = make_task(problem.placement, problem.num_microbatches, problem.costs)
    bound = lower_bound(problem.placement, problem.num_microbatches, problem.costs, problem.costs.device_limit)
    effort = EFFORT if problem.effort is None else problem.effort
    # No rank's span is shorter than its work; without a barrier between iterations the longest span is what counts.
    busiest = problem.num_microbatches * max(
        sum(task.f[s] + task.b[s] + task.w[s] for s in own) for own in task.stages_of
    )
    found = search(task, _closed_forms(problem), effort=effort, enough=(bound.value, busiest))
    return to_ops(found.codes, problem.placement, joint=False)


def _closed_forms(problem: Problem) -> list[Codes]:
    """Orders to begin from; those that the limit does not allow are passed over by the search."""
    if problem.placement == Placement.loop(problem.pp_size):
        names = ["zb-h1", "zb-h2"]
    elif problem.placement == Placement.v(problem.pp_size):
        names = ["zbv", "v-half", "v-min"]
    else:
        names = (
            ["gis", "gis-h"] if problem.placement == Placement.loop(problem.pp_size, problem.chunks_per_rank) else []
        )
    sizes = Problem(
        pp_size=problem.pp_size,
        num_microbatches=problem.num_microbatches,
        chunks_per_rank=problem.chunks_per_rank,
        effort=0,
    )
    forms = [to_codes(build(name, sizes)) for name in names]
    return forms + [without_w(form, problem.placement.num_stages) for form in forms]
