"""ZB-V, V-Half and V-Min: zero-bubble schedules on a "V", two stages per device, three memory levels."""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from stretto.ir.action import Action, Op
from stretto.ir.placement import folded
from stretto.ir.plan import Cell, Plan, actions_of
from stretto.schedules.registry import register
from stretto.schedules.row import Row
from stretto.schedules.sizes import validate_sizes

_PERIOD = 6  # F, I and W of two stages: a device's work for one microbatch, each taken as one tick


@register(
    published="2024-01",
    meaning="stages in a \"V\": no bubble within a device's span at 1F1B's memory",
    limits="any; formulas for m ≥ 2p−1, F=I=W",
    bubble="0 of its span",
    memory="p",
    stages_per_device=2,
    aliases=("zbv",),
)
def zb_v(*, devices: int, microbatches: int) -> Plan:
    """1F1B's memory and, at F = I = W, no bubble within a device's span (Qi et al. 2023).

    Fewer than 2P−1 microbatches are legal: the rows are built for 2P−1 and the surplus is left out.
    """
    validate_sizes("zb_v", devices=devices, microbatches=microbatches)
    total = max(microbatches, 2 * devices - 1)
    rows = []
    for device in range(devices):
        down, up = device, 2 * devices - 1 - device
        ahead = devices - device
        row = Row()
        for _ in range(2 * ahead - 1):  # fill the way down
            row.forward(down)
        for _ in range(device):  # and the way up
            row.forward(up)
            row.forward(down)
        for _ in range(ahead):  # the way up turns round
            row.forward(up)
            row.input(up)
            row.weight()
        for k in range(total - devices):  # steady
            if k <= total - devices - ahead:
                row.forward(down)
            row.input(down)
            row.weight()
            row.forward(up)
            row.input(up)
            row.weight()
        for _ in range(device):  # drain, holding weight parts back
            row.input(down)
            row.input(up)
        for _ in range(ahead):
            row.input(down)
            row.weight(down)
        for stage in (up, down):
            for _ in range(device):
                row.weight(stage)
        rows.append(tuple(cell for cell in row.cells if actions_of(cell)[0].microbatch < microbatches))
    return Plan(tuple(rows), folded(devices=devices, microbatches=microbatches))


@register(
    published="2024-05",
    meaning='the "V" at about half of 1F1B\'s memory',
    limits="any; formulas for p ≥ 3, m ≥ p, F=I=W",
    bubble="(3p−7)/2 for even p, (3p−4)/2 for odd",
    memory="p/2+1 for even p, (p+1)/2 for odd",
    stages_per_device=2,
)
def v_half(*, devices: int, microbatches: int) -> Plan:
    """About half of 1F1B's memory (Qi et al. 2024)."""
    validate_sizes("v_half", devices=devices, microbatches=microbatches)
    turn = 0 if devices % 2 else 3  # the wait that keeps the four passes in different ticks
    blocks = [
        _Block(
            down=2 * device,
            up=3 * devices - 2 - device,
            back_up=3 * devices - 1 + turn + 2 * device,
            back_down=6 * devices - 2 + turn - device,
        )
        for device in range(devices)
    ]
    return Plan(_squeezed(blocks, microbatches), folded(devices=devices, microbatches=microbatches))


@register(
    published="2024-05",
    meaning='the "V" at about a third of 1F1B\'s memory',
    limits="any; formulas for p ≥ 3, m ≥ p, F=I=W",
    bubble="(6p−1)/2−3k, k = ⌈(p+2)/3⌉",
    memory="k = ⌈(p+2)/3⌉",
    stages_per_device=2,
)
def v_min(*, devices: int, microbatches: int) -> Plan:
    """About a third of 1F1B's memory, the least there is (Qi et al. 2024)."""
    validate_sizes("v_min", devices=devices, microbatches=microbatches)
    turn = (2 - 2 * devices) % _PERIOD
    blocks = [
        _Block(
            down=device,
            up=2 * devices - 1 - device,
            back_up=2 * devices + turn + device,
            back_down=4 * devices - 1 + turn - device,
        )
        for device in range(devices)
    ]
    # Without a wait at the turn the blocks leave no slack, and pulling a forward ahead only delays others.
    rows = _squeezed(blocks, microbatches) if turn else _repeated(blocks, microbatches)
    return Plan(rows, folded(devices=devices, microbatches=microbatches))


@dataclass(frozen=True, slots=True)
class _Block:
    """The ticks at which a device runs microbatch 0: both forwards, both input parts.

    Microbatch k follows 6k ticks later. The four differ modulo 6, which leaves two ticks of every
    six for weight parts: the "building block" of the controllable-memory paper.
    """

    down: int
    up: int
    back_up: int
    back_down: int

    def passes(self, device: int, devices: int) -> list[tuple[int, int, Op]]:
        """Return (tick, stage, op) of each pass of microbatch 0."""
        mirror = 2 * devices - 1 - device
        return [
            (self.down, device, Op.F),
            (self.up, mirror, Op.F),
            (self.back_up, mirror, Op.I),
            (self.back_down, device, Op.I),
        ]


