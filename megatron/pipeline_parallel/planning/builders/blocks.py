"""From a building block to a schedule, on the V placement (arXiv 2405.15362, sections 3 and 4).

A block says in which slot of a grid each rank runs F and B of its two chunks for microbatch 0; microbatch k runs `PERIOD` * k
slots later. That repeats without a collision, but leaves both ends of the schedule loose: they are packed here, at an
unchanged peak. A slot is the time of one chunk's F, B or W.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from megatron.pipeline_parallel.planning.greedy import B, Codes, F, W

PERIOD = 6


class Offsets(NamedTuple):
    """Slots in which one rank runs microbatch 0."""

    f0: int
    f1: int
    b1: int
    b0: int


Block = list[Offsets]
"""A rank each."""


def v_min(p: int) -> Block:
    """Least memory, floor((p+4)/3) microbatches; nothing to spare when times are unequal."""
    wait = 2 if p % 3 == 0 else 0
    return [Offsets(i, 2 * p - 1 - i, 2 * p + wait + i, 4 * p - 1 + wait - i) for i in range(p)]


def v_half(p: int) -> Block:
    """Half of 1F1B's memory, floor((p+2)/2) microbatches."""
    wait = 3 if p % 2 == 0 else 0
    return [Offsets(2 * i, 3 * p - 2 - i, 3 * p - 1 + wait + 2 * i, 6 * p - 2 + wait - i) for i in range(p)]


