"""The cells of a plan's first pipeline, which are passes and pairs, and when their tasks run in a timeline."""

from collections.abc import Sequence

import numpy as np

from stretto import Plan
from stretto.ir.action import Op, Pair
from stretto.ir.errors import StrettoError
from stretto.ir.plan import Cell, actions_of
from stretto.program.graph import leaders
from stretto.program.task import Kind
from stretto.timeline import Span, Timeline

_OPS = {Op.F: Op.F, Op.B: Op.B, Op.I: Op.B, Op.W: Op.W}
_KINDS = {
    **dict.fromkeys((Kind.F, Kind.PAIR, Kind.SEND_F), Op.F),
    **dict.fromkeys((Kind.B, Kind.I, Kind.WGRAD, Kind.RECOMPUTE, Kind.SEND_B), Op.B),
    Kind.W: Op.W,
}
"""The pass that an action or a task belongs to."""


def first_pipeline(plan: Plan) -> list[tuple[Cell, ...]]:
    """Return the rows of the devices of one pipeline: on a mesh, of the first replica."""
    mesh = plan.placement.mesh
    if mesh is None:
        return list(plan.rows)
    return [plan.rows[mesh.device(pp=place, replica=0)] for place in range(mesh.pp)]


def chosen_cells(row: Sequence[Cell]) -> list[Cell]:
    """Return the middle one of a device's warm-up forwards, of its pairs, and of its cool-down backwards."""
    pairs = [index for index, cell in enumerate(row) if isinstance(cell, Pair)]
    if pairs:
        warm = [cell for cell in row[: pairs[0]] if actions_of(cell)[0].op is Op.F]
        cool = [cell for cell in row[pairs[-1] + 1 :] if _OPS[actions_of(cell)[0].op] is Op.B]
        if warm and cool:
            return [warm[len(warm) // 2], row[pairs[len(pairs) // 2]], cool[len(cool) // 2]]
    raise StrettoError("this figure needs a warm-up forward, a pair and a cool-down backward on the first device")


def spans_of(timeline: Timeline, cells: Sequence[Cell]) -> dict[Cell, list[Span]]:
    """Return each cell's tasks that take time: computation, exchanges between experts, and sends.

    What devices run together begins when the last of them is ready, so waiting for the others does not count.
    """
    passes = {(_OPS[a.op], a.stage, a.microbatch): cell for cell in cells for a in actions_of(cell)}
    leader, last = leaders(timeline.program), timeline.start.copy()
    np.maximum.at(last, leader, timeline.start)
    spans: dict[Cell, list[Span]] = {cell: [] for cell in cells}
    for span, start in zip(timeline.spans(), last[leader].tolist(), strict=True):
        task = span.task
        if task.kind in _KINDS and span.end > start:
            cell = passes.get((_KINDS[task.kind], task.stage, task.microbatch))
            if cell is not None:
                spans[cell].append(Span(task, start, span.end))
    for cell, own in spans.items():
        if not any(span.task.lane.name == "compute" for span in own):
            raise StrettoError(f"this timeline is not one of the plan: nothing computes {cell}")
    return spans


def extent(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the start of the first task, and the end of the last."""
    return min(span.start for span in spans), max(span.end for span in spans)
