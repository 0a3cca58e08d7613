"""A timeline as a figure, in SVG or PNG: a row per device, a cell per pass, as in the papers; or a row per lane."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from stretto.costs import Costs, family
from stretto.draw.canvas import Box, bare, figure_at, legend, paint, time_axis, write_labels
from stretto.draw.lanes import Shown, host_late, rows_of, shown
from stretto.draw.memory import curve_entries, curves_of, paint_curves, peak_label
from stretto.draw.update import draw_update
from stretto.ir.errors import StrettoError
from stretto.ir.files import file_path
from stretto.program.program import Program
from stretto.program.task import Kind
from stretto.timeline import Timeline

_FORWARD, _BACKWARD, _INPUT, _WEIGHTS = "#f5a742", "#2e8b57", "#a3dca7", "#7fb2e5"
_RECOMPUTE, _EXPERTS, _TRANSFER, _OUT, _IN = "#c9b18a", "#ffe070", "#9bd0c4", "#c3b1e1", "#8f79c2"
_REDUCE, _LATE, _WAIT = "#e39a9a", "#d62728", "#b0b0b0"
_CALLS = ("#f5a742", "#7fb2e5", "#a3dca7", "#c3b1e1", "#ffe070", "#9bd0c4", "#e39a9a", "#c9b18a")
_COLOUR = {
    Kind.F: _FORWARD,
    Kind.B: _BACKWARD,
    Kind.I: _INPUT,
    Kind.W: _WEIGHTS,
    Kind.WGRAD: _WEIGHTS,
    Kind.RECOMPUTE: _RECOMPUTE,
    Kind.OFFLOAD: _OUT,
    Kind.ONLOAD: _IN,
    Kind.REDUCE: _REDUCE,
}
_IDLE = "Idle: not issued yet by a host"
_LEGEND = {
    "Forward": _FORWARD,
    "Backward": _BACKWARD,
    "Backward for input": _INPUT,
    "Backward for weights": _WEIGHTS,
    "Recompute": _RECOMPUTE,
    "Expert dispatch and combine": _EXPERTS,
    "Host waits for sizes": _WAIT,
    "Pipeline transfer": _TRANSFER,
    "Offload": _OUT,
    "Onload": _IN,
    "Sum of gradients over devices": _REDUCE,
    _IDLE: _LATE,
}
_PAIR = "Overlapped forward & Backward"
_ROW = 0.3  # inches
_THIN = 0.2  # inches, in a figure with a row for each lane
_WIDTH = (6.0, 24.0)
_PEAKS = 1.2  # inches more, for peaks of memory in words


def draw_figure(
    timeline: Timeline,
    path: str | Path,
    *,
    number_up_flow: bool = False,
    lanes: bool = False,
    memory: bool = False,
    costs: Costs | None = None,
) -> None:
    """Write an SVG or PNG, by the path's extension.

    Cells show their microbatch; a plan too large for that shows colours only. In a bidirectional plan only the first
    route is numbered, unless `number_up_flow`. With `lanes`, each device has a row each for computation,
    communication, offload and sums of gradients. If issue times were recorded, a thin line shows where a device was
    idle because a host had not issued the next task. With `memory`, each device has a row more, for the bytes that were
    allocated, if that was recorded, and those held, if the costs name any. A weight update has a row for each buffer, a
    user's own program one for each lane.
    """
    path = file_path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise StrettoError(f"a figure is an .svg or a .png (got {path})")
    if timeline.makespan <= 0:
        raise StrettoError("there is nothing to draw: nothing takes any time")
    if timeline.program.is_update:
        if memory:
            raise StrettoError("a figure of a weight update has no memory")
        draw_update(timeline, path)
        return
    program = timeline.program
    lanes = lanes or program.is_own
    rows = rows_of(timeline) if lanes else [""]
    curves = curves_of(timeline, costs) if memory else []
    stride = len(rows) + memory
    count = program.devices * stride
    width = float(np.clip(_length(timeline) * 0.17, *_WIDTH))
    boxes = list(boxes_of(timeline, lanes=lanes, number_up_flow=number_up_flow, free=int(memory)))
    with figure_at(path, width + _PEAKS * memory, (_THIN if lanes else _ROW) * count + 1.2) as (figure, (axes,)):
        paint(axes, boxes)
        write_labels(axes, boxes, points=72 * width / timeline.makespan)
        bare(axes, length=timeline.makespan, rows=count)
        labels = []
        for device, name in enumerate(map(program.placement.device_name, range(program.devices))):
            labels += [f"Device {name} {rows[0]}".strip(), *rows[1:], *[peak_label(curves, device)] * memory]
        axes.set_yticks(np.arange(count) + 0.5, labels)
        paint_curves(axes, curves, rows=stride, length=timeline.makespan)
        if lanes or memory:
            axes.hlines(np.arange(1, program.devices) * stride, 0, timeline.makespan, color="#888888", linewidth=0.5)
        time_axis(axes, length=timeline.makespan, unit=timeline.unit)
        legend(figure, legend_entries(boxes, [timeline]) | curve_entries(curves))


def _length(timeline: Timeline) -> float:
    """Return the makespan in typical compute tasks; costs without a unit are mostly multiples of a forward already."""
    if timeline.unit is None:
        return timeline.makespan
    times = (timeline.end - timeline.start)[timeline.program.compute]
    usual = np.median(times[times > 0]) if times.any() else timeline.makespan
    return timeline.makespan / float(usual)


def legend_entries(boxes: Iterable[Box], timelines: Iterable[Timeline]) -> dict[str, str | tuple[str, ...]]:
    """Return what the colours of these timelines' boxes mean."""
    programs = [timeline.program for timeline in timelines]
    calls = {name: colour for program in programs for name, colour in _colours(program).items()}
    known = _LEGEND if any(not program.is_own for program in programs) else {_IDLE: _LATE}
    used = {box.colour for box in boxes}
    entries: dict[str, str | tuple[str, ...]] = {
        name: colour for name, colour in (known | calls).items() if colour in used
    }
    if any((program.work.kind == Kind.PAIR).any() for program in programs):
        entries[_PAIR] = (_FORWARD, _BACKWARD)
    return entries


