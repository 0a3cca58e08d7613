"""Kimi K2's figure: the grid of a woven schedule, with three of its cells enlarged into their lanes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stretto.draw.canvas import Box, bare, figure_at, legend, paint, write_labels
from stretto.draw.lanes import ROWS, is_backward, short_name
from stretto.ir.errors import StrettoError
from stretto.program.task import BACKWARDS, FORWARDS, Kind, Task
from stretto.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORWARD, _BACKWARD = ("#5b9bd5", "#9dc3e6"), ("#e06666", "#f4aaaa")  # a device's first stage, its others
_TRANSFER, _EXPERTS = "#70ad47", "#ffd966"
_LEGEND = {
    "Forward pass": _FORWARD[0],
    "Backward pass": _BACKWARD[0],
    "PP communication": _TRANSFER,
    "EP dispatch and combine": _EXPERTS,
}
_OUTLINE = "#222222"
_GAP = 0.1  # between two insets, of the figure's width
_COMPUTE, _COMM, _COPY = range(3)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A pass or pair of the grid: where it is drawn, and what it does."""

    span: Span
    forward: tuple[int, int] | None
    backward: tuple[int, int] | None
    """Stage and microbatch, where it has one."""


def draw_insets(grid: Timeline, detail: Timeline, path: Path, *, label: str = "VPP + 1 warmup") -> None:
    """Write an SVG or PNG of a plan's timeline, and above it of a warm-up forward, a pair and a cool-down backward of
    the first device as they are in `detail`, a timeline of the same plan in phases. Microbatches count from 1.
    """
    cells = _chosen(grid)
    length = grid.makespan
    width = float(np.clip(0.16 * length, 9.0, 24.0))
    begin, devices = float(grid.start.min()), grid.program.devices
    boxes = [box for span in grid.spans() for box in _grid_boxes(span, begin, devices)]
    insets = [_lanes_of(detail, cell) for cell in cells]
    lengths = [max(box.start + box.width for box in inset) for inset in insets]
    with figure_at(path, width, 0.33 * devices + 2.6, (1.35, 0.33 * devices)) as (figure, (above, below)):
        paint(below, boxes)
        write_labels(below, boxes, points=72 * width / (1.08 * length))
        bare(below, length=length, rows=devices)
        below.set_yticks(np.arange(devices) + 0.5, [f"Device {device}" for device in range(devices)])
        below.set_ylabel(label)
        below.set_xlabel("Time →", loc="left")
        above.axis("off")
        left, room = 0.0, 1 - _GAP * (len(insets) - 1)
        for cell, inset, time in zip(cells, insets, lengths, strict=True):
            share = room * time / sum(lengths)
            axes = above.inset_axes((left, 0.0, share, 1.0))
            _inset(axes, inset, time, points=72 * 0.9 * width * share / time, names=left == 0)
            _outline(figure, below, axes, cell, begin)
            left += share + _GAP
        legend(figure, _LEGEND)


