"""1F1B: as soon as a backward can run, it does."""

from stretto.ir.placement import looped
from stretto.ir.plan import Plan
from stretto.schedules.registry import register
from stretto.schedules.row import Row
from stretto.schedules.sizes import validate_sizes


@register(
    published="2020-06",
    meaning="1F1B: each backward as soon as it can run",
    limits="any",
    bubble="(p−1)(F+B)",
    memory="min(p−r, m)",
    aliases=("1f1b",),
)
def one_f_one_b(*, devices: int, microbatches: int) -> Plan:
    """Just enough forwards to fill the pipe, then one forward, one backward (PipeDream-Flush).

        0F0 0F1         0B0 0F2 0B1     0B2
            1F0 1B0 1F1 1B1 1F2 1B2

    >>> str(one_f_one_b(devices=2, microbatches=2))
    '0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1'
    """
    validate_sizes("one_f_one_b", devices=devices, microbatches=microbatches)
    rows = []
    for device in range(devices):
        row = Row()
        warmup = min(devices - device - 1, microbatches)
        for _ in range(warmup):
            row.forward(device)
        for _ in range(microbatches - warmup):
            row.forward(device)
            row.backward(device)
        for _ in range(warmup):
            row.backward(device)
        rows.append(tuple(row.cells))
    return Plan(tuple(rows), looped(devices=devices, stages_per_device=1, microbatches=microbatches))