def one_f_one_b_v(p: int) -> list[Block]:
    """Two thirds of 1F1B's memory with a joint backward of two slots, which fills the period to the last slot; in several ways.

    No constant step from rank to rank avoids collisions, so the steps are searched: a step of each op that takes every rank from one
    arrangement of the period to another, at the least sum of steps (memory is proportional to it), spread evenly over both chunks.
    Of equal sums one with large steps of F of chunk 0, and of these one whose steps keep changing, by a fixed mix of numbers: long
    runs of equal steps did worse with messages that take time. All blocks whose cost is within half a period of the least are returned, the cheapest first.
    """
    steps = [(a, b, c, d) for a, b in product(range(1, 5), repeat=2) for c, d in product(range(2, 6), repeat=2)]
    # A state: where f1, b1 and b0 lie after f0, and by how much chunk 1's steps are ahead of chunk 0's; its cost: the steps so far.
    best: dict[tuple[int, int, int, int, int], tuple[tuple[int, int, int], Block]] = {}
    for b0 in range(PERIOD):
        for f1 in range(PERIOD):
            if _fits(f1, (f1 + 1) % PERIOD, b0):
                # On rank 0, B of chunk 1 follows its F at once.
                best[f1, (f1 + 1) % PERIOD, b0, 0, 0] = ((0, 0, 0), [])
    for _ in range(p - 1):
        following: dict[tuple[int, int, int, int, int], tuple[tuple[int, int, int], Block]] = {}
        for (f1, b1, b0, ahead, most), (cost, path) in best.items():
            for a, b, c, d in steps:
                state = ((f1 - a - b) % PERIOD, (b1 + c - a) % PERIOD, (b0 - d - a) % PERIOD)
                now_ahead = ahead + b + c - a - d
                if not _fits(*state) or abs(now_ahead) > PERIOD:
                    continue
                key = (*state, now_ahead, max(most, now_ahead))
                mix = (62 * a + 31 * c + 66 * d * len(path)) % 97
                total = (cost[0] + a + b + c + d, cost[1] - a, cost[2] + mix)
                if key not in following or total < following[key][0]:
                    following[key] = (total, path + [Offsets(a, b, c, d)])
        best = following
    ends = []
    for (f1, b1, b0, _, most), (cost, path) in best.items():
        # On the last rank: F of chunk 1 after F of chunk 0, and B of chunk 0 after B of chunk 1, each as soon as residues allow.
        f_gap = 1 + (f1 - 1) % PERIOD
        b_gap = 2 + (b0 - b1 - 2) % PERIOD
        ends.append((cost[0] + f_gap + b_gap + most, _walk(path, f_gap, b_gap)))
    ends.sort(key=lambda end: end[0])
    return [block for cost, block in ends if cost <= ends[0][0] + PERIOD // 2]


def _fits(f1: int, b1: int, b0: int) -> bool:
    """Whether two F of one slot, at 0 and `f1`, and two B of two slots share a period without a collision."""
    return len({0, f1, b1, (b1 + 1) % PERIOD, b0, (b0 + 1) % PERIOD}) == PERIOD


def _walk(steps: list[Offsets], f_gap: int, b_gap: int) -> Block:
    """Offsets from the steps between neighbouring ranks and the gaps on the last rank."""
    p = len(steps) + 1
    f0 = [sum(step.f0 for step in steps[:i]) for i in range(p)]
    f1 = [f0[-1] + f_gap + sum(step.f1 for step in steps[i:]) for i in range(p)]
    b1 = [f1[0] + 1 + sum(step.b1 for step in steps[:i]) for i in range(p)]
    b0 = [b1[-1] + b_gap + sum(step.b0 for step in steps[i:]) for i in range(p)]
    return [Offsets(*offsets) for offsets in zip(f0, f1, b1, b0)]


class _Cell(NamedTuple):
    kind: int
    stage: int
    microbatch: int


def repeat(block: Block, num_microbatches: int, peak: int, *, joint: bool = False) -> Codes:
    """The order of every rank: the block repeated, its ends packed; packing lets no rank hold more than `peak` chunks."""
    grid = _Grid(block, num_microbatches, joint)
    grid.fill_w()
    grid.pack(0, block[0].b0, peak)
    grid.pack(grid.at[_Cell(F, 0, num_microbatches - 1)], grid.width, peak)
    if not joint:
        grid.free_tails()
    return grid.codes()


class _Grid:
    """Rank x slot. A cell that takes two slots is entered in the first, and keeps the second busy."""

    def __init__(self, block: Block, num_microbatches: int, joint: bool) -> None:
        self.p, self.m = len(block), num_microbatches
        self.n = 2 * self.p
        self.joint = joint
        self.rank = [stage if stage < self.p else self.n - 1 - stage for stage in range(self.n)]
        # A few W are left over when the last B ends.
        self.width = PERIOD * (num_microbatches + 2) + max(offsets.b0 for offsets in block) + 4 * self.p
        self.cells: list[list[_Cell | None]] = [[None] * self.width for _ in block]
        self.busy = [[False] * self.width for _ in block]
        self.at: dict[_Cell, int] = {}
        for i, offsets in enumerate(block):
            for kind, stage, slot in (
                (F, i, offsets.f0),
                (F, self.n - 1 - i, offsets.f1),
                (B, self.n - 1 - i, offsets.b1),
                (B, i, offsets.b0),
            ):
                for k in range(num_microbatches):
                    self.put(_Cell(kind, stage, k), slot + PERIOD * k)

    def length(self, cell: _Cell) -> int:
        return 2 if self.joint and cell.kind == B else 1

    def put(self, cell: _Cell, slot: int) -> None:
        rank = self.rank[cell.stage]
        for taken in range(slot, slot + self.length(cell)):
            assert not self.busy[rank][taken], f"two cells in slot {taken} of rank {rank}"
            self.busy[rank][taken] = True
        self.cells[rank][slot] = cell
        self.at[cell] = slot

    def take(self, cell: _Cell) -> int:
        rank, slot = self.rank[cell.stage], self.at.pop(cell)
        self.cells[rank][slot] = None
        self.busy[rank][slot : slot + self.length(cell)] = [False] * self.length(cell)
        return slot

    def first_free(self, rank: int, slot: int, length: int) -> int:
        while any(self.busy[rank][slot : slot + length]):
            slot += 1
        return slot

    def ready(self, cell: _Cell) -> int:
        """First slot after what this cell needs, and after the microbatch before it."""
        kind, stage, k = cell
        needs = [_Cell(kind, stage, k - 1)] if k else []
        if kind == F and stage:
            needs.append(_Cell(F, stage - 1, k))
        elif kind == B:
            needs.append(_Cell(B, stage + 1, k) if stage + 1 < self.n else _Cell(F, stage, k))
        elif kind == W:
            needs.append(_Cell(B, stage, k))
        return max((self.at[need] + self.length(need) for need in needs), default=0)

    def fill_w(self) -> None:
        """Each W that is not there yet into the first free slot after its B and after the W before it."""
        if self.joint:
            return
        for rank, cells in enumerate(self.cells):
            done = [cell for cell in cells if cell is not None and cell.kind == B]
            slot = 0
            for cell in done:
                w = _Cell(W, cell.stage, cell.microbatch)
                if w not in self.at:
                    slot = self.first_free(rank, max(slot, self.at[cell] + 1), 1)
                    self.put(w, slot)

    def held(self, rank: int) -> list[int]:
        """Chunks held in each slot: from F's slot to the end of W's, or of B's where joint."""
        change = [0] * (self.width + 1)
        last = B if self.joint else W
        for slot, cell in enumerate(self.cells[rank]):
            if cell is not None and cell.kind == F:
                change[slot] += 1
            elif cell is not None and cell.kind == last:
                change[slot + self.length(cell)] -= 1
        held = 0
        for slot in range(self.width):
            held += change[slot]
            change[slot] = held
        return change

    def pack(self, first: int, end: int, peak: int) -> None:
        """Move what starts in slots first <= s < end to the earliest free slots, an F only as far as `peak` allows."""
        held = [self.held(rank) for rank in range(self.p)]
        last = B if self.joint else W
        for _, cell in self.between(lambda rank: (first, end)):
            rank = self.rank[cell.stage]
            slot = self.take(cell)
            earliest = min(slot, self.ready(cell))
            if cell.kind == F:
                room = slot
                while room > earliest and held[rank][room - 1] < peak:
                    room -= 1
                earliest = room
            target = min(slot, self.first_free(rank, earliest, self.length(cell)))
            self.put(cell, target)
            if cell.kind == F:
                for moved in range(target, slot):
                    held[rank][moved] += 1
            elif cell.kind == last:
                for moved in range(target + self.length(cell), slot + self.length(cell)):
                    held[rank][moved] -= 1

    def free_tails(self) -> None:
        """After its last F a rank's memory only falls: there every B goes as early as it can, and W into what is left."""
        last_f = [
            max(slot for slot, cell in enumerate(cells) if cell is not None and cell.kind == F) for cells in self.cells
        ]
        tails = self.between(lambda rank: (last_f[rank], self.width))
        for _, cell in tails:
            if cell.kind == W:
                self.take(cell)
        for _, cell in tails:
            if cell.kind == B:
                slot = self.take(cell)
                rank = self.rank[cell.stage]
                self.put(cell, min(slot, self.first_free(rank, max(self.ready(cell), last_f[rank]), 1)))
        self.fill_w()

    def between(self, window: Callable[[int], tuple[int, int]]) -> list[tuple[int, _Cell]]:
        """(slot, cell) of what starts within each rank's window, by slot."""
        found = []
        for rank, cells in enumerate(self.cells):
            first, end = window(rank)
            found += [(slot, cells[slot]) for slot in range(first, end) if cells[slot] is not None]
        return sorted(found, key=lambda item: item[0])

    def codes(self) -> Codes:
        return [[cell.kind * self.n + cell.stage for cell in cells if cell is not None] for cells in self.cells]


def peak_of(codes: Codes, *, joint: bool = False) -> int:
    """Most chunks that any rank holds, each from F to the end of W, or of B where joint."""
    n = 2 * len(codes)
    last = B if joint else W
    most = 0
    for order in codes:
        held = 0
        for code in order:
            held += (code // n == F) - (code // n == last)
            most = max(most, held)
    return most