def _repeated(blocks: list[_Block], microbatches: int) -> tuple[tuple[Cell, ...], ...]:
    """Return rows that repeat each block once per microbatch, with weight parts in the free ticks."""
    rows: list[tuple[Cell, ...]] = []
    for device, block in enumerate(blocks):
        ticks = sorted(
            (tick + _PERIOD * k, Action(stage, op, k))
            for tick, stage, op in block.passes(device, len(blocks))
            for k in range(microbatches)
        )
        row: list[Cell] = []
        weights: deque[Action] = deque()
        for (tick, action), (following, _) in pairwise([*ticks, (2 * ticks[-1][0], None)]):
            assert action is not None
            row.append(action)
            if action.op is Op.I:
                weights.append(Action(action.stage, Op.W, action.microbatch))
            for _ in range(min(len(weights), following - tick - 1)):
                row.append(weights.popleft())
        rows.append((*row, *weights))
    return tuple(rows)


def _squeezed(blocks: list[_Block], microbatches: int) -> tuple[tuple[Cell, ...], ...]:
    """Return the repeated blocks without the slack at their ends.

    Tick by tick, every device runs the ready pass that comes first in its blocks, or else a weight
    part. A forward also needs free memory: a device never holds more passes than its blocks would,
    of its first stage or in total. A wary device runs a weight part before a forward that would
    take the last of its memory. That is better for V-Half from 14 devices on and worse elsewhere,
    so both variants are tried and the shorter one is kept.
    """
    variants = [_squeeze(blocks, microbatches, wary=wary) for wary in (False, True)]
    return min(variants, key=lambda variant: variant[0])[1]


def _squeeze(blocks: list[_Block], microbatches: int, *, wary: bool) -> tuple[int, tuple[tuple[Cell, ...], ...]]:
    """Squeeze the blocks; return how many ticks the rows take, and the rows."""
    repeated = _repeated(blocks, microbatches)
    line = [
        _Squeezer(device, block.passes(device, len(blocks)), row, wary=wary)
        for device, (block, row) in enumerate(zip(blocks, repeated, strict=True))
    ]
    stages = 2 * len(blocks)
    ticks = 0
    done: set[tuple[int, bool, int]] = set()  # (stage, is a forward, microbatch)
    while any(device.left for device in line):
        chosen = [device.choose(done, stages) for device in line]
        assert any(chosen), "the blocks' own order always leaves something to run"
        for action in chosen:
            if action is not None and action.op is not Op.W:
                done.add((action.stage, action.op is Op.F, action.microbatch))
        ticks += 1
    return ticks, tuple(tuple(device.row) for device in line)


class _Squeezer:
    """The state of one device while its row is squeezed."""

    def __init__(self, device: int, passes: list[tuple[int, int, Op]], blocks: tuple[Cell, ...], *, wary: bool) -> None:
        self.first = device
        self.wary = wary
        self.passes = passes
        self.left = len(blocks)
        self.row: list[Cell] = []
        self._microbatches = len(blocks) // _PERIOD
        self._next = [0] * len(passes)
        self._weights: deque[Action] = deque()
        self._held, self._held_first = 0, 0  # from forward to weight part: in total, of the first stage
        self._most, self._most_first = _peaks(blocks, device)

    def choose(self, done: set[tuple[int, bool, int]], stages: int) -> Action | None:
        ready = [
            (tick + _PERIOD * self._next[at], at)
            for at, (tick, stage, op) in enumerate(self.passes)
            if self._next[at] < self._microbatches and self._can_run(stage, op, self._next[at], done, stages)
        ]
        at = min(ready)[1] if ready else None
        if at is not None and self.wary and self._weights and self._held == self._most - 1:
            at = None if self.passes[at][2] is Op.F else at
        if at is not None:
            _, stage, op = self.passes[at]
            action = Action(stage, op, self._next[at])
            self._next[at] += 1
        elif self._weights:
            action = self._weights.popleft()
        else:
            return None
        self._account(action)
        return action

    def _can_run(self, stage: int, op: Op, microbatch: int, done: set[tuple[int, bool, int]], stages: int) -> bool:
        if op is Op.F:
            if self._held >= self._most or (stage == self.first and self._held_first >= self._most_first):
                return False
            return stage == 0 or (stage - 1, True, microbatch) in done
        if (stage, True, microbatch) not in done:
            return False
        return stage == stages - 1 or (stage + 1, False, microbatch) in done

    def _account(self, action: Action) -> None:
        self.row.append(action)
        self.left -= 1
        if action.op is Op.I:
            self._weights.append(Action(action.stage, Op.W, action.microbatch))
            return
        change = 1 if action.op is Op.F else -1
        self._held += change
        self._held_first += change if action.stage == self.first else 0


def _peaks(row: tuple[Cell, ...], first: int) -> tuple[int, int]:
    """Return the most passes a row holds at once, from forward to weight part: in total, of its first stage."""
    held = held_first = peak = peak_first = 0
    for cell in row:
        (action,) = actions_of(cell)
        change = {Op.F: 1, Op.W: -1}.get(action.op, 0)
        held += change
        held_first += change if action.stage == first else 0
        peak, peak_first = max(peak, held), max(peak_first, held_first)
    return peak, peak_first
