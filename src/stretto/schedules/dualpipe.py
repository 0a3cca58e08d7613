"""DualPipe and DualPipeV: two streams of microbatches over one line of devices, woven in pairs."""

from stretto.ir.errors import PlanError
from stretto.ir.placement import folded, opposed
from stretto.ir.plan import Cell, Plan
from stretto.schedules.registry import register
from stretto.schedules.row import Row
from stretto.schedules.sizes import validate_sizes


@register(
    published="2024-12",
    meaning="DeepSeek-V3's: two opposite pipelines over the same devices, woven; parameters twice",
    limits="p even, m even, m ≥ 2p; bubble at F=I=W, F&B=3F",
    bubble="(p/2−1)(F&B+B−3W)",
    memory="p+1",
    even=True,
    rounds=2,
)
def dualpipe(*, devices: int, microbatches: int) -> Plan:
    """Two opposite pipelines over the same devices (DeepSeek-V3).

    Microbatches 0…M/2−1 enter at device 0 and flow down, M/2…M−1 enter at the last device and flow
    up. Device k holds stage k for the first and stage P−1−k for the second.

    >>> print(str(dualpipe(devices=2, microbatches=4)).split()[0])
    0F0,1F2,0F1,1B2,(1F3;0B0)OVERLAP_F_B,1B3,0I1,0W1
    """
    validate_sizes("dualpipe", devices=devices, microbatches=microbatches)
    if devices % 2:
        near = f"{devices - 1} or {devices + 1}" if devices > 1 else "2"
        raise PlanError(
            f"dualpipe needs an even number of devices (got {devices}); use {near}, or dualpipev for {devices}"
        )
    if microbatches % 2 or microbatches < 2 * devices:
        legal = max(2 * devices, microbatches + 1)
        near = f"{legal - 2} or {legal}" if microbatches > 2 * devices else f"{2 * devices}"
        raise PlanError(
            f"dualpipe on {devices} devices needs an even number of microbatches, at least {2 * devices} "
            f"(got {microbatches}); use {near}"
        )
    half = microbatches // 2
    rows = []
    for device in range(devices):
        mirror = devices - 1 - device
        # A device's near route is the one that enters on its side of the line.
        down, up = {device: 0}, {mirror: half}
        near_stage, far_stage = (device, mirror) if device < mirror else (mirror, device)
        row = _row(
            depth=min(device, mirror),
            ranks=devices // 2,
            microbatches=half,
            near=near_stage,
            far=far_stage,
            first=down | up,
        )
        rows.append(row)
    return Plan(tuple(rows), opposed(devices=devices, microbatches=microbatches))


@register(
    published="2025-03",
    meaning="DualPipe cut in half: one copy of the model",
    limits="m ≥ 2p; bubble at F=I=W, F&B=3F",
    bubble="(p−1)(F&B+B−3W)/2",
    memory="p+½",
    stages_per_device=2,
    rounds=2,
)
def dualpipev(*, devices: int, microbatches: int) -> Plan:
    """DualPipe cut in half: each device holds stages k and 2P−1−k of one copy of the model.

    >>> print(dualpipev(devices=1, microbatches=2))
    0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1
    """
    validate_sizes("dualpipev", devices=devices, microbatches=microbatches)
    if microbatches < 2 * devices:
        raise PlanError(
            f"dualpipev on {devices} devices needs at least {2 * devices} microbatches "
            f"(got {microbatches}); use {2 * devices}"
        )
    rows = (
        _row(
            depth=device,
            ranks=devices,
            microbatches=microbatches,
            near=device,
            far=2 * devices - 1 - device,
        )
        for device in range(devices)
    )
    return Plan(tuple(rows), folded(devices=devices, microbatches=microbatches))


def _row(
    *,
    depth: int,
    ranks: int,
    microbatches: int,
    near: int,
    far: int,
    first: dict[int, int] | None = None,
) -> tuple[Cell, ...]:
    """Return one device's row; `depth` counts devices from its end of the line, `microbatches` is per stream."""
    row = Row(first)
    outside = ranks - depth - 1  # devices between this one and the middle
    for _ in range(2 * outside):  # fill
        row.forward(near)
    for _ in range(depth + 1):  # both streams fill
        row.forward(near)
        row.forward(far)
    for _ in range(outside):  # the far stream turns round
        row.input(far)
        row.weight()
        row.forward(far)
    for k in range(microbatches - 2 * ranks + depth + 1):  # steady
        if k == 0 and not outside:  # in the middle, sending sooner beats weaving
            row.forward(near)
            row.backward(far)
        else:
            row.pair(forward=near, backward=far)
        row.pair(forward=far, backward=near)
    for _ in range(outside):  # the near stream has run dry
        row.backward(far)
        row.pair(forward=far, backward=near)
    for k in range(2 * depth + 2):  # both drain, the second half holding weight parts back
        (row.input if k > depth else row.backward)(near if k % 2 else far)
    for _ in range(outside):
        row.weight()
        row.input(near)
    while row.pending:
        row.weight()
    return tuple(row.cells)
