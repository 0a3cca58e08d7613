"""What devices do together: its ends meet, in the same order on every device."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np

from stretto.check.violation import Violation
from stretto.program.columns import Bools
from stretto.program.program import Program

_Name = TypeVar("_Name", bound=Hashable)
Meetings: TypeAlias = Mapping[_Name, Mapping[int, list[int]]]
"""The tasks of each meeting, by device; a meeting has any name."""


def alone(program: Program, joint: Bools) -> Iterator[Violation]:
    """Require every task to run by itself, except those in `joint`."""
    for index in np.flatnonzero((program.counterpart >= 0) & ~joint).tolist():
        task, other = program.task(index), program.task(program.counterpart.item(index))
        message = (
            f"{task} on device {task.device} is joined to {other} on device {other.device}, "
            "but devices do not run such tasks together"
        )
        yield Violation("transfers", message, (index,))


def meet(program: Program, meetings: Meetings[_Name], where: str) -> Iterator[Violation]:
    """Require the ends of each meeting to form a ring, one on every device; `where` says on which devices."""
    for ends_by_device in meetings.values():
        if all(len(tasks) == 1 for tasks in ends_by_device.values()):
            ends = [tasks[0] for tasks in ends_by_device.values()]
            if sorted(ends) != sorted(program.ends(ends[0])):
                message = f"the ends of {program.task(ends[0])} do not meet, {where}"
                yield Violation("transfers", message, tuple(ends))


def in_order(
    program: Program,
    meetings: Meetings[_Name],
    pairs: Callable[[list[int]], Iterable[tuple[int, int]]] = pairwise,
) -> Iterator[Violation]:
    """Require devices that have several meetings in common to have them in the same order; `pairs` chooses the pairs of
    devices to be compared among those of a meeting.
    """
    common: dict[tuple[int, int], list[_Name]] = defaultdict(list)
    for name, ends in meetings.items():
        for two in pairs(sorted(device for device, tasks in ends.items() if len(tasks) == 1)):
            common[two].append(name)
    for (one, other), names in common.items():
        for a, b in pairwise(sorted(names, key=lambda name: meetings[name][one])):
            if meetings[a][other] > meetings[b][other]:
                first, second = meetings[a][one][0], meetings[b][one][0]
                message = (
                    f"device {one} has {program.task(first)} before {program.task(second)}, "
                    f"but device {other} has {program.task(meetings[b][other][0])} first"
                )
                yield Violation("transfers", message, (first, second))
