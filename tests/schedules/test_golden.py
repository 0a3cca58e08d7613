"""Schedules against the published figures, cell by cell."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto.schedules import Op, Pair, dualpipe, interleaved

GOLDEN = Path(__file__).parent.parent / "golden"


def rows_of(plan: stretto.Plan) -> list[list[str]]:
    return [[str(cell).removesuffix("OVERLAP_F_B") for cell in row] for row in plan.rows]


def test_dualpipe_equals_the_figure() -> None:
    golden = json.loads((GOLDEN / "dualpipe_8x20.json").read_text())
    devices, half = golden["devices"], golden["microbatches"] // 2

    def ours(device: int, cell: str) -> str:
        if "&" in cell:
            return "({};{})".format(*(ours(device, part) for part in cell.split("&")))
        op, direction, number = cell[0], cell[1], int(cell[2:])
        return f"{device}{op}{number}" if direction == "d" else f"{devices - 1 - device}{op}{number + half}"

    expected = [[ours(device, cell) for cell in row] for device, row in enumerate(golden["rows"])]
    assert rows_of(dualpipe(devices=8, microbatches=20)) == expected


def test_interleaved_overlap_equals_the_figure() -> None:
    golden = json.loads((GOLDEN / "interleaved_overlap_4x2x8.json").read_text())
    assert rows_of(interleaved(devices=4, stages_per_device=2, microbatches=8, overlap=True)) == golden["rows"]


@given(st.integers(1, 6), st.integers(0, 8))
def test_dualpipe_has_the_reference_shape_at_every_size(half_devices: int, extra: int) -> None:
    devices = 2 * half_devices
    microbatches = 2 * devices + 2 * extra
    plan = dualpipe(devices=devices, microbatches=microbatches)
    for device, row in enumerate(plan.rows):
        h, reach = min(device, devices - 1 - device), devices // 2
        near_is_down = device < reach
        shape = []
        for cell in row:
            actions = [cell.forward, cell.backward] if isinstance(cell, Pair) else [cell]
            parts = []
            for action in actions:
                down = action.microbatch < microbatches // 2
                assert action.stage == (device if down else devices - 1 - device)
                near = down == near_is_down
                parts.append(action.op.value + ("" if action.op is Op.W else "0" if near else "1"))
            shape.append("&".join(parts))
        outer = reach - h - 1
        steady = ["F0&B1", "F1&B0"] * (microbatches // 2 - devices + h + 1)
        if outer == 0:
            steady[:1] = ["F0", "B1"]
        drain = ["B1", "B0"] * (h + 1)
        drain = [cell if k <= h else cell.replace("B", "I") for k, cell in enumerate(drain)]
        expected = (
            ["F0"] * (2 * outer)
            + ["F0", "F1"] * (h + 1)
            + ["I1", "W", "F1"] * outer
            + steady
            + ["B1", "F1&B0"] * outer
            + drain
            + ["W", "I0"] * outer
            + ["W"] * (h + 1)
        )
        assert shape == expected
