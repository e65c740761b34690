import csv
import inspect
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from megatron.pipeline_parallel.planning.bounds import lower_bound
from megatron.pipeline_parallel.planning.builders import (
    Problem,
    blocks,
    build,
    looped,
    names,
    placement,
    registry,
    summary,
)
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.grid import time_grid
from megatron.pipeline_parallel.planning.op import OpKind, Placement
from megatron.pipeline_parallel.planning.passes.communication import add_communication, forward_only
from megatron.pipeline_parallel.planning.simulate import StuckError, simulate
from megatron.pipeline_parallel.planning.validate import validate

DATA = Path(__file__).parents[3] / "data"


def table(name):
    return list(csv.DictReader((DATA / name).open()))


RATES = table("zero_bubble_rates.csv")
V_FAMILY = table("v_family_unit.csv")
GROUPED = table("gis_unit.csv")

HELD = {
    "gpipe": lambda p, m: m,
    "1f1b": lambda p, m: min(m, p),
    "zb-h1": lambda p, m: min(m, p),
    "zb-h2": lambda p, m: min(m, 2 * p - 1),
    "seq-1f1b": lambda p, m: min(m, (p + 1) / 2),
    "interleaved-1f1b": lambda p, m: min(m, p + (p - 1) / 2),
    "gis": lambda p, m: min(m, p),
    "gis-h": lambda p, m: min(m, (ceil(p / 2) + p) / 2),
    "zbv": lambda p, m: min(m, p),
    "v-half": lambda p, m: min(m, (p + 2) // 2),
    "v-min": lambda p, m: min(m, (p + 4) // 3),
    "1f1b-v": lambda p, m: min(m, ceil(2 * p / 3) + (0 if p % 3 else 0.5)),
    "dualpipe-v": lambda p, m: min(m, p + 0.5),
}
"""Peak at equal times that a schedule's docstring states, in microbatches; never exceeded, and reached when there are enough."""


def made(name, p, m, *, effort=None, chunks=None, group=None, **times):
    """The schedule fitted to the times, the times, and the timeline."""
    problem = Problem(pp_size=p, num_microbatches=m, chunks_per_rank=chunks, group_size=group, effort=effort)
    costs = CostModel.uniform(placement(name, problem), **times)
    schedule = build(name, replace(problem, costs=costs))
    return schedule, costs, simulate(schedule, costs)


def most_held(timeline):
    return max(map(timeline.peak, range(timeline.schedule.pp_size)))


def test_what_is_built():
    assert names() == (
        "gpipe 1f1b interleaved-1f1b zb-h1 zb-h2 zb-auto zbv v-half v-min 1f1b-v dualpipe-v gis gis-h po seq-1f1b".split()
    )
    assert all(len(summary(name).splitlines()) == 1 for name in names())


def times_of(row):
    times = {"f": row["T_F_ms"], "b": row["T_B_ms"], "w": row["T_W_ms"], "comm": row["T_comm_ms"]}
    return {key: float(value) for key, value in times.items()}


@pytest.mark.parametrize("row", RATES, ids=lambda row: f"{row['model']}-m{row['m']}")
@pytest.mark.parametrize("name, column", [("1f1b", "1f1b"), ("zb-h1", "zb_h1"), ("zb-h2", "zb_h2")])
def test_published_bubble_rates(row, name, column):
    p = int(row["p"])
    _, _, timeline = made(name, p, int(row["m"]), **times_of(row))
    assert round(timeline.span_bubble_rate, 4) == float(row[column])
    assert most_held(timeline) == HELD[name](p, int(row["m"]))


@pytest.mark.parametrize("row", RATES, ids=lambda row: f"{row['model']}-m{row['m']}")
@pytest.mark.parametrize(
    "column, limit, memory_w",
    [("zb_1p", 1, 1.0), ("zb_1p", 1, 0.5), ("zb_2p_half_mw", 2, 0.5), ("zb_2p_strict", 2, 32 / 34)],
)
def test_searched_under_a_limit_it_is_no_worse_than_published(row, column, limit, memory_w):
    """`limit` in multiples of p microbatches, M_W in multiples of M_B. One row of 48 falls short, by one in the fourth digit."""
    p, m = int(row["p"]), int(row["m"])
    _, costs, timeline = made("zb-auto", p, m, memory_w=memory_w, device_limit=(float(limit * p),) * p, **times_of(row))
    short = 0.0001 if (column, row["model"], row["m"]) == ("zb_2p_half_mw", "1.5B", "24") else 0
    assert round(timeline.span_bubble_rate, 4) <= float(row[column]) + short + 1e-9
    validate(timeline.schedule, costs)


@pytest.mark.parametrize("row", V_FAMILY, ids=lambda row: f"{row['schedule']}-p{row['p']}")
def test_published_rates_of_v_schedules(row):
    p = int(row["p"])
    _, _, timeline = made(row["schedule"], p, int(row["m"]))
    assert round(timeline.span_bubble_rate, 4) <= float(row["span_bubble_rate"])
    assert most_held(timeline) <= int(row["peak_in_1f1b_microbatches"])
    if row["schedule"] == "1f1b":
        assert round(timeline.span_bubble_rate, 4) == float(row["span_bubble_rate"])


PO_PEAK = "po_peak_chunks_before_offload"
PO_OVER = {(8, 5): 26, (16, 3): 34}
"""Where po holds two chunks more than published, in 7 and 8 % less time."""


@pytest.mark.parametrize("row", GROUPED, ids=lambda row: f"p{row['d']}-v{row['v']}")
@pytest.mark.parametrize("name", ["gis", "gis-h", "po"])
def test_published_figures_of_schedules_in_groups(row, name):
    """In chunk times and chunks; met exactly, except that po has its unsqueezed makespan published."""
    p, v, m, column = int(row["d"]), int(row["v"]), int(row["m"]), name.replace("-", "_")
    _, _, timeline = made(name, p, m, chunks=v, f=v, b=v, w=v)
    makespan, peak = timeline.makespan, most_held(timeline) * v
    if name == "po":
        assert makespan <= float(row["po_makespan"])
        assert peak == PO_OVER.get((p, v), peak) and (peak <= float(row[PO_PEAK]) or (p, v) in PO_OVER)
    else:
        assert makespan == float(row[f"{column}_makespan"]) and peak == float(row[f"{column}_peak_chunks"])
        assert round(timeline.bubble_rate, 4) == float(row[f"{column}_rate"])


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 8, 9])
def test_valid_for_any_number_of_microbatches(name, p):
    for m in {1, 2, p - 1, p, p + 1, 2 * p, 2 * p + 1, 4 * p} - {0}:
        schedule, costs, timeline = made(name, p, m, effort=0)
        validate(schedule)
        for program in (add_communication(schedule, costs), add_communication(forward_only(schedule), costs)):
            validate(program)
        if name in HELD:
            assert most_held(timeline) <= HELD[name](p, m)
            assert m < 4 * p or most_held(timeline) == HELD[name](p, m)
        assert (
            timeline.makespan
            >= lower_bound(schedule.placement, m, costs, num_sequence_splits=schedule.num_sequence_splits).value - 1e-9
        )