def _colours(program: Program) -> dict[str, str]:
    """Return the colours of a user's own calls; calls whose names differ only by a number share one."""
    names = dict.fromkeys(map(family, program.anatomy.calls))
    return {name: _CALLS[number % len(_CALLS)] for number, name in enumerate(names)}


def boxes_of(timeline: Timeline, *, lanes: bool = False, number_up_flow: bool = False, free: int = 0) -> Iterator[Box]:
    """Yield the boxes of each task, in its device's only row or, with `lanes`, in the row of its lane. Below each
    device's rows, so many more stay free.
    """
    placement = timeline.program.placement
    every = placement.microbatches // placement.replicas
    ways = 1 if number_up_flow else len(placement.routes) // placement.replicas
    rows = (len(rows_of(timeline)) if lanes else 1) + free
    colours = _colours(timeline.program)
    for item in shown(timeline):
        if lanes or item.task.lane.name == "compute":
            row = item.task.device * rows + (item.row if lanes else 0)
            if item.task.kind is Kind.CALL:
                name = item.task.phase
                yield Box(row, item.start, item.end - item.start, colours[family(name)], name)
            else:
                yield from _boxes(item, row, every, every // ways)
    for gap in host_late(timeline):  # after the tasks, whose edges would hide short gaps
        row = gap.device * rows + (gap.row if lanes else 0)
        yield Box(row + 0.4, gap.start, gap.end - gap.start, _LATE, height=0.2, thin=True)


def _boxes(it: Shown, row: float, every: int, numbered: int) -> Iterator[Box]:
    """Yield one box, or two for a pair: a third forward, two thirds backward. Concurrent tasks share a row's height.
    Of every so many microbatches, those of a replica, the first `numbered` show their number.
    """
    task, length = it.task, it.end - it.start

    def number(microbatch: int) -> str:
        return str(microbatch) if microbatch % every < numbered else ""

    if task.backward is not None:
        yield Box(row, it.start, length / 3, _FORWARD, number(task.microbatch))
        back = number(task.backward[1])
        yield Box(row, it.start + length / 3, length * 2 / 3, _BACKWARD, back, dark=True)
        return
    match task.lane.name:
        case "compute":
            dark = task.kind is Kind.B
            yield Box(row, it.start, length, _COLOUR[task.kind], number(task.microbatch), dark=dark)
        case "comm":
            yield Box(row, it.start, length, _EXPERTS, height=0.5)
        case "host":
            yield Box(row, it.start, length, _WAIT)
        case "reduce":
            yield Box(row, it.start, length, _REDUCE, str(task.stage))
        case "send" | "recv":
            yield Box(row + (0.5 if task.lane.name == "send" else 0.75), it.start, length, _TRANSFER, height=0.25)
        case _:
            yield Box(row + 0.5 * (task.kind is Kind.ONLOAD), it.start, length, _COLOUR[task.kind], height=0.5)
