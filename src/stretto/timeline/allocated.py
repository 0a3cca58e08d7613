"""The memory that was measured on each device, over time."""

from dataclasses import dataclass

import numpy as np

from stretto.program.columns import Ints
from stretto.program.program import Program
from stretto.timeline.memory import Floats


@dataclass(frozen=True, slots=True, eq=False)
class AllocatedMemory:
    """One device's allocated bytes after each of its tasks, in the order in which the host issued them.

    Memory is handed out when the host issues a task, which may be long before the device runs it. So that the numbers
    compare with those of `DeviceMemory`, each stands at its task's end, but no later than the end of the next compute
    task: a receive, for example, may be issued long before its message comes.
    """

    time: Floats
    bytes: Floats
    task: Ints

    @property
    def peak_bytes(self) -> float:
        """The most after any task. What a task takes and gives back within itself is not counted."""
        return float(self.bytes.max(initial=0.0))


def allocated_over_time(program: Program, end: Floats, allocated: Floats) -> list[AllocatedMemory]:
    """Return every device's curve, given the bytes allocated there when each task had been issued."""
    devices = []
    for device in range(program.devices):
        task = np.flatnonzero(program.device == device)
        computed = np.where(program.compute, end, np.inf)[task]
        latest = np.minimum.accumulate(computed[::-1])[::-1]
        time = np.maximum.accumulate(np.minimum(end[task], latest))
        devices.append(AllocatedMemory(time, allocated[task], task))
    return devices
