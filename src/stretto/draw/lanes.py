"""Which tasks are shown, and in which of their device's rows: computation, communication, waits, offload, sums."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stretto.program.task import BACKWARDS, COPIES, WEIGHTS, Kind, Task
from stretto.timeline import Timeline

ROWS = ("Computation", "Communication", "Offload")
_ROWS = {
    "compute": ROWS[0],
    "comm": ROWS[1],
    "send": ROWS[1],
    "recv": ROWS[1],
    "host": "Host",
    "d2h": ROWS[2],
    "h2d": ROWS[2],
    "reduce": "Reduce",
}
_UPDATE_ROWS = {"h2d": "H2D", "broadcast": "Broadcast", "reload": "Reload"}
_SHORT = {"attn": "Attn", "mlp": "MLP", "dispatch": "EP-D", "combine": "EP-C", "counts": "EP-N"}


@dataclass(frozen=True, slots=True)
class Shown:
    """A task that takes time; times count from the timeline's start."""

    task: Task
    row: int
    start: float
    end: float


def rows_of(timeline: Timeline) -> list[str]:
    """Return the names of the rows in which any device shows something, top to bottom."""
    program, rows = timeline.program, _rows(timeline)
    busy = np.bincount(program.lane, timeline.end - timeline.start, minlength=len(program.lanes)) > 0
    shows_late = timeline.issued is not None  # in the compute row, even if no task takes time there
    busy |= shows_late & np.array([lane.name == "compute" for lane in program.lanes])
    used = {rows[lane.name] for lane, is_busy in zip(program.lanes, busy, strict=True) if is_busy}
    return [name for name in dict.fromkeys(rows.values()) if name in used] or [""]


def shown(timeline: Timeline) -> Iterator[Shown]:
    """Yield every task that takes time, with its row among its device's."""
    names = rows_of(timeline)
    rows = {lane: names.index(row) for lane, row in _rows(timeline).items() if row in names}
    begin = float(timeline.start.min())
    for span in timeline.spans():
        if span.end > span.start:
            yield Shown(span.task, rows[span.task.lane.name], span.start - begin, span.end - begin)


@dataclass(frozen=True, slots=True)
class Late:
    """A time when a device was idle because a task was not issued yet."""

    cause: Task
    """On that device, or on the one at the other end of a transfer."""
    device: int
    row: int
    start: float
    end: float


def host_late(timeline: Timeline) -> Iterator[Late]:
    """Yield where a compute lane stood idle because a host had not issued a task yet, if the lane is shown."""
    names, begin = rows_of(timeline), float(timeline.start.min())
    name = _rows(timeline).get("compute")
    if timeline.issued is None or name not in names:
        return
    program, gaps, row = timeline.program, timeline.late_gaps(), names.index(name)
    columns = zip(gaps.cause.tolist(), gaps.task.tolist(), gaps.begin.tolist(), gaps.end.tolist(), strict=True)
    for cause, task, start, end in columns:
        yield Late(program.task(cause), program.device.item(task), row, start - begin, end - begin)


def _rows(timeline: Timeline) -> dict[str, str]:
    """Return the row of each lane, by name; in a user's own program each lane has its own, in order of first use."""
    program = timeline.program
    if program.is_own:
        return {name: name for name in (program.lanes[lane].name for lane in program.lane.tolist())}
    return _UPDATE_ROWS if program.is_update else _ROWS


def short_name(task: Task) -> str:
    """Return what the papers' figures call a task."""
    if task.kind is Kind.WGRAD or (task.kind is Kind.W and task.phase):
        return "WGrad"
    if task.kind in COPIES:
        return task.kind.name.capitalize()
    if task.lane.name in ("send", "recv"):
        return "PP"
    phase = task.phase.rstrip("0123456789")
    return _SHORT.get(phase, phase)


def is_backward(task: Task) -> bool:
    return task.kind in (*BACKWARDS, *WEIGHTS, Kind.RECOMPUTE, Kind.ONLOAD, Kind.SEND_B, Kind.RECV_B)
