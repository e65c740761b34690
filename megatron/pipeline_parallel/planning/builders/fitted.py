"""Schedules that are made for given times under a given memory limit."""

from dataclasses import replace

from megatron.pipeline_parallel.planning.bounds import lower_bound
from megatron.pipeline_parallel.planning.builders.registry import Orders, Problem, build, chunks, schedule
from megatron.pipeline_parallel.planning.greedy import Codes, MemoryLimitError, make_task, to_codes, to_ops, without_w
from megatron.pipeline_parallel.planning.op import Placement
from megatron.pipeline_parallel.planning.search import EFFORT, search


@schedule(
    "zb-auto", "the best found for the times and the memory limit given, on any placement", chunks(1), {"placement"}
)
def zb_auto(problem: Problem) -> Orders:
    """Searched as ZB-1P and ZB-2P are (arXiv 2401.10241, section 3.1), for any limit.

    Where M_W is larger than M_B, a limit may have no room for B and W apart: then they are joint. Raises ValueError where it is less than
    one microbatch needs on a rank. The figure has none, p=4, m=8 and F = B = W.

    rank 0  F0F1F2F3F4F5F6B0F7B1W0B2W1B3W2B4W3B5W4B6W5B7W6W7
    rank 1    F0F1F2F3F4B0F5B1F6B2F7B3W0B4W1B5W2B6W3B7W4W5W6W7
    rank 2      F0F1F2B0F3B1F4B2F5B3F6B4F7B5W0B6W1B7W2W3W4W5W6W7
    rank 3        F0B0F1B1F2B2F3B3F4B4F5B5F6B6F7B7W0W1W2W3W4W5W6W7
    """
    joint = False
    try:
        task = make_task(problem.placement, problem.num_microbatches, problem.costs)
    except MemoryLimitError:
        joint = True
        task = make_task(problem.placement, problem.num_microbatches, problem.costs, joint=True)
    bound = lower_bound(problem.placement, problem.num_microbatches, problem.costs, problem.costs.device_limit)
    effort = EFFORT if problem.effort is None else problem.effort
    # No rank's span is shorter than its work; without a barrier between iterations the longest span is what counts.
    busiest = problem.num_microbatches * max(
        sum(task.f[s] + task.b[s] + task.w[s] for s in own) for own in task.stages_of
    )
    forms = [] if joint else _closed_forms(problem)
    found = search(task, forms, effort=effort, enough=(bound.value, busiest))
    return to_ops(found.codes, problem.placement, joint=joint)


def _closed_forms(problem: Problem) -> list[Codes]:
    """Orders to begin from; those that the limit does not allow are passed over by the search."""
    stages, p = problem.placement.stages, problem.pp_size
    names: tuple[str, ...] = ()
    if stages == Placement.loop(p).stages:
        names = ("zb-h1", "zb-h2")
    elif stages == Placement.v(p).stages:
        names = ("zbv", "v-half", "v-min")
    elif stages == Placement.loop(p, problem.chunks_per_rank).stages:
        names = ("gis", "gis-h")
    sizes = Problem(
        pp_size=p,
        num_microbatches=problem.num_microbatches,
        chunks_per_rank=problem.chunks_per_rank,
        costs=replace(problem.costs, device_limit=None),
        effort=0,
    )
    forms = [to_codes(build(name, sizes)) for name in names]
    return forms + [without_w(form, problem.placement.num_stages) for form in forms]
