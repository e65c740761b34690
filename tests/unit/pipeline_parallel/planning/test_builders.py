import csv
import inspect
from pathlib import Path

import pytest

from megatron.pipeline_parallel.planning.builders import Problem, build, names, registry, straight
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.grid import time_grid
from megatron.pipeline_parallel.planning.op import OpKind
from megatron.pipeline_parallel.planning.passes.communication import add_communication, forward_only
from megatron.pipeline_parallel.planning.simulate import simulate
from megatron.pipeline_parallel.planning.validate import validate

RATES = list(csv.DictReader((Path(__file__).parents[3] / "data" / "zero_bubble_rates.csv").open()))
FUNCTIONS = {"gpipe": straight.gpipe, "1f1b": straight.one_f_one_b, "zb-h1": straight.zb_h1}


def made(name, p, m, **times):
    schedule = build(name, Problem(pp_size=p, num_microbatches=m))
    costs = CostModel.uniform(schedule.placement, **times)
    return schedule, costs, simulate(schedule, costs)


def test_what_is_built():
    assert names() == ["gpipe", "1f1b", "zb-h1"]


@pytest.mark.parametrize("row", RATES, ids=lambda row: f"{row['model']}-m{row['m']}")
@pytest.mark.parametrize("name, column", [("1f1b", "1f1b"), ("zb-h1", "zb_h1")])
def test_published_bubble_rates(row, name, column):
    times = {"f": row["T_F_ms"], "b": row["T_B_ms"], "w": row["T_W_ms"], "comm": row["T_comm_ms"]}
    p = int(row["p"])
    _, _, timeline = made(name, p, int(row["m"]), **{key: float(value) for key, value in times.items()})
    assert round(timeline.span_bubble_rate, 4) == float(row[column])
    assert max(map(timeline.peak, range(p))) == p


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_valid_for_any_number_of_microbatches(name, p):
    for m in {1, 2, p - 1, p, p + 1, 2 * p, 2 * p + 1, 4 * p} - {0}:
        schedule, costs, timeline = made(name, p, m)
        validate(schedule)
        for program in (add_communication(schedule, costs), add_communication(forward_only(schedule), costs)):
            validate(program)
        held = m if name == "gpipe" else min(m, p)
        assert timeline.peak(0) == held
        # No schedule beats this: the last rank starts after p - 1 forwards, and is then busy for m microbatches.
        assert timeline.makespan >= 3 * m + p - 1


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (5, 15), (8, 16)])
@pytest.mark.parametrize("f, b, w", [(1, 1, 1), (4, 5, 3), (10, 12, 8)])
def test_zb_h1_has_the_bubble_of_its_paper(p, m, f, b, w):
    _, _, timeline = made("zb-h1", p, m, f=f, b=b, w=w)
    span = timeline.compute(0)[-1].end
    assert span - m * (f + b + w) == pytest.approx((p - 1) * (f + b - w))


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (3, 7)])
def test_1f1b_and_gpipe_have_the_bubble_of_a_flush(p, m):
    for name in ("1f1b", "gpipe"):
        _, _, timeline = made(name, p, m)
        assert timeline.makespan == (m + p - 1) * 3


def test_1f1b_holds_p_minus_i_microbatches():
    _, _, timeline = made("1f1b", 4, 8)
    assert [timeline.peak(rank) for rank in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_figure_in_the_docstring_is_the_schedule(name):
    _, _, timeline = made(name, 4, 8)
    assert time_grid(timeline) in inspect.getdoc(FUNCTIONS[name]).replace("\n    ", "\n")


@pytest.mark.parametrize("field", ["pp_size", "num_microbatches", "chunks_per_rank"])
def test_sizes_below_one_are_refused(field):
    sizes = {"pp_size": 2, "num_microbatches": 2, "chunks_per_rank": 1} | {field: 0}
    with pytest.raises(ValueError, match=f"{field} = 0"):
        Problem(**sizes)


def test_an_unknown_name_lists_what_is_built():
    with pytest.raises(ValueError, match="unknown schedule 'zb-h3'.*gpipe, 1f1b, zb-h1"):
        build("zb-h3", Problem(pp_size=2, num_microbatches=2))


def test_chunks_that_a_schedule_does_not_have_are_refused():
    with pytest.raises(ValueError, match="'1f1b' has one chunk a rank, got 2"):
        build("1f1b", Problem(pp_size=2, num_microbatches=2, chunks_per_rank=2))


def test_a_new_schedule_is_one_registered_function(monkeypatch):
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))

    @registry.schedule("one-by-one", "each microbatch alone")
    def one_by_one(problem):
        orders = build("gpipe", problem).ranks
        key = {OpKind.F: 0, OpKind.BW: 1}
        return [sorted(ops, key=lambda op: (op.microbatch, key[op.kind])) for ops in orders]

    schedule = build("one-by-one", Problem(pp_size=3, num_microbatches=4))
    costs = CostModel.uniform(schedule.placement)
    validate(add_communication(schedule, costs))
    assert simulate(schedule, costs).makespan == 4 * 3 * 3
    with pytest.raises(ValueError, match="registered already"):
        registry.schedule("one-by-one", "again")(one_by_one)
