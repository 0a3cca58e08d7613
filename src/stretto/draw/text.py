"""A timeline as text: one line per device, in plain characters or in colour."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from stretto.program.task import Kind, Task
from stretto.timeline import Timeline

_LETTER = {Kind.F: "F", Kind.B: "B", Kind.I: "I", Kind.W: "W", Kind.WGRAD: "W", Kind.PAIR: "&"}
_SHADES = {  # two of each, so that neighbours stand apart
    "F": ("on #f5a742", "on #f8c177"),
    "B": ("on #2e8b57", "on #4aa873"),
    "I": ("on #8fd694", "on #b4e5b8"),
    "W": ("on #6fa8dc", "on #9cc4ea"),
}
_MEANING = {"F": "forward", "B": "backward", "I": "backward for input", "W": "backward for weights"}
_WIDEST = 4  # columns for the shortest task; more adds nothing


def draw_text(timeline: Timeline, *, width: int = 100) -> str:
    """One line per device. Where a task is wide enough it says which microbatch, otherwise which op.

    >>> from stretto import one_f_one_b, simulate
    >>> print(draw_text(simulate(one_f_one_b(devices=2, microbatches=2)), width=60))
    0 F0──F1──········B0──────····B1──────
    1 ····F0──B0──────F1──B1──────········
    """
    grid = _Grid.of(timeline, width)
    lines = []
    for device, blocks in enumerate(grid.rows):
        line = [grid.label(device)]
        column = 0
        for block in blocks:
            line.append("·" * (block.start - column) + _plain(block))
            column = block.end
        lines.append("".join(line) + "·" * (grid.columns - column))
    return "\n".join(lines)


def draw_rich(timeline: Timeline, *, width: int = 100) -> Text:
    """The same in colour: orange forward, green backward, light green for input, blue for weights."""
    grid = _Grid.of(timeline, width)
    text = Text(no_wrap=True, overflow="crop")
    for device, blocks in enumerate(grid.rows):
        text.append(grid.label(device), style="bold")
        column = 0
        for block in blocks:
            text.append(" " * (block.start - column))
            for letter, microbatch, columns in _parts(block):
                labels = (f"{letter}{microbatch}", str(microbatch), "")  # the longest that fits
                shown = next(label for label in labels if len(label) <= columns).center(columns)
                text.append(shown, style=f"black {_SHADES[letter][microbatch % 2]}")
            column = block.end
        text.append("\n")
    for letter, meaning in _MEANING.items():
        text.append(f" {letter} ", style=f"black {_SHADES[letter][0]}")
        text.append(f" {meaning}   ")
    return text


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    task: Task


@dataclass(frozen=True, slots=True)
class _Grid:
    """Columns of equal time; `rows` holds each device's blocks, left to right."""

    rows: list[list[_Block]]
    columns: int

    @staticmethod
    def of(timeline: Timeline, width: int) -> "_Grid":
        program = timeline.program
        room = max(10, width - len(str(program.devices - 1)) - 1)
        length = timeline.end - timeline.start
        drawn = np.flatnonzero(program.compute & (length > 0))
        if not len(drawn) or timeline.makespan <= 0:
            return _Grid([[] for _ in range(program.devices)], 0)
        shortest = float(length[drawn].min())
        per_shortest = min(_WIDEST, int(room * shortest / timeline.makespan))
        scale = per_shortest / shortest if per_shortest else room / timeline.makespan
        start = np.rint((timeline.start - timeline.start.min()) * scale).astype(int)
        end = np.rint((timeline.end - timeline.start.min()) * scale).astype(int)
        rows: list[list[_Block]] = [[] for _ in range(program.devices)]
        for index in drawn[end[drawn] > start[drawn]].tolist():
            task = program.task(index)
            rows[task.device].append(_Block(int(start[index]), int(end[index]), task))
        return _Grid(rows, int(end[drawn].max()))

    def label(self, device: int) -> str:
        return f"{device:>{len(str(len(self.rows) - 1))}} "


def _plain(block: _Block) -> str:
    columns, task = block.end - block.start, block.task
    letter = _LETTER[task.kind]
    label = f"{letter}{task.microbatch}"
    if task.backward is not None:
        label = f"F{task.microbatch}&B{task.backward[1]}"
    return (label if len(label) <= columns else letter[:columns]).ljust(columns, "─")


def _parts(block: _Block) -> Iterator[tuple[str, int, int]]:
    """The coloured parts of a block: letter, microbatch, columns. A pair is a third forward, two thirds backward."""
    columns, task = block.end - block.start, block.task
    if task.backward is None:
        yield _LETTER[task.kind], task.microbatch, columns
    else:
        forward = max(1, columns // 3)
        yield "F", task.microbatch, forward
        yield "B", task.backward[1], columns - forward
