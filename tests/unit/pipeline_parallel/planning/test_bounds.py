"""The lower bounds against the published special cases, and against the best of all orders where that can be searched."""

import random
from itertools import islice

import pytest
from brute_force import all_orders, best_schedule
from random_schedules import random_costs, random_placement, random_schedule
from schedule_checker import Broken, check

from megatron.pipeline_parallel.planning.bounds import ANY_SCHEDULE, lower_bound
from megatron.pipeline_parallel.planning.builders import Problem, build
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement, Schedule
from megatron.pipeline_parallel.planning.simulate import simulate
from megatron.pipeline_parallel.planning.validate import ScheduleError, validate

EXACT = 1 + 1e-9


def within_v(p, m, f, b, w, c, limit):
    """What no V of these times a chunk beats at `limit` < m microbatches a rank, by its rank p - 1."""
    before = 2 * p * f + 2 * (p - 1) * c + (p - 1) * (b + c) - 2 * limit * f
    after = (p - 1) * (f + c) + 2 * p * b + 2 * (p - 1) * c + w - 2 * limit * (b + w)
    return 2 * m * (f + b + w) + max(0, before) + max(0, after)


@pytest.mark.parametrize(
    "times, comm, limit, rate",
    [
        ((1000, 1200, 800), 100, 3, 0.410),
        ((1000, 1200, 800), 100, 4, 0.274),
        ((1000, 1200, 800), 100, 5, 0.237),
        ((1000, 1200, 800), 100, 6, 0.199),
        ((1000, 1200, 800), 100, 8, 0.116),
        ((1000, 1000, 1000), 50, 4, 0.221),
        ((1000, 1000, 1000), 50, 5, 0.181),
        ((1000, 1000, 1000), 50, 8, 0.087),
    ],
)
def test_least_bubble_of_a_v_of_eight_ranks_at_a_limit(times, comm, limit, rate):
    placement, (f, b, w) = Placement.v(8), times
    costs = CostModel.uniform(placement, f=f, b=b, w=w, comm=comm)
    bound = lower_bound(placement, 16, costs, (limit,) * 8)
    assert round(1 - 16 * sum(times) / bound.value, 3) == rate
    assert bound.holds_for == f"any schedule without offload or recompute that holds at most {limit} on rank 7"


def test_v_at_a_limit():
    rng = random.Random(0)
    exact = 0
    for _ in range(400):
        p, m = rng.randint(1, 9), rng.randint(2, 20)
        limit = rng.randint(1, m - 1)
        f, b, w, c = (rng.uniform(0.5, 2) for _ in range(4))
        placement = Placement.v(p)
        costs = CostModel.uniform(placement, f=2 * f, b=2 * b, w=2 * w, comm=c)
        formula = within_v(p, m, f, b, w, c, limit)
        bound = lower_bound(placement, m, costs, (limit,) * p).value
        assert bound * EXACT >= formula
        exact += bound <= formula * EXACT
    assert exact > 50


def test_one_chunk_at_a_limit():
    rng = random.Random(0)
    exact = 0
    for _ in range(400):
        p, m = rng.randint(2, 9), rng.randint(2, 20)
        k = rng.randint(1, m)
        f, b, w, c = (rng.uniform(0.5, 2) for _ in range(4))
        placement = Placement.loop(p)
        costs = CostModel.uniform(placement, f=f, b=b, w=w, comm=c)
        formula = m * (f + b + w) + (p - 1) * (b + 2 * c) + (p - k) * f
        bound = lower_bound(placement, m, costs, (k,) + (m,) * (p - 1)).value
        assert bound * EXACT >= formula
        exact += bound <= formula * EXACT
    assert exact > 20


def test_one_chunk_at_any_memory():
    """The last rank starts late, or has the way back after its last B, or the first rank gets its first B late."""
    for p, m, f, b, w, c in ((4, 8, 1, 1, 1, 0), (8, 24, 18.5, 18.1, 9.3, 0.6), (5, 3, 1, 2, 4, 0.5)):
        placement = Placement.loop(p)
        costs = CostModel.uniform(placement, f=f, b=b, w=w, comm=c)
        bound = lower_bound(placement, m, costs)
        up, down = (p - 1) * (f + c), (p - 1) * (b + c)
        least = max(up + m * (f + b + w), up + m * (f + b) + down + w, up + f + down + m * (b + w))
        assert bound.value == pytest.approx(least)
        assert bound.holds_for == ANY_SCHEDULE


