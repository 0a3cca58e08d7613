"""Interleaved 1F1B: several stages per device, plain or woven with one extra warm-up forward."""

from collections.abc import Iterator
from itertools import chain, pairwise, repeat

from stretto.ir.action import Action, Op, Pair
from stretto.ir.placement import looped
from stretto.ir.plan import Cell, Plan
from stretto.schedules.registry import register
from stretto.schedules.sizes import validate_sizes


@register(
    published="2021-04",
    meaning="1F1B over v stages per device; with overlap, Kimi K2's: one more warm-up forward, steady state in pairs",
    limits="any; bubble for m ≥ p, memory for p∣m; overlap for p∣m, its bubble for m ≥ 2p",
    bubble="(p−1)(F+B)/v; overlap: (2(p−r−1)F&B−(p−2r−1)(F+B))/v",
    memory="min(pv+p−1−2r, mv)/v; overlap: min((v+1)p−2r, mv)/v",
    stages_per_device=2,
    variable=True,
)
def interleaved(*, devices: int, microbatches: int, stages_per_device: int = 2, overlap: bool = False) -> Plan:
    """1F1B over several stages per device, stage s on device s mod devices (Megatron-LM).

    Microbatches go round in groups: a group passes a device's first stage, then its second, and so
    on. `overlap=True` is Kimi K2's form: one more forward before the first backward, which makes
    the forward and the backward of each cell of the steady state independent, so that they become a pair.

    A group is `devices` microbatches if that divides their number. Otherwise there are as many
    groups of at least `devices` as fit, and their sizes differ by at most one.

    >>> print(interleaved(devices=1, microbatches=2, stages_per_device=1, overlap=True))
    0F0,(0F1;0B0)OVERLAP_F_B,0B1
    """
    validate_sizes("interleaved", devices=devices, microbatches=microbatches, stages_per_device=stages_per_device)
    groups = _groups(devices=devices, microbatches=microbatches)
    rows: list[tuple[Cell, ...]] = []
    for device in range(devices):
        stages = [device + devices * chunk for chunk in range(stages_per_device)]
        forwards = list(_visits(Op.F, stages, groups))
        backwards = list(_visits(Op.B, stages[::-1], groups))
        # The last device must reach its last stage's first forward; each hop before it adds one forward each way.
        warmup = (stages_per_device - 1) * max(map(len, groups)) + 2 * (devices - device - 1) + overlap
        warmup = min(warmup, len(forwards))
        cells: list[Cell] = list(forwards[:warmup])
        steady = zip(forwards[warmup:], backwards, strict=False)
        if overlap:
            cells += (Pair(forward, backward) for forward, backward in steady)
        else:
            cells += (action for both in steady for action in both)
        cells += backwards[len(forwards) - warmup :]
        rows.append(tuple(cells))
    return Plan(tuple(rows), looped(devices=devices, stages_per_device=stages_per_device, microbatches=microbatches))


def _groups(*, devices: int, microbatches: int) -> list[range]:
    count = max(1, microbatches // devices)
    bounds = [-(-microbatches * k // count) for k in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def _visits(op: Op, stages: list[int], groups: list[range]) -> Iterator[Action]:
    return chain.from_iterable(map(Action, repeat(stage), repeat(op), group) for group in groups for stage in stages)
