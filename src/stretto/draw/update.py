"""A weight update as a figure: a row for each buffer of each device, each task on the buffer that it fills or reads."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stretto.draw.canvas import Box, bare, figure_at, legend, paint, time_axis, write_labels
from stretto.draw.lanes import shown
from stretto.program.program import Program
from stretto.program.task import Kind, Task
from stretto.timeline import Timeline

_H2D_BUFFER, _IPC_BUFFER = "#9ecae1", "#fdbe85"
_H2D, _RELOAD, _SOURCE, _TARGET = "#c6dbef", "#fd8d3c", "#fdd9b5", "#fff7ec"
_EDGE = "#555555"
_LEGEND = {
    "H2D Buffer": _H2D_BUFFER,
    "IPC Buffer": _IPC_BUFFER,
    "H2D": _H2D,
    "Reload weights": _RELOAD,
    "Broadcast (src)": _SOURCE,
    "Broadcast (dst)": _TARGET,
}
_ROW = 0.22  # inches
_GAP = 0.7  # rows between two devices
_STACK = 0.05  # of the length, for the buffers on the left
_WIDTH = (7.0, 24.0)


def draw_update(timeline: Timeline, path: Path) -> None:
    """Write an SVG or PNG, by the path's extension. Boxes show their bucket where it fits."""
    program = timeline.program
    buffers = _buffers(program)
    rows = len(buffers) + _GAP
    width = float(np.clip(0.5 * timeline.makespan, *_WIDTH))
    length = timeline.makespan
    stack = [
        Box(device * rows + row, -1.6 * _STACK * length, _STACK * length, _H2D_BUFFER if name == "H2D" else _IPC_BUFFER)
        for device in range(program.devices)
        for row, name in enumerate(buffers)
    ]
    boxes = list(_boxes(timeline, buffers, rows))
    with figure_at(path, width, _ROW * rows * program.devices + 1.1) as (figure, (axes,)):
        paint(axes, [*stack, *boxes], edge=_EDGE)
        write_labels(axes, boxes, points=72 * width / (1.1 * length))
        bare(axes, length=length, rows=rows * program.devices - _GAP)
        axes.set_xlim(-2 * _STACK * length, 1.01 * length)
        axes.axvline(-0.3 * _STACK * length, color=_EDGE, linestyle="--", linewidth=1.0)
        for device in range(1, program.devices):
            axes.axhline(device * rows - _GAP / 2, color="#cccccc", linewidth=0.5)
        middle = np.arange(program.devices) * rows + len(buffers) / 2
        axes.set_yticks(middle, [f"Device {device}" for device in range(program.devices)])
        time_axis(axes, length=length, unit=timeline.unit)
        legend(figure, _LEGEND, edge=_EDGE)


def _buffers(program: Program) -> list[str]:
    """Return a device's buffers, top to bottom. A single device has no H2D buffers: it copies into IPC buffers."""
    kind, slot = program.work.kind, program.work.slot
    copies = int(slot[kind == Kind.H2D].max()) + 1
    alone = not (kind == Kind.BROADCAST).any()
    return ["IPC"] * copies if alone else ["H2D"] * copies + ["IPC"] * 2


def _boxes(timeline: Timeline, buffers: list[str], rows: float) -> Iterator[Box]:
    ipc = buffers.index("IPC")
    for item in shown(timeline):
        task = item.task
        row = task.slot if task.kind is Kind.H2D else ipc + task.microbatch % 2
        yield Box(task.device * rows + row, item.start, item.end - item.start, _colour(task), str(task.microbatch))


def _colour(task: Task) -> str:
    if task.kind is Kind.BROADCAST:
        return _SOURCE if task.device == task.stage else _TARGET
    return _H2D if task.kind is Kind.H2D else _RELOAD