@pytest.mark.parametrize("p, m", [(1, 1), (2, 4), (4, 8), (8, 16), (8, 64)])
@pytest.mark.parametrize("f, b, w", [(1, 1, 1), (4, 5, 3), (185, 181, 93)])
def test_no_order_beats_zb_h1_at_its_memory(p, m, f, b, w):
    schedule = build("zb-h1", Problem(pp_size=p, num_microbatches=m))
    costs = CostModel.uniform(schedule.placement, f=f, b=b, w=w)
    held = tuple(simulate(schedule, costs).peak_memory(rank) for rank in range(p))
    # Its last op is rank 0's; the makespan of its figure is that rank's span.
    assert lower_bound(schedule.placement, m, costs, held).value == pytest.approx(simulate(schedule, costs).makespan)


def unit_v(p, m, k):
    """Bound and best makespan of a V with chunks of F = B = W = 1 that holds k chunks a rank."""
    placement = Placement.v(p)
    costs = CostModel.uniform(placement, f=2, b=2, w=2, memory_b=2, memory_w=2)
    best, _ = best_schedule(placement, m, costs, (k,) * p)
    return lower_bound(placement, m, costs, (k,) * p).value, best


SMALL_V = [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 2)]
LARGE_V = [(2, 4), (3, 3), (3, 4), (4, 3)]


@pytest.mark.parametrize(
    "p, m", SMALL_V + [pytest.param(*size, marks=pytest.mark.full) for size in LARGE_V], ids=lambda size: f"{size}"
)
def test_unit_v_with_k_chunks(p, m):
    """6m + 6p - 3k - 1 holds wherever memory binds, k < 2m; the bound says no less there, and is the optimum but for k = 3."""
    for k in range(2, 2 * m + 1):
        bound, best = unit_v(p, m, k)
        formula = 6 * m + 6 * p - 3 * k - 1
        assert bound <= best * EXACT
        if k < 2 * m:
            assert formula <= bound * EXACT
        if k != 3:
            assert bound == pytest.approx(best)


def test_unit_v_formula_is_no_bound_where_all_forwards_fit():
    bound, best = unit_v(3, 2, 4)
    assert (bound, best) == (16, 16) and 6 * 2 + 6 * 3 - 3 * 4 - 1 == 17


def test_unit_v_formula_follows_from_the_bound():
    for p in range(1, 9):
        placement = Placement.v(p)
        costs = CostModel.uniform(placement, f=2, b=2, w=2, memory_b=2, memory_w=2)
        for m in range(1, 2 * p + 3):
            for k in range(2, 2 * m):
                assert lower_bound(placement, m, costs, (k,) * p).value >= 6 * m + 6 * p - 3 * k - 1


def some_numbers(rng, size):
    """Equal ones, small whole ones with zeros, or any."""
    style = rng.randrange(3)
    if style == 0:
        return (rng.choice((1.0, 0.8, 1.2, 2.0)),) * size
    return tuple(float(rng.choice((0, 1, 1, 2, 3))) if style == 1 else rng.uniform(0.5, 2) for _ in range(size))


def some_problem(rng):
    """A placement, microbatches, splits, costs and a limit (or None): few enough ops for a search over all orders."""
    p, v = rng.randint(1, 3), rng.choice((1, 2, 2))
    placement = rng.choice((Placement.loop(p, v), Placement.v(p) if v == 2 else Placement.loop(p)))
    if rng.random() < 0.2:
        places = list(placement.stages)
        rng.shuffle(places)
        placement = Placement(name="any", stages=tuple(places))
    m, splits = rng.choice([(m, s) for m in (1, 2, 3) for s in (1, 2) if s == 1 or m * p * v <= 4])
    if p * m * v > 12:
        m = 2
    n = placement.num_stages
    memory_b = some_numbers(rng, n) if rng.random() < 0.4 else (1.0,) * n
    memory_w = rng.choice((memory_b, tuple(size / 2 for size in memory_b), some_numbers(rng, n)))
    comm = rng.choice((0.0, 0.1, tuple(some_numbers(rng, p) for _ in range(p))))
    f, b, w = (some_numbers(rng, n) for _ in range(3))
    costs = CostModel(f=f, b=b, w=w, r=f, comm=comm, memory_b=memory_b, memory_w=memory_w)
    least = [sum(max(memory_b[s], memory_w[s]) for s in placement.stages_of(rank)) for rank in range(p)]
    limit = tuple(size * rng.choice((1, 1.5, 2, rng.uniform(1, m + 0.5))) for size in least)
    return placement, m, splits, costs, limit if rng.random() < 0.8 else None


