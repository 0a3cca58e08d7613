"""A timeline as a figure, in SVG or PNG: a row per device, a cell per pass, as in the papers."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.ir.errors import StrettoError
from stretto.program.task import Kind, Task
from stretto.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORWARD, _BACKWARD, _INPUT, _WEIGHTS = "#f5a742", "#2e8b57", "#a3dca7", "#7fb2e5"
_COLOUR = {Kind.F: _FORWARD, Kind.B: _BACKWARD, Kind.I: _INPUT, Kind.W: _WEIGHTS, Kind.WGRAD: _WEIGHTS}
_LEGEND = {
    "Forward": _FORWARD,
    "Backward": _BACKWARD,
    "Backward for input": _INPUT,
    "Backward for weights": _WEIGHTS,
}
_PAIR = "Overlapped forward & Backward"
_ROW = 0.3  # inches
_WIDTH = (6.0, 24.0)  # inches
_FONT = 8.0  # points
_READABLE = 5.0


def draw_figure(timeline: Timeline, path: Path, *, number_up_flow: bool = False) -> None:
    """Write an SVG or PNG, by the path's ending.

    Cells carry their microbatch where there is room for it; a plan too large for that shows colours
    only. Of a bidirectional plan only the first route is numbered, unless `number_up_flow`.
    """
    pyplot = _pyplot()
    program = timeline.program
    if timeline.makespan <= 0:
        raise StrettoError("there is nothing to draw: nothing takes any time")
    width = float(np.clip(timeline.makespan * 0.17, *_WIDTH))
    figure, axes = pyplot.subplots(figsize=(width, _ROW * program.devices + 1.0), layout="constrained")
    cells = list(_cells(timeline))
    _paint(axes, cells)
    routes = program.placement.routes
    first_route = program.placement.microbatches // (1 if number_up_flow else len(routes))
    _number(axes, [cell for cell in cells if cell.microbatch < first_route], 72 * width / timeline.makespan)
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(program.devices, 0)
    axes.set_yticks(np.arange(program.devices) + 0.5, [f"Device {device}" for device in range(program.devices)])
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.set_xlabel("Time →", loc="left")
    for side in axes.spines.values():
        side.set_visible(False)
    _legend(pyplot, figure, cells)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StrettoError(f"cannot write {path}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


@dataclass(frozen=True, slots=True)
class _Cell:
    device: int
    start: float
    width: float
    colour: str
    microbatch: int
    task: Task


def _cells(timeline: Timeline) -> Iterator[_Cell]:
    """What each compute task paints; a pair is a third forward and two thirds backward."""
    begin = float(timeline.start.min())
    for span in timeline.spans():
        task, start, length = span.task, span.start - begin, span.end - span.start
        if length <= 0 or task.lane.name != "compute":
            continue
        if task.backward is None:
            yield _Cell(task.device, start, length, _COLOUR[task.kind], task.microbatch, task)
        else:
            yield _Cell(task.device, start, length / 3, _FORWARD, task.microbatch, task)
            yield _Cell(task.device, start + length / 3, length * 2 / 3, _BACKWARD, task.backward[1], task)


def _paint(axes: "Axes", cells: list[_Cell]) -> None:
    rows: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for cell in cells:
        rows[cell.device, cell.colour].append((cell.start, cell.width))
    edge = 0.5 if len(cells) < 3000 else 0.1
    for (device, colour), spans in rows.items():
        axes.broken_barh(spans, (device + 0.06, 0.88), facecolors=colour, edgecolor="white", linewidth=edge)


def _number(axes: "Axes", cells: list[_Cell], points: float) -> None:
    """Microbatch numbers, if even the narrowest cell has room for them; `points` are those of a unit of time."""
    size = min((1.4 * cell.width * points / len(str(cell.microbatch)) for cell in cells), default=_FONT)
    if size < _READABLE:
        return
    for cell in cells:
        axes.text(
            cell.start + cell.width / 2,
            cell.device + 0.52,
            str(cell.microbatch),
            ha="center",
            va="center",
            fontsize=min(size, _FONT),
            color="white" if cell.colour == _BACKWARD else "black",
        )


def _legend(pyplot: Any, figure: Any, cells: list[_Cell]) -> None:
    from matplotlib.legend_handler import HandlerTuple

    def patch(colour: str) -> Any:
        return pyplot.Rectangle((0, 0), 1, 1, color=colour)

    used = {cell.colour for cell in cells}
    entries = {label: patch(colour) for label, colour in _LEGEND.items() if colour in used}
    if any(cell.task.kind is Kind.PAIR for cell in cells):
        entries[_PAIR] = (patch(_FORWARD), patch(_BACKWARD))
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower left",
        ncols=max(1, len(entries)),
        frameon=False,
        handlelength=1.6,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise StrettoError("figures need matplotlib: pip install 'stretto[draw]'") from None
    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.size": _FONT, "svg.hashsalt": "stretto"})
    from matplotlib import pyplot

    return pyplot
