"""Kimi K2's figure: the grid of a woven schedule, with three of its cells enlarged into their lanes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cells import chosen_cells, extent, first_pipeline, spans_of
from stretto import Plan
from stretto.costs import Unit
from stretto.draw.canvas import (
    FONT,
    READABLE,
    Box,
    bare,
    figure_at,
    label_size,
    legend,
    paint,
    time_axis,
    time_ticks,
    write_labels,
)
from stretto.draw.lanes import ROWS, is_backward, short_name
from stretto.ir.action import Action, Op, Pair
from stretto.ir.errors import StrettoError
from stretto.ir.plan import Cell, actions_of
from stretto.program.task import COPIES, Kind, Task
from stretto.timeline import Span, Timeline
from stretto.timeline.units import time_text

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
_ROW, _LANE = 0.33, 0.45  # inches: of the grid, of an inset
_TITLE = 0.6  # lanes
_COMPUTE, _COMM, _COPY = range(3)


@dataclass(frozen=True, slots=True)
class _Band:
    """A cell as one timeline has it: boxes in up to three rows, from its first start on."""

    boxes: list[Box]
    time: float
    """From the start of its first phase to the end of its last; sends are not counted."""

    @property
    def length(self) -> float:
        return max(box.start + box.width for box in self.boxes)


def draw_insets(
    plan: Plan, grid: Timeline, details: Mapping[str, Timeline], path: Path, *, label: str = "VPP + 1 warmup"
) -> None:
    """Write an SVG or PNG of a plan's timeline, and above it of a warm-up forward, a pair and a cool-down backward of
    the first device as they are in `details`, timelines of the same plan in phases. If there are several, each is
    titled with its name, its time, and how far that is from the first one's. On a mesh, only the first pipeline is
    shown. Microbatches count from 1.
    """
    rows = first_pipeline(plan)
    cells = chosen_cells(rows[0])
    spans = spans_of(grid, [cell for row in rows for cell in row])
    places = {cell: _place(own, float(grid.start.min())) for cell, own in spans.items()}
    insets = [[_band(detail, cell) for detail in details.values()] for cell in cells]
    lanes = 1 + max(int(box.row) for bands in insets for band in bands for box in band.boxes)
    is_titled = len(details) > 1
    heights = (_LANE * len(details) * (lanes + _TITLE * is_titled), _ROW * len(rows))
    width = float(np.clip(0.16 * grid.makespan / _usual_forward(places), 9.0, 24.0))
    with figure_at(path, width, sum(heights) + 1.25 + 0.4 * is_titled, heights) as (figure, (above, below)):
        _grid(below, rows, places, grid, points=72 * width / (1.08 * grid.makespan))
        below.set_ylabel(label)
        above.axis("off")
        if is_titled:
            steps = _titles({name: detail.makespan for name, detail in details.items()}, grid.unit)
            figure.suptitle(f"Step: {', '.join(steps)}", x=0.01, ha="left", fontsize=FONT)
        lengths = _lengths(insets)
        scale, left = (1 - _GAP * (len(insets) - 1)) / sum(lengths), 0.0
        for cell, bands, length in zip(cells, insets, lengths, strict=True):
            axes = above.inset_axes((left, 0.0, scale * length, 1.0))
            titles = _titles({name: band.time for name, band in zip(details, bands, strict=True)}, grid.unit)
            _inset(axes, bands, titles, lanes=lanes, length=length, points=72 * 0.9 * width * scale, unit=grid.unit)
            if left > 0:
                axes.set_yticklabels([])
            _outline(figure, below, axes, places[cell])
            left += scale * length + _GAP
        legend(figure, _LEGEND)


def _place(spans: Iterable[Span], begin: float) -> tuple[float, float]:
    """Return when a cell computes, from the beginning of the step on: its start and its end."""
    first, last = extent([span for span in spans if span.task.lane.name == "compute"])
    return first - begin, last - begin


def _usual_forward(places: Mapping[Cell, tuple[float, float]]) -> float:
    times = [end - start for cell, (start, end) in places.items() if isinstance(cell, Action) and cell.op is Op.F]
    return float(np.median(times))


def _grid(
    axes: "Axes",
    rows: Sequence[Sequence[Cell]],
    places: Mapping[Cell, tuple[float, float]],
    grid: Timeline,
    *,
    points: float,
) -> None:
    boxes = [
        box
        for row, cells in enumerate(rows)
        for cell in cells
        for box in _cell_boxes(cell, row, places[cell], len(rows))
    ]
    paint(axes, boxes)
    write_labels(axes, boxes, points=points)
    bare(axes, length=grid.makespan, rows=len(rows))
    axes.set_yticks(np.arange(len(rows)) + 0.5, [f"Device {device}" for device in range(len(rows))])
    axes.set_xlabel("Time →", loc="left")
    if grid.unit is not None:
        time_axis(axes, length=grid.makespan, unit=grid.unit)


def _cell_boxes(cell: Cell, row: int, place: tuple[float, float], devices: int) -> Iterator[Box]:
    """Yield one box, or two for a pair: a third forward, two thirds backward."""
    start, end = place
    cuts = (start, start + (end - start) / 3, end) if isinstance(cell, Pair) else (start, end)
    for action, (begin, stop) in zip(actions_of(cell), pairwise(cuts), strict=True):
        shades = _FORWARD if action.op is Op.F else _BACKWARD
        yield Box(row, begin, stop - begin, shades[action.stage >= devices], str(action.microbatch + 1))


def _band(detail: Timeline, cell: Cell) -> _Band:
    """Return a cell in phases, from its first start on, and the copies that run meanwhile."""
    own = spans_of(detail, [cell])[cell]
    if not any(span.task.phase for span in own):
        raise StrettoError("this figure needs a timeline in phases for its details: lower the plan with layers")
    begin, end = extent(own)
    copies = [span for span in detail.spans() if span.task.device == 0 and span.task.kind in COPIES]
    boxes: list[Box] = []
    for span in (*own, *copies):
        start, stop = max(span.start, begin), min(span.end, end)
        if stop <= start or span.task.lane.name == "host":
            continue
        box = _lane_box(span.task, start - begin, stop - start)
        if boxes and _continues(boxes[-1], box, gap=0.01 * (end - begin)):
            before = boxes.pop()
            box = replace(before, width=max(before.width, box.start + box.width - before.start))
        boxes.append(box)
    first, last = extent([span for span in own if span.task.phase])
    return _Band(boxes, last - first)


def _continues(before: Box, box: Box, *, gap: float) -> bool:
    """Whether two boxes are better shown as one: weight gradients one after the other, sends beside each other."""
    alike = (before.row, before.label) == (box.row, box.label) and box.label in ("WGrad", "PP")
    return alike and box.start <= before.start + before.width + gap


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


def _lengths(insets: Sequence[Sequence[_Band]]) -> list[float]:
    """Return the time that each inset spans. Those with titles have room for a label beside the last box, and all span
    at least half of the longest, so that titles fit.
    """
    lengths = [max(band.length for band in bands) * (1.06 if len(bands) > 1 else 1.0) for bands in insets]
    return [max(length, max(lengths) / 2) for length in lengths]


def _titles(times: Mapping[str, float], unit: Unit) -> list[str]:
    """Return each name with its time, and with how far that is from the first one's: "simulated 12.3 ms (−1.6%)"."""
    first = next(iter(times.values()))
    return [
        f"{name} {time_text(time, unit)}" + (f" ({time / first - 1:+.1%})".replace("-", "−") if number else "")
        for number, (name, time) in enumerate(times.items())
    ]