def compare_with_the_best(seeds):
    """Share of problems with B and W apart in which the bound is the optimum."""
    tight, apart = 0, 0
    for seed in seeds:
        rng = random.Random(seed)
        placement, m, splits, costs, limit = some_problem(rng)
        joint = rng.random() < 0.25
        best, schedule = best_schedule(placement, m, costs, limit, joint, splits)
        makespan, peaks = check(schedule, costs)
        timeline = simulate(schedule, costs)
        assert makespan == pytest.approx(best) == pytest.approx(timeline.makespan)
        assert peaks == pytest.approx([timeline.peak_memory(rank) for rank in range(placement.pp_size)])
        assert limit is None or all(peak <= most * EXACT for peak, most in zip(peaks, limit))
        validate(schedule)
        for held in (None, limit, tuple(peaks)):
            bound = lower_bound(placement, m, costs, held, num_sequence_splits=splits)
            assert bound.value <= best * EXACT, (seed, bound, best)
        bound = lower_bound(placement, m, costs, limit, num_sequence_splits=splits)
        apart += not joint
        tight += not joint and bound.value * EXACT >= best
    return tight / apart


def test_no_order_beats_the_bound():
    assert compare_with_the_best(range(250)) > 0.6


@pytest.mark.full
def test_no_order_beats_the_bound_at_length():
    assert compare_with_the_best(range(1000, 6000)) > 0.6


def test_random_orders_do_not_beat_the_bound_at_their_own_peak():
    for seed in range(300):
        rng = random.Random(seed)
        placement = random_placement(rng)
        schedule = random_schedule(rng, placement, rng.randint(1, 5))
        costs = random_costs(rng, placement)
        makespan, peaks = check(schedule, costs)
        assert lower_bound(placement, schedule.num_microbatches, costs, tuple(peaks)).value <= makespan * EXACT


SMALL = [
    (Placement.loop(2), 2, False),
    (Placement.loop(2), 3, False),
    (Placement.loop(3), 2, False),
    (Placement.loop(2), 3, True),
    (Placement.v(2), 1, False),
    (Placement.loop(2, 2), 1, False),
]


@pytest.mark.parametrize(
    "placement, m, joint", SMALL, ids=lambda part: getattr(part, "name", part) if part is not True else "joint"
)
def test_the_search_finds_the_best_of_all_orders(placement, m, joint):
    costs = random_costs(random.Random(m), placement)
    runs = []
    for schedule in all_orders(placement, m, joint):
        try:
            runs.append(check(schedule, costs))
        except Broken:
            continue
    assert len(runs) > 5
    for limit in [None, *{tuple(peaks) for _, peaks in runs}]:
        fits = [run for run, peaks in runs if limit is None or all(x <= most for x, most in zip(peaks, limit))]
        assert best_schedule(placement, m, costs, limit, joint)[0] == pytest.approx(min(fits))


def test_the_search_says_when_nothing_fits():
    placement = Placement.v(2)
    assert best_schedule(placement, 2, CostModel.uniform(placement), (0.9, 2.0)) is None


def verdicts(schedule, costs):
    """Whether the checker and the validator accept a schedule."""
    try:
        check(schedule, costs)
        sound = True
    except Broken:
        sound = False
    try:
        validate(schedule)
        return sound, True
    except ScheduleError:
        return sound, False


@pytest.mark.parametrize(
    "placement, m, joint", SMALL, ids=lambda part: getattr(part, "name", part) if part is not True else "joint"
)
def test_the_validator_accepts_just_what_can_run(placement, m, joint):
    costs = CostModel.uniform(placement)
    seen = [verdicts(schedule, costs) for schedule in all_orders(placement, m, joint)]
    assert all(sound == accepted for sound, accepted in seen)
    assert {True, False} == {sound for sound, _ in seen}


def broken(ops):
    """A rank's order with two neighbours swapped, one op left out, one twice, one of the next microbatch or one at the end."""
    for index in range(len(ops)):
        if index:
            yield ops[: index - 1] + (ops[index], ops[index - 1]) + ops[index + 1 :]
        yield ops[:index] + ops[index + 1 :]
        yield ops[: index + 1] + ops[index:]
        yield ops[:index] + ops[index + 1 :] + (ops[index],)


def test_the_validator_finds_every_broken_order():
    rng = random.Random(0)
    counts = {True: 0, False: 0}
    for _ in range(60):
        placement = random_placement(rng, max_ranks=3, max_chunks=2)
        schedule = random_schedule(rng, placement, 2)
        rank = rng.randrange(placement.pp_size)
        for ops in islice(broken(schedule.ranks[rank]), 60):
            ranks = [*schedule.ranks[:rank], ops, *schedule.ranks[rank + 1 :]]
            sound, accepted = verdicts(schedule.with_ranks(ranks), CostModel.uniform(placement))
            assert sound == accepted, list(map(Op.__str__, ops))
            counts[sound] += 1
    assert min(counts.values()) > 100


