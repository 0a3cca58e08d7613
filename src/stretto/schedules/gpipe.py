"""GPipe: all forwards, then all backwards."""

from stretto.ir.action import Action, Op
from stretto.ir.placement import looped
from stretto.ir.plan import Plan
from stretto.schedules.registry import register
from stretto.schedules.sizes import validate_sizes


@register(
    published="2018-11",
    meaning="all forwards, then all backwards",
    limits="any",
    bubble="(p−1)(F+B)",
    memory="m",
)
def gpipe(*, devices: int, microbatches: int) -> Plan:
    """All forwards, then all backwards (Huang et al. 2019).

        0F0 0F1 0F2             0B0 0B1 0B2
            1F0 1F1 1F2 1B0 1B1 1B2

    >>> str(gpipe(devices=2, microbatches=1))
    '0F0,0B0\\n1F0,1B0'
    """
    validate_sizes("gpipe", devices=devices, microbatches=microbatches)
    rows = (
        tuple(Action(device, op, k) for op in (Op.F, Op.B) for k in range(microbatches)) for device in range(devices)
    )
    return Plan(tuple(rows), looped(devices=devices, stages_per_device=1, microbatches=microbatches))