def _inset(
    axes: "Axes", bands: Sequence[_Band], titles: Sequence[str], *, lanes: int, length: float, points: float, unit: Unit
) -> None:
    """Draw bands below each other on one time scale, with titles and times if there are several."""
    title = _TITLE if len(bands) > 1 else 0.0
    tops = [number * (lanes + title) + title for number in range(len(bands))]
    for band, top, text in zip(bands, tops, titles, strict=True):
        boxes = [replace(box, row=box.row + top) for box in band.boxes]
        paint(axes, boxes)
        write_labels(axes, boxes, points=points, alike=False)
        _write_beside(axes, boxes, length, points=points)
        if title:
            axes.text(0, top - title / 2, text, va="center")
    axes.set_xlim(-0.01 * length, 1.01 * length)
    axes.set_ylim(len(bands) * (lanes + title) + 0.1, -0.1)
    axes.set_yticks([top + lane + 0.5 for top in tops for lane in range(lanes)], ROWS[:lanes] * len(bands))
    axes.tick_params(left=False)
    if unit is None:
        axes.set_xticks([])
    else:
        axes.xaxis.tick_top()
        axes.tick_params(axis="x", labelsize=0.8 * FONT, length=2, pad=1)
        axes.locator_params(axis="x", nbins=4)
        time_ticks(axes, length=length, unit=unit)
    for side in axes.spines.values():
        side.set_color(_OUTLINE)
        side.set_linewidth(0.8)


def _write_beside(axes: "Axes", boxes: Sequence[Box], length: float, *, points: float) -> None:
    """Write labels that do not fit into their boxes to the right of them, where that is free."""
    size = 0.8 * FONT
    for box in boxes:
        end = box.start + box.width
        room = (
            min((later.start for later in boxes if later.row == box.row and later.start >= end), default=length) - end
        )
        if label_size(box, points=points) < READABLE and label_size(replace(box, width=room), points=points) >= size:
            axes.text(end + 1.5 / points, box.row + 0.52 * box.height, box.label, va="center", fontsize=size)


def _outline(figure: "Figure", grid: "Axes", inset: "Axes", place: tuple[float, float]) -> None:
    """Draw a frame around the cell, and a line from each of its upper corners to the inset's lower ones."""
    from matplotlib.patches import ConnectionPatch, Rectangle

    start, end = place
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