def test_less_memory_never_lowers_the_bound():
    for seed in range(200):
        rng = random.Random(seed)
        placement = random_placement(rng, max_ranks=8)
        costs, m = random_costs(rng, placement), rng.randint(1, 20)
        ranks = range(placement.pp_size)
        whole = [sum(costs.memory_b[s] + costs.memory_w[s] for s in placement.stages_of(rank)) for rank in ranks]
        limits = [tuple(size * n / 4 for size in whole) for n in range(4, 4 * m + 4)]
        bounds = [lower_bound(placement, m, costs, limit).value for limit in limits]
        assert all(more <= less * EXACT for less, more in zip(bounds, bounds[1:]))
        assert bounds[-1] * EXACT >= lower_bound(placement, m, costs).value


def test_what_may_leave_the_device_is_bounded_at_any_memory_alone():
    placement = Placement.v(4)
    costs = CostModel.uniform(placement)
    free, bound = lower_bound(placement, 8, costs), lower_bound(placement, 8, costs, (1.0,) * 4)
    assert bound.value > free.value and "rank" in bound.holds_for
    assert lower_bound(placement, 8, costs, (1.0,) * 4, offloads=True) == free
    assert lower_bound(placement, 8, costs, (float("inf"),) * 4) == free


def test_a_late_stages_long_w_counts():
    placement = Placement.loop(3)
    costs = CostModel(f=(1,) * 3, b=(1,) * 3, w=(0, 0, 9), r=(1,) * 3, memory_b=(1,) * 3, memory_w=(1,) * 3)
    # Rank 0's own two forwards, then all that its second microbatch has still to go through.
    assert lower_bound(Placement.loop(3), 1, costs).value == 3 + 1 + 9 == best_schedule(placement, 1, costs)[0]


def slow_trip(m, f, b, w, comm, memory_w=1.0):
    """Two ranks of which the second only sends back what it gets: costs and the joint orders with `warmup` forwards first."""
    placement = Placement.loop(2)
    costs = CostModel(
        f=(f, 0.0), b=(b, 0.0), w=(w, 0.0), r=(f, 0.0), comm=comm, memory_b=(1, 1), memory_w=(memory_w, 1)
    )

    def order(warmup):
        def ops(rank, ahead):
            steps = [(OpKind.F, k) for k in range(ahead)]
            for k in range(m):
                steps += [(OpKind.BW, k)] + [(OpKind.F, k + ahead)] * (k + ahead < m)
            return tuple(Op(kind, rank, 0, k) for kind, k in steps)

        return Schedule(name="trip", placement=placement, num_microbatches=m, ranks=(ops(0, warmup), ops(1, 1)))

    return placement, costs, order


@pytest.mark.parametrize("memory_w", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("warmup", [1, 2, 3, 5])
@pytest.mark.parametrize("comm", [0.0, 1.0, 1.5, 4.0])
def test_joint_backwards_hold_memory_b_to_their_end(memory_w, warmup, comm):
    placement, costs, order = slow_trip(12, 0.5, 0.5, 1.0, comm, memory_w)
    makespan, peaks = check(order(warmup), costs)
    assert peaks[0] == warmup
    assert lower_bound(placement, 12, costs, tuple(peaks)).value <= makespan * EXACT


def test_joint_backwards_at_less_than_memory_w():
    placement = Placement.loop(1)
    costs = CostModel(f=(0,), b=(1,), w=(1,), r=(0,), memory_b=(1,), memory_w=(2,))
    best, _ = best_schedule(placement, 2, costs, (1.0,), joint=True)
    assert lower_bound(placement, 2, costs, (1.0,)).value <= best == 4


@pytest.mark.parametrize("m", [2, 4, 6, 12])
@pytest.mark.parametrize("more", [1, 1.5, 2, 4, 100])
def test_room_that_no_order_fills_adds_nothing(m, more):
    """Memory goes up for half of the time and down for the other half: no plateau."""
    placement, costs, order = slow_trip(m, 1.0, 0.5, 0.5, m / 2)
    makespan, peaks = check(order(m), costs)
    assert makespan <= 2 * m + 1
    assert lower_bound(placement, m, costs, tuple(more * peak for peak in peaks)).value <= makespan * EXACT


def test_costs_and_limits_of_another_size_are_refused():
    placement = Placement.loop(3)
    with pytest.raises(ValueError, match="costs are for 2 stages"):
        lower_bound(placement, 4, CostModel.uniform(Placement.loop(2)))
    with pytest.raises(ValueError, match="held: one entry a rank, got 2 for 3 ranks"):
        lower_bound(placement, 4, CostModel.uniform(placement), (1.0, 1.0))
