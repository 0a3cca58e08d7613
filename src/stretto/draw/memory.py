"""Curves of each device's bytes over time: allocated, as measured, and held, by the costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stretto.costs import Costs
from stretto.ir.errors import StrettoError
from stretto.ir.units import bytes_text
from stretto.timeline import Timeline
from stretto.timeline.memory import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HIGH = 0.88  # of a row, for the highest peak of all devices


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A device's bytes from each time on; times count from the timeline's start."""

    device: int
    time: Floats
    bytes: Floats
    word: str
    """What the bytes are: allocated or held."""
    meaning: str
    colour: str
    dashed: bool

    @property
    def peak(self) -> float:
        return float(self.bytes.max(initial=0.0))


def curves_of(timeline: Timeline, costs: Costs | None) -> list[Curve]:
    """Return the curves of all devices: those measured, and those by the costs, as far as there are any."""
    begin = float(timeline.start.min())
    curves = [
        Curve(device, measured.time - begin, measured.bytes, "allocated", "Bytes allocated", "#333333", dashed=False)
        for device, measured in enumerate(timeline.allocated_memory() or [])
    ]
    curves += [
        Curve(device, held.time - begin, held.bytes, "held", "Bytes held, by the costs", "#9467bd", dashed=True)
        for device, held in enumerate(timeline.memory(costs))
        if held.bytes is not None
    ]
    if not curves:
        raise StrettoError(
            "there is no memory to draw: no allocated bytes were recorded, and the costs name none (activation_bytes, "
            "parameter_bytes)"
        )
    return curves


def paint_curves(axes: "Axes", curves: Sequence[Curve], *, rows: int, length: float) -> None:
    """Draw each curve in the last of its device's rows, from 0 at the bottom, all on one scale."""
    highest = max((curve.peak for curve in curves), default=0.0) or 1.0
    for curve in curves:
        if not len(curve.bytes):
            continue
        bottom = (curve.device + 1) * rows - 0.06
        time, size = np.append(curve.time, length), np.append(curve.bytes, curve.bytes[-1])
        height = bottom - _HIGH * size / highest
        line = "--" if curve.dashed else "-"
        axes.step(time, height, where="post", color=curve.colour, linewidth=0.8, linestyle=line)
        axes.fill_between(time, height, bottom, step="post", color=curve.colour, alpha=0.1, linewidth=0)


def peak_label(curves: Iterable[Curve], device: int) -> str:
    """Return the peaks of a device in words."""
    peaks = [f"{bytes_text(curve.peak)} {curve.word}" for curve in curves if curve.device == device]
    return f"Peak {', '.join(peaks)}"


def curve_entries(curves: Iterable[Curve]) -> dict[str, str | tuple[str, ...]]:
    """Return what the colours of the curves mean, for a legend."""
    return {curve.meaning: curve.colour for curve in curves}
