"""Several timelines stacked on one time scale."""

from collections.abc import Mapping
from pathlib import Path

from stretto.draw.canvas import FONT, Box, bare, figure_at, legend, paint, time_axis
from stretto.draw.figure import boxes_of, legend_entries
from stretto.ir.errors import StrettoError
from stretto.ir.files import file_path
from stretto.timeline import Timeline
from stretto.timeline.units import time_text

_ROW = 0.09  # inches
_TITLE = 0.22
_WIDTH = 11.0


def draw_comparison(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write an SVG or PNG: each timeline under its name, in the given order, with a thin row per device.

    Compute is coloured as in `Timeline.save`; idle time is white.
    """
    target = file_path(path)
    if target.suffix.lower() not in (".svg", ".png"):
        raise StrettoError(f"a comparison is drawn as .svg or .png (got {path})")
    longest = max((timeline.makespan for timeline in timelines.values()), default=0.0)
    if longest <= 0:
        raise StrettoError("there is nothing to draw: nothing takes any time")
    unit, *others = {timeline.unit for timeline in timelines.values()}
    if others:
        raise StrettoError("times in seconds and times without a unit cannot be drawn on one scale")
    heights = [_TITLE + _ROW * timeline.program.devices for timeline in timelines.values()]
    painted: list[Box] = []
    with figure_at(target, _WIDTH, sum(heights) + 0.8, heights) as (figure, stack):
        for axes, (name, timeline) in zip(stack, timelines.items(), strict=True):
            boxes = list(boxes_of(timeline))
            paint(axes, boxes)
            painted += boxes
            bare(axes, length=longest, rows=timeline.program.devices)
            axes.set_yticks([])
            time, idle = time_text(timeline.makespan, unit), timeline.summary().bubble_ratio
            axes.set_title(f"{name}: {time}, {idle:.1%} idle", loc="left", fontsize=FONT, pad=2)
            axes.axvline(timeline.makespan, color="#888888", linewidth=0.8)
        time_axis(stack[-1], length=longest, unit=unit)
        legend(figure, legend_entries(painted, timelines.values()))
