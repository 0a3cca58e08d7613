"""How much expert communication hides behind compute."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.program.columns import Bools
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, FORWARDS
from stretto.timeline.memory import Floats


class Communication(NamedTuple):
    """A device's expert dispatch and combine, with the counts that precede them."""

    total: float
    """Time in which any of it was under way."""
    hidden: float
    """The part of it in which the device computed."""

    @property
    def share(self) -> float:
        """The hidden share, from 0 to 1; not a number if there is no communication."""
        return self.hidden / self.total if self.total else math.nan


def communication(program: Program, start: Floats, end: Floats, *, steady: bool) -> list[Communication]:
    """Return each device's communication. If `steady`, only what is between the start of its first backward and the end
    of its last forward.
    """
    comm, compute, device, work = program.on_lane("comm"), program.compute, program.device, program.work
    forward, backward = work.among(FORWARDS), work.among(BACKWARDS)
    found = []
    for number in range(program.devices):
        here = device == number
        first, last = -np.inf, np.inf
        if steady:
            first = float(start[here & backward].min(initial=np.inf))
            last = float(end[here & forward].max(initial=-np.inf))
        busy, computing = (_spans(start, end, here & chosen, first, last) for chosen in (comm, compute))
        total = _covered(busy)
        hidden = total + _covered(computing) - _covered(np.concatenate([busy, computing]))
        found.append(Communication(total, min(max(0.0, hidden), total)))  # sums are rounded
    return found


def _spans(start: Floats, end: Floats, chosen: Bools, first: float, last: float) -> NDArray[np.float64]:
    """Return the starts and ends of these tasks, clipped to a time."""
    spans = np.stack([np.maximum(start[chosen], first), np.minimum(end[chosen], last)], axis=1)
    return spans[spans[:, 1] > spans[:, 0]]


def _covered(spans: NDArray[np.float64]) -> float:
    """Return the time in which any of the spans is under way."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    before = np.concatenate([[-np.inf], reached[:-1]])[: len(spans)]
    return float(np.maximum(0.0, reached - np.maximum(spans[:, 0], before)).sum())
