"""Where a plan runs each pass."""

import stretto
from stretto.schedules import Pair


def places_of(plan: stretto.Plan) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Device and place in its row of every (F or B, stage, microbatch)."""
    found = {}
    for device, row in enumerate(plan.rows):
        for at, cell in enumerate(row):
            actions = (cell.forward, cell.backward) if isinstance(cell, Pair) else (cell,)
            for action in actions:
                if action.op.name in "FBI":
                    found["F" if action.op.name == "F" else "B", action.stage, action.microbatch] = device, at
    return found
