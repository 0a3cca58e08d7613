"""ZB-H1 and ZB-H2: the weight part of the backward moves into the bubble."""

from stretto.ir.placement import looped
from stretto.ir.plan import Plan
from stretto.schedules.registry import register
from stretto.schedules.row import Row
from stretto.schedules.sizes import validate_sizes


@register(
    published="2024-01",
    meaning="1F1B with weight gradients moved into the bubble",
    limits="any; formulas for m ≥ p, W ≤ min(F,I)",
    bubble="(p−1)(F+I−W)",
    memory="p−r, and r between I and W",
    aliases=("zbh1",),
)
def zb_h1(*, devices: int, microbatches: int) -> Plan:
    """1F1B's memory, a third of its bubble (Qi et al. 2023).

    Device r fills the pipe as 1F1B does and keeps its weight parts r behind its input parts.

        F F I W F I W I W
          F I F I W F I W W
    """
    validate_sizes("zb_h1", devices=devices, microbatches=microbatches)
    return _split(devices=devices, microbatches=microbatches, depth=1)


@register(
    published="2024-01",
    meaning="no bubble within a device's span, for twice the memory",
    limits="any; formulas for m ≥ 2p−1, W ≤ min(F,I)",
    bubble="(p−1)(F+I−2W) of its span",
    memory="2p−2r−1, and 2r between I and W",
    aliases=("zbh2",),
)
def zb_h2(*, devices: int, microbatches: int) -> Plan:
    """No bubble within a device's own span, for twice 1F1B's memory (Qi et al. 2023).

    Like ZB-H1, with twice the forwards up front and twice the weight parts held back.
    """
    validate_sizes("zb_h2", devices=devices, microbatches=microbatches)
    return _split(devices=devices, microbatches=microbatches, depth=2)


def _split(*, devices: int, microbatches: int, depth: int) -> Plan:
    rows = []
    for device in range(devices):
        row = Row()
        forwards = min(depth * (devices - device - 1), microbatches)
        for _ in range(forwards):
            row.forward(device)
        for _ in range(microbatches):
            if forwards < microbatches:
                row.forward(device)
                forwards += 1
            row.input(device)
            if row.pending > depth * device:
                row.weight()
        while row.pending:
            row.weight()
        rows.append(tuple(row.cells))
    return Plan(tuple(rows), looped(devices=devices, stages_per_device=1, microbatches=microbatches))