@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_groups_have_the_peak_and_the_bubble_of_their_paper(p, v):
    """Times in chunks: F = B = W = 1."""
    for group in range(ceil(p / 2), p + 1):
        m = 4 * group * ceil(p / group)
        _, _, timeline = made("gis-h", p, m, chunks=v, group=group, f=v, b=v, w=v)
        assert most_held(timeline) * v == group * (v - 1) + p
        assert timeline.makespan == 3 * v * m + 2 * (p - 1) + (p - group) * (v - 1)
    _, _, timeline = made("gis", p, 4 * p, chunks=v, f=v, b=v, w=v)
    assert most_held(timeline) == p and timeline.makespan == 12 * p * v + 2 * (p - 1)


@pytest.mark.parametrize("p", [3, 4, 5, 6, 7])
def test_groups_below_half_the_ranks_are_refused(p):
    """Shown on what the builder would have made: it idles more the more microbatches there are, or never ends."""
    smallest = ceil(p / 2)
    sizes = Problem(pp_size=p, num_microbatches=12, chunks_per_rank=2)
    with pytest.raises(ValueError, match=f"group size of at least {smallest}, got {smallest - 1}"):
        build("gis-h", replace(sizes, group_size=smallest - 1))
    place = placement("gis-h", sizes)

    def idle(group, m):
        problem = replace(sizes, num_microbatches=m * group, placement=place)
        schedule = replace(build("gis-h", sizes), num_microbatches=m * group).with_ranks(looped._gis(problem, group))
        return simulate(schedule, CostModel.uniform(place, f=2, b=2, w=2)).makespan - 6 * m * group

    assert idle(smallest, 12) == idle(smallest, 6)
    if p <= 4:
        assert idle(smallest - 1, 12) > idle(smallest - 1, 6)
    else:
        with pytest.raises(StuckError):
            idle(1, 12)


