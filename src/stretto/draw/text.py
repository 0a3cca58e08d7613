"""A timeline as text: one line per device or lane, in plain characters or in colour."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from stretto.draw.lanes import host_late, rows_of, shown
from stretto.program.task import Kind, Task
from stretto.timeline import Timeline

_LETTER = {
    Kind.WGRAD: "W",
    Kind.PAIR: "&",
    Kind.RECOMPUTE: "R",
    Kind.OFFLOAD: "O",
    Kind.ONLOAD: "L",
    Kind.H2D: "H",
    Kind.RELOAD: "R",
    Kind.REDUCE: "G",
}
_SHADES = {  # two of each, so that neighbours differ
    "F": ("on #f5a742", "on #f8c177"),
    "B": ("on #2e8b57", "on #4aa873"),
    "I": ("on #8fd694", "on #b4e5b8"),
    "W": ("on #6fa8dc", "on #9cc4ea"),
    "R": ("on #d98c5f", "on #e5ab89"),
    "D": ("on #ffe070", "on #fff0b3"),
    "C": ("on #e6c84d", "on #f0dc8c"),
    "N": ("on #d9d0a0", "on #e8e2c4"),
    "S": ("on #fdbe85", "on #fdd0a2"),
    ">": ("on #9bd0c4", "on #b9e0d8"),
    "<": ("on #9bd0c4", "on #b9e0d8"),
    "O": ("on #c3b1e1", "on #d8cbed"),
    "L": ("on #a48fd0", "on #bdadde"),
    "H": ("on #9ecae1", "on #c6dbef"),
    "G": ("on #e39a9a", "on #edbcbc"),
    "!": ("on #d62728", "on #d62728"),
}
_MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "backward for input",
    "W": "backward for weights",
    "R": "recompute",
    "D": "dispatch",
    "C": "combine",
    "N": "counts of rows to be dispatched",
    "H": "the host waits for them",
    ">": "send",
    "<": "receive",
    "O": "offload",
    "L": "onload",
    "G": "sum of gradients over devices",
    "!": "idle: not issued yet by a host",
}
_UPDATE_MEANING = {"H": "host to device", "S": "broadcast (source)", "D": "broadcast (destination)", "R": "reload"}
_CALLS = "FWIOSDHG"  # the shades of a user's own calls
_WIDEST = 4  # columns for the shortest task; more adds nothing


def draw_text(timeline: Timeline, *, width: int = 100, lanes: bool = False) -> str:
    """Draw one line per device. A task shows its op and microbatch if it is wide enough, otherwise its op.

    With `lanes`, and always for a weight update, each device has a line each for computation, communication, offload
    and sums over devices; in a user's own program, a line for each lane. If tasks in one line overlap, the first is
    shown. Dots are idle time; in a measured timeline, "!" is idle time because a host had not issued the next task.

    >>> from stretto import simulate
    >>> from stretto.schedules import one_f_one_b
    >>> print(draw_text(simulate(one_f_one_b(devices=2, microbatches=2)), width=60))
    0 F0──F1──········B0──────····B1──────
    1 ····F0──B0──────F1──B1──────········
    """
    grid = _Grid.of(timeline, width, lanes=lanes)
    lines = []
    for label, blocks in grid.lines:
        line = [label]
        column = 0
        for block in blocks:
            line.append("·" * (block.start - column) + _plain(block))
            column = block.end
        lines.append("".join(line) + "·" * (grid.columns - column))
    return "\n".join(lines)


def draw_rich(timeline: Timeline, *, width: int = 100, lanes: bool = False) -> Text:
    """Draw in colour, with a legend: orange forward, green backward, light green for input, blue for weights."""
    grid = _Grid.of(timeline, width, lanes=lanes)
    text = Text(no_wrap=True, overflow="crop")
    used = set("FBIW") if not timeline.program.is_update and not timeline.program.is_own else set()
    for label, blocks in grid.lines:
        text.append(label, style="bold")
        column = 0
        for block in blocks:
            text.append(" " * (block.start - column))
            for letter, number, columns in _parts(block):
                labels = (f"{letter}{number}", str(number), "")  # the longest that fits
                if block.task is None:
                    labels = ("", "", "")
                elif block.task.kind is Kind.CALL:
                    labels = (block.task.phase, block.task.phase[:columns], "")
                fits = next(label for label in labels if len(label) <= columns).center(columns)
                text.append(fits, style=f"black {_SHADES[letter][number % 2]}")
                used.add(letter)
            column = block.end
        text.append("\n")
    for letter, meaning in (_UPDATE_MEANING if timeline.program.is_update else _MEANING).items():
        if letter in used:
            text.append(f" {letter} ", style=f"black {_SHADES[letter][0]}")
            text.append(f" {meaning}   ")
    return text


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    task: Task | None
    """None where the host was late."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """Columns of equal time; each line has a label and its blocks from left to right."""

    lines: list[tuple[str, list[_Block]]]
    columns: int

    @staticmethod
    def of(timeline: Timeline, width: int, *, lanes: bool) -> "_Grid":
        program = timeline.program
        lanes = lanes or program.is_update or program.is_own
        names = [f" {name}" for name in rows_of(timeline)] if lanes else [""]
        devices = [program.placement.device_name(device) for device in range(program.devices)]
        digits, longest = max(map(len, devices)), max(map(len, names))
        labels = [f"{device:>{digits}}{name:<{longest}} " for device in devices for name in names]
        visible = [item for item in shown(timeline) if lanes or item.task.lane.name == "compute"]
        if not visible or timeline.makespan <= 0:
            return _Grid([(label, []) for label in labels], 0)
        available = max(10, width - len(labels[0]))
        shortest = min(item.end - item.start for item in visible)
        per_shortest = min(_WIDEST, int(available * shortest / timeline.makespan))
        scale = per_shortest / shortest if per_shortest else available / timeline.makespan
        if not math.isfinite(scale):  # times too small for any scale
            return _Grid([(label, []) for label in labels], 0)
        lines: list[list[_Block]] = [[] for _ in labels]
        intervals: list[tuple[float, float, int, int, Task | None]]
        intervals = [(item.start, item.end, item.task.device, item.row, item.task) for item in visible]
        intervals += [(item.start, item.end, item.device, item.row, None) for item in host_late(timeline)]
        for begin, stop, device, row, task in sorted(intervals, key=lambda interval: interval[0]):
            line = lines[device * len(names) + (row if lanes else 0)]
            start = max(int(np.rint(begin * scale)), line[-1].end if line else 0)
            end = int(np.rint(stop * scale))
            if end > start:
                line.append(_Block(start, end, task))
        columns = max((line[-1].end for line in lines if line), default=0)
        labelled = list(zip(labels, lines, strict=True))
        if program.is_own:  # its devices may have different lanes
            existing = {(lane.device, f" {lane.name}") for lane in program.lanes}
            positions = [(device, name) for device in range(program.devices) for name in names]
            labelled = [line for line, position in zip(labelled, positions, strict=True) if position in existing]
        return _Grid(labelled, columns)


def _letter(task: Task) -> str:
    match task.lane.name:
        case "comm":
            return {"combine": "C", "counts": "N"}.get(task.phase.rstrip("0123456789"), "D")
        case "host" if task.kind is not Kind.CALL:
            return "H"
        case "send" | "recv":
            return ">" if task.lane.name == "send" else "<"
        case _ if task.kind is Kind.CALL:
            return _CALLS[task.part % len(_CALLS)]
        case "broadcast":
            return "S" if task.device == task.stage else "D"
        case _:
            return _LETTER.get(task.kind, task.kind.name)


def _number(task: Task) -> int:
    """Return the number that a task shows: the stage of a sum, otherwise the microbatch."""
    return task.stage if task.kind is Kind.REDUCE else task.microbatch


def _plain(block: _Block) -> str:
    columns, task = block.end - block.start, block.task
    if task is None:
        return "!" * columns
    letter = _letter(task)
    label = f"{letter}{_number(task)}"
    if task.kind is Kind.CALL:
        label, letter = task.phase, task.phase
    if task.backward is not None:
        label = f"F{task.microbatch}&B{task.backward[1]}"
    return (label if len(label) <= columns else letter[:columns]).ljust(columns, "─")


def _parts(block: _Block) -> Iterator[tuple[str, int, int]]:
    """Yield a block's coloured parts: letter, number, columns. A pair is a third forward, two thirds backward."""
    columns, task = block.end - block.start, block.task
    if task is None:
        yield "!", 0, columns
    elif task.backward is None:
        yield _letter(task), _number(task), columns
    else:
        forward = max(1, columns // 3)
        yield "F", task.microbatch, forward
        yield "B", task.backward[1], columns - forward
