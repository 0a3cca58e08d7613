"""The building blocks of all figures: boxes in rows, labels that fit, a time axis, a legend, an SVG or PNG file."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.costs import Unit
from stretto.ir.errors import StrettoError
from stretto.ir.extras import require
from stretto.timeline.units import time_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = 8.0  # points
READABLE = 5.0
_LINE = 0.17  # inches per line of a legend
_WIDE = 0.72  # the width of a character over its height, with a margin


@dataclass(frozen=True, slots=True)
class Box:
    """A coloured interval of time. Rows count downwards, and a box may fill part of its row's height."""

    row: float
    start: float
    width: float
    colour: str
    label: str = ""
    height: float = 1.0
    dark: bool = False
    """Whether the colour is dark, so that the label must be white."""
    thin: bool = False
    """Whether it may be so thin that an edge would hide it."""


@contextmanager
def figure_at(
    path: Path, width: float, height: float, rows: Sequence[float] = (1.0,)
) -> "Iterator[tuple[Figure, list[Axes]]]":
    """Yield a figure, sized in inches, with axes stacked in these relative heights; write it to the path on exit.

    Matplotlib's global state stays unchanged.
    """
    require("matplotlib", extra="draw", what="a figure")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": FONT, "svg.hashsalt": "stretto"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(len(rows), squeeze=False, gridspec_kw={"height_ratios": rows})
        yield figure, list(axes[:, 0])
        undated = {"Date": None} if path.suffix.lower() == ".svg" else None  # identical figures give identical files
        try:
            figure.savefig(path, dpi=150, metadata=undated)
        except OSError as error:
            raise StrettoError(f"cannot write {path}: {error.strerror}") from None


def bare(axes: "Axes", *, length: float, rows: float) -> None:
    """Remove frame and ticks, and set the limits: rows from the top down, over a length of time."""
    axes.set_xlim(0, length)
    axes.set_ylim(rows, 0)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)


def time_axis(axes: "Axes", *, length: float, unit: Unit) -> None:
    """Add ticks below the rows, and the direction of time."""
    axes.tick_params(bottom=True, labelbottom=True)
    time_ticks(axes, length=length, unit=unit)
    axes.set_xlabel("Time →", loc="left")


def time_ticks(axes: "Axes", *, length: float, unit: Unit) -> None:
    """Give each tick its unit: a bare number would read as a microbatch."""
    from matplotlib.ticker import FuncFormatter

    size, name = time_scale(length, unit)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time / size:g} {name or 'units'}"))


def paint(axes: "Axes", boxes: Sequence[Box], *, edge: str = "white") -> None:
    alike: dict[tuple[float, float, str, bool], list[tuple[float, float]]] = defaultdict(list)
    for box in boxes:
        alike[box.row, box.height, box.colour, box.thin].append((box.start, box.width))
    line = 0.5 if len(boxes) < 3000 else 0.1
    for (row, height, colour, thin), spans in alike.items():
        place = (row + 0.06 * height, 0.88 * height)
        axes.broken_barh(spans, place, facecolors=colour, edgecolor=colour if thin else edge, linewidth=line)


def write_labels(axes: "Axes", boxes: Iterable[Box], *, points: float, alike: bool = True) -> None:
    """Write labels where they fit; `points` is the width of one unit of time.

    With `alike`, all labels have the same size; if the narrowest box is too narrow for it, none is written.
    """
    sizes = [(box, label_size(box, points=points)) for box in boxes if box.label]
    if alike:
        least = min((size for _, size in sizes), default=FONT)
        sizes = [(box, least) for box, _ in sizes]
    for box, size in sizes:
        if size >= READABLE:
            axes.text(
                box.start + box.width / 2,
                box.row + 0.52 * box.height,
                box.label,
                ha="center",
                va="center",
                fontsize=min(size, FONT),
                color="white" if box.dark else "black",
            )


def label_size(box: Box, *, points: float) -> float:
    """Return the largest size, in points, in which a box's label fits into it."""
    return box.width * points / (_WIDE * len(box.label))


def legend(figure: "Figure", entries: Mapping[str, str | tuple[str, ...]], *, edge: str | None = None) -> None:
    """Add labels with their colours below the axes, in as many lines as they need; a tuple is a split swatch."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Rectangle

    def swatch(colour: str) -> Any:
        return Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor=edge or colour, linewidth=0.5)

    handles: list[Any] = [
        tuple(map(swatch, colours)) if isinstance(colours, tuple) else swatch(colours) for colours in entries.values()
    ]
    for columns in range(max(1, len(entries)), 0, -1):
        drawn = figure.legend(
            handles,
            list(entries),
            loc="outside lower left",
            ncols=columns,
            frameon=False,
            handlelength=1.6,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        )
        if drawn.get_window_extent().width <= 0.98 * figure.bbox.width or columns == 1:
            break
        drawn.remove()
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + _LINE * (math.ceil(len(entries) / columns) - 1))