@pytest.mark.parametrize("p, v, m", [(2, 2, 8), (4, 2, 8), (4, 3, 12), (3, 4, 9), (8, 2, 16)])
def test_interleaving_divides_the_bubble_of_1f1b(p, v, m):
    _, _, timeline = made("interleaved-1f1b", p, m, chunks=v)
    assert timeline.makespan == pytest.approx(3 * m + 3 * (p - 1) / v)


@pytest.mark.parametrize("p, m", [(1, 1), (4, 8), (5, 3), (8, 16)])
def test_one_chunk_or_one_split_is_1f1b(p, m):
    plain = build("1f1b", Problem(pp_size=p, num_microbatches=m)).ranks
    assert build("interleaved-1f1b", Problem(pp_size=p, num_microbatches=m, chunks_per_rank=1)).ranks == plain
    assert build("seq-1f1b", Problem(pp_size=p, num_microbatches=m, num_sequence_splits=1)).ranks == plain


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (5, 15), (8, 16)])
def test_zbv_and_zb_h2_have_no_bubble_at_equal_times(p, m):
    for name in ("zbv", "zb-h2"):
        _, _, timeline = made(name, p, m, effort=0)
        assert timeline.span_bubble_rate == pytest.approx(0, abs=1e-9)


def test_fitting_to_the_times_is_never_worse_and_mostly_better():
    better = 0
    for name in ("zb-auto", "zbv", "v-half", "v-min", "1f1b-v"):
        for times in (
            {"f": 10, "b": 12, "w": 8, "comm": 1},
            {"f": 3, "b": 2, "w": 5},
            {"f": 1, "b": 4, "w": 2, "comm": 0.3},
        ):
            limit = {"device_limit": (3.0,) * 5} if name == "zb-auto" else {}
            _, costs, plain = made(name, 5, 9, effort=0, **times, **limit)
            schedule, _, fitted = made(name, 5, 9, **times, **limit)
            validate(schedule, costs)
            assert fitted.makespan <= plain.makespan and most_held(fitted) <= most_held(plain)
            better += fitted.makespan < plain.makespan
    assert better >= 8, better


def test_the_name_of_a_placement_changes_nothing():
    for place in (Placement.loop(3), Placement.loop(3, 2), Placement.v(3)):
        problem = Problem(pp_size=3, num_microbatches=7, placement=place, effort=20_000)
        renamed = replace(problem, placement=replace(place, name="mine"))
        assert build("zb-auto", renamed).ranks == build("zb-auto", problem).ranks


@pytest.mark.parametrize("p, m", [(3, 7), (4, 8), (8, 11)])
def test_searched_on_a_v_it_is_no_worse_than_the_v_schedules(p, m):
    times = {"f": 0.9, "b": 1.2, "w": 1.0, "comm": 0.1, "memory_w": 0.5}
    for name in ("zbv", "v-half", "v-min"):
        schedule, costs, fitted = made(name, p, m, effort=0, **times)
        limit = tuple(map(fitted.peak_memory, range(p)))
        limited = replace(costs, device_limit=limit)
        problem = Problem(pp_size=p, num_microbatches=m, placement=schedule.placement, costs=limited)
        found = build("zb-auto", problem)
        validate(found, limited)
        assert simulate(found, costs).makespan <= fitted.makespan * (1 + 1e-9)