def _chosen(grid: Timeline) -> list[_Cell]:
    """From the middle of the first device's warm-up, of its pairs, and of its cool-down."""
    cells = []
    for span in grid.spans():
        task = span.task
        if task.device == 0 and task.kind in (*FORWARDS, *BACKWARDS):
            own = (task.stage, task.microbatch)
            backward = own if task.kind in (Kind.B, Kind.I) else task.backward
            cells.append(_Cell(span, own if task.kind in FORWARDS else None, backward))
    pairs = [k for k, cell in enumerate(cells) if cell.forward and cell.backward]
    warm = [cell for cell in cells[: pairs[0] if pairs else 0] if cell.forward]
    cool = [cell for cell in cells[pairs[-1] + 1 if pairs else 0 :] if cell.backward]
    if not pairs or not warm or not cool:
        raise StrettoError("this figure needs a warm-up forward, a pair and a cool-down backward on the first device")
    return [warm[len(warm) // 2], cells[pairs[len(pairs) // 2]], cool[len(cool) // 2]]


def _grid_boxes(span: Span, begin: float, devices: int) -> Iterator[Box]:
    task, start, length = span.task, span.start - begin, span.end - span.start
    if length <= 0 or task.lane.name != "compute":
        return

    def shade(shades: tuple[str, str], stage: int) -> str:
        return shades[stage >= devices]

    if task.backward is not None:
        stage, microbatch = task.backward
        yield Box(task.device, start, length / 3, shade(_FORWARD, task.stage), str(task.microbatch + 1))
        yield Box(task.device, start + length / 3, length * 2 / 3, shade(_BACKWARD, stage), str(microbatch + 1))
    else:
        shades = _BACKWARD if is_backward(task) else _FORWARD
        yield Box(task.device, start, length, shade(shades, task.stage), str(task.microbatch + 1))


def _lanes_of(detail: Timeline, cell: _Cell) -> list[Box]:
    """What one cell is in phases, in three rows, from its first start on; and the copies that run meanwhile."""
    spans = [span for span in detail.spans() if span.task.device == 0 and span.end > span.start]
    own = [span for span in spans if _belongs(span.task, cell)]
    if not any(span.task.phase for span in own):
        raise StrettoError("this figure needs a timeline in phases for its details: lower the plan with layers")
    begin, end = min(span.start for span in own), max(span.end for span in own)
    copies = [span for span in spans if span.task.kind in (Kind.OFFLOAD, Kind.ONLOAD)]
    boxes: list[Box] = []
    for span in (*own, *copies):
        start, stop = max(span.start, begin), min(span.end, end)
        if stop <= start:
            continue
        box = _lane_box(span.task, start - begin, stop - start)
        if boxes and _continues(boxes[-1], box):
            before = boxes.pop()
            box = replace(before, width=max(before.width, box.start + box.width - before.start))
        boxes.append(box)
    return boxes


def _continues(before: Box, box: Box) -> bool:
    """Whether two boxes are better shown as one: weight gradients one after the other, sends beside each other."""
    alike = (before.row, before.label) == (box.row, box.label) and box.label in ("WGrad", "PP")
    return alike and box.start <= before.start + before.width + 1e-9


def _belongs(task: Task, cell: _Cell) -> bool:
    who = (task.stage, task.microbatch)
    if task.kind in (Kind.F, Kind.SEND_F):
        return who == cell.forward
    return task.kind in (Kind.B, Kind.I, Kind.WGRAD, Kind.RECOMPUTE, Kind.SEND_B) and who == cell.backward


def _lane_box(task: Task, start: float, length: float) -> Box:
    name, back = short_name(task), is_backward(task)
    match task.lane.name:
        case "compute":
            return Box(_COMPUTE, start, length, (_BACKWARD if back else _FORWARD)[0], name)
        case "comm":
            return Box(_COMM, start, length, _EXPERTS, name)
        case "send":
            return Box(_COMM, start, length, _TRANSFER, name)
        case _:
            half = 0.5 * (task.kind is Kind.ONLOAD)
            return Box(_COPY + half, start, length, (_BACKWARD if back else _FORWARD)[1], name, height=0.5)


def _inset(axes: "Axes", boxes: list[Box], time: float, *, points: float, names: bool) -> None:
    paint(axes, boxes)
    write_labels(axes, boxes, points=points, alike=False)
    axes.set_xlim(-0.01 * time, 1.01 * time)
    axes.set_ylim(len(ROWS) + 0.1, -0.1)
    axes.set_yticks(np.arange(len(ROWS)) + 0.5, ROWS if names else [""] * len(ROWS))
    axes.set_xticks([])
    axes.tick_params(left=False)
    for side in axes.spines.values():
        side.set_color(_OUTLINE)
        side.set_linewidth(0.8)


def _outline(figure: "Figure", grid: "Axes", inset: "Axes", cell: _Cell, begin: float) -> None:
    """A frame around the cell, and a line from each of its upper corners to the inset's lower ones."""
    from matplotlib.patches import ConnectionPatch, Rectangle

    start, end = cell.span.start - begin, cell.span.end - begin
    frame = Rectangle((start, 0.04), end - start, 0.92, fill=False, edgecolor=_OUTLINE, linewidth=1.5, zorder=5)
    grid.add_patch(frame)
    for across, corner in ((start, 0.0), (end, 1.0)):
        figure.add_artist(
            ConnectionPatch(
                (across, 0.04),
                (corner, 0.0),
                grid.transData,
                inset.transAxes,
                color=_OUTLINE,
                linewidth=0.6,
                linestyle=":",
            )
        )
