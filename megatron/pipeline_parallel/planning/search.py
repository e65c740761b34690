"""Search for a good order under a memory limit: many greedy runs, the best kept.

First each starting order as it is, and greedy orders by a grid of rules; then the best is cut at some moment and goes on by other
rules, for a while or to its end, again and again. Deterministic: what bounds the search is the number of ops it places, not a
clock, and its choices come from a fixed sequence.
"""

from collections.abc import Iterable
from itertools import product
from math import ceil

from megatron.pipeline_parallel.planning.greedy import Codes, Greedy, Rules, Task

EFFORT = 300_000
"""Ops that a search places in all, about 2 microseconds each."""

_STALE = 150
"""Cuts in a row without an improvement after which a search gives up."""

_NO_CAP = 1 << 30

_NEVER = float("inf")

_PROMISING = [(0.49, 0.95, slack, False, True, True) for slack in (0.0, _NEVER, 0.5, 0.75, 0.25)] + [
    (share, 0.0, _NEVER, False, True, True) for share in (0.49, 0.54, 0.57, 1.0)
]
"""Rules that made the best orders of one chunk a rank: about two microbatches in flight for each rank that is still to come."""


def search(
    task: Task, starts: Iterable[Codes] = (), *, effort: int = EFFORT, enough: tuple[float, float] = (0.0, 0.0)
) -> Greedy | None:
    """The best schedule found, by makespan, then by the longest span of a rank; None when no start is complete and `effort` is spent.

    `starts` are orders to begin from, with their W or without. With `effort` 0 they are run and nothing is searched beyond
    one greedy order. A search ends early with a makespan and a longest span that are both `enough`.
    """
    return _Search(task, effort, enough).run(starts)


class _Search:
    def __init__(self, task: Task, effort: int, enough: tuple[float, float]) -> None:
        self.task = task
        self.left = effort
        self.enough = tuple(value * (1 + 1e-9) for value in enough)
        self.best: Greedy | None = None
        self.dice = _Dice()
        self.num_stages = len(task.f)
        self.total = (2 if task.joint else 3) * self.num_stages * task.num_microbatches
        chain = sum(task.f) + sum(task.b) + sum(task.forward_latency) + sum(task.backward_latency)
        self.step = (chain + (sum(task.w) if task.joint else 0.0)) / self.num_stages
        """Mean time from F of a stage to F of the next and back again."""

    def run(self, starts: Iterable[Codes]) -> Greedy | None:
        for start in starts:
            has_w = any(code >= 2 * self.num_stages for order in start for code in order)
            for overhang in (0.0,) if self.task.joint or has_w else (0.0, 0.5, 1.0):
                self.offer(Greedy(self.task).run(Rules(self.caps(0), overhang), start))
        if self.best is None:
            self.offer(Greedy(self.task).run(Rules(self.caps(self.step))))
        if self.left > 0:
            self.try_rules()
            self.cut_and_go_on()
        return self.best

    @property
    def is_enough(self) -> bool:
        makespan, span = self.enough
        return self.best is not None and self.best.makespan <= makespan and self.best.span <= span

    @property
    def is_over(self) -> bool:
        return self.left <= 0 or self.is_enough

    def offer(self, found: Greedy, placed_before: int = 0) -> bool:
        """Keep it if it is at least as good; True when it is better."""
        # Beginning a run costs, too.
        self.left -= found.placed - placed_before + self.total // 20
        if not found.is_complete or self.best is not None and found.score > self.best.score:
            return False
        better = self.best is None or found.score < self.best.score
        self.best = found
        return better

    def caps(self, step: float) -> tuple[int, ...]:
        """Microbatches in flight at each stage: one more for every `step` of the way from its F to its B; 0 for no cap."""
        if not step:
            return (_NO_CAP,) * self.num_stages
        task, caps, way = self.task, [], 0.0
        for stage in reversed(range(self.num_stages)):
            caps.append(1 + ceil(way / step - 1e-9))
            way += task.f[stage] + task.b[stage] + (task.w[stage] if task.joint else 0.0)
            if stage:
                way += task.forward_latency[stage - 1] + task.backward_latency[stage]
        return tuple(reversed(caps))

    def try_rules(self) -> None:
        """Greedy orders by a grid of rules for a third of the effort: first what did best elsewhere, then a fixed mixed order."""
        deep = (True, False) if any(len(stages) > 1 for stages in self.task.stages_of) else (True,)
        shares = (1.0, 0.49, 0.7, 1.5, 0.0, 0.6, 0.85, 2.0)
        grid = list(product(shares, (0.0, 0.95, 0.5), (_NEVER, 0.0, 0.5, 0.25, 0.75), (False, True), deep, deep))
        stop = max(0, self.left * 2 // 3)
        first = _PROMISING if len(deep) == 1 else []
        for number, choice in enumerate(first + self.dice.shuffled(grid)):
            if self.is_enough or number >= len(first) and self.left <= stop:
                return
            share, overhang, slack, alternate, f_deep, b_deep = choice
            rules = Rules(self.caps(share * self.step), overhang, slack, alternate, f_deep, b_deep)
            self.offer(Greedy(self.task).run(rules, at_most=self.best.makespan if self.best else _NEVER))

    def cut_and_go_on(self) -> None:
        stale = 0
        while not self.is_over and self.best is not None and stale < _STALE:
            stale = 0 if self.cut(self.best) else stale + 1

    def cut(self, best: Greedy) -> bool:
        """Go on by other rules from a moment of `best`; several tries, as reaching the moment costs most."""
        n, dice, makespan = self.num_stages, self.dice, best.makespan
        moment = makespan * dice.draw()
        if dice.draw() < 0.6:
            # The way out of the pipeline, from some time before the first rank's last F.
            last = max(start for start, code in zip(best.starts[0], best.codes[0]) if code < n)
            moment = max(0.0, makespan - (makespan - last) * (0.2 + 1.6 * dice.draw()))
        base = best.until(moment)
        self.left -= base.placed // 4
        for _ in range(5):
            share = 0.0 if dice.draw() < 0.7 else 0.4 + 1.5 * dice.draw()
            overhang = (0.0, 0.0, 0.25, 0.5, 0.75, 1.0)[int(6 * dice.draw())]
            rules = Rules(
                self.caps(share * self.step),
                overhang,
                _NEVER,
                dice.draw() < 0.4,
                dice.draw() < 0.3,
                dice.draw() < 0.5,
            )
            tried = base.copy()
            if dice.draw() < 0.5:
                tried.run(rules, until=moment + (makespan - moment) * dice.draw() ** 2, at_most=makespan)
                if not tried.gave_up:
                    tried.run(rules._replace(caps=self.caps(0)), best.codes, at_most=makespan)
            else:
                tried.run(rules, at_most=makespan)
            if self.offer(tried, base.placed):
                return True
        return False


class _Dice:
    """A fixed sequence of numbers without pattern (a 64-bit linear congruential generator, the constants of Knuth's MMIX)."""

    def __init__(self) -> None:
        self.state = 1

    def draw(self) -> float:
        """0 <= x < 1."""
        self.state = (6364136223846793005 * self.state + 1442695040888963407) % 2**64
        return (self.state >> 11) / 2**53

    def shuffled(self, items: list) -> list:
        return [item for _, item in sorted(((self.draw(), item) for item in items), key=lambda pair: pair[0])]