def test_the_same_problem_has_the_same_order():
    costs = {"f": 10, "b": 12, "w": 8, "comm": 1}
    for name in ("zb-auto", "v-half"):
        assert made(name, 4, 9, **costs)[0] == made(name, 4, 9, **costs)[0]


@pytest.mark.parametrize("unit", [1e-6, 1e9])
def test_the_unit_of_time_does_not_matter(unit):
    """An offload planner elsewhere gave other plans for milliseconds than for seconds."""
    for name in ("zb-auto", "zbv", "v-half", "v-min", "1f1b-v"):
        _, _, one = made(name, 4, 9, f=10, b=12, w=8, comm=1)
        _, _, scaled = made(name, 4, 9, f=10 * unit, b=12 * unit, w=8 * unit, comm=unit)
        assert scaled.makespan == pytest.approx(one.makespan * unit)


def test_a_limit_that_nothing_fits_names_the_smallest_that_would():
    with pytest.raises(ValueError, match="limit of 0.9 on rank 0 is less than one microbatch needs there, 1"):
        made("zb-auto", 3, 4, device_limit=(0.9,) * 3)
    _, costs, timeline = made("zb-auto", 3, 4, device_limit=(1.0,) * 3)
    validate(timeline.schedule, costs)
    # M_W above M_B: what a B leaves needs more room than the F did, so B and W are joint below that.
    for limit, joint in ((1.5, False), (1.4, True), (1.0, True)):
        _, costs, timeline = made("zb-auto", 3, 4, memory_w=1.5, device_limit=(limit,) * 3)
        validate(timeline.schedule, costs)
        assert {
            op.kind == OpKind.BW for ops in timeline.schedule.ranks for op in ops if op.kind in (OpKind.B, OpKind.BW)
        } == {joint}
    with pytest.raises(ValueError, match="needs there, 1"):
        made("zb-auto", 3, 4, memory_w=1.5, device_limit=(0.9,) * 3)


@pytest.mark.parametrize("p", range(1, 33))
def test_blocks_repeat_without_a_collision(p):
    """Each block's slots, modulo its period, are taken once a rank; 1F1B-V fills the period."""
    for block in (blocks.v_min(p), blocks.v_half(p)):
        for rank in block:
            assert len({slot % blocks.PERIOD for slot in rank}) == 4
    for block in blocks.one_f_one_b_v(p)[:3]:
        for f0, f1, b1, b0 in block:
            assert len({slot % blocks.PERIOD for slot in (f0, f1, b1, b1 + 1, b0, b0 + 1)}) == blocks.PERIOD


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


FIGURES = {name: 8 for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto")} | {
    name: 4 for name in ("interleaved-1f1b", "gis", "gis-h", "po", "zbv", "v-half", "v-min", "dualpipe-v")
}
FIGURES |= {"1f1b-v": 3, "seq-1f1b": 2}
"""Microbatches in the figure of each schedule's docstring."""


@pytest.mark.parametrize("name", names())
def test_the_figure_in_the_docstring_is_the_schedule(name):
    _, _, timeline = made(name, 4, FIGURES[name])
    text = inspect.getdoc(registry._BUILDERS[name].order)
    assert time_grid(timeline) in "\n".join(line.strip() for line in text.splitlines())


@pytest.mark.parametrize("field", ["pp_size", "num_microbatches", "chunks_per_rank"])
def test_sizes_below_one_are_refused(field):
    sizes = {"pp_size": 2, "num_microbatches": 2, "chunks_per_rank": 1} | {field: 0}
    with pytest.raises(ValueError, match=f"{field} = 0"):
        Problem(**sizes)


def test_an_unknown_name_lists_what_is_built():
    with pytest.raises(ValueError, match="unknown schedule 'zb-h3'.*gpipe, 1f1b, interleaved"):
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
