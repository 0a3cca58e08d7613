"""User-defined programs: named calls on device lanes, and what each call needs."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stretto.ir.errors import ProgramError
from stretto.ir.placement import Placement
from stretto.program.anatomy import Anatomy
from stretto.program.columns import TaskColumns
from stretto.program.needs import lanes_of
from stretto.program.program import Program
from stretto.program.task import Kind, Lane, Task


@dataclass(frozen=True, slots=True)
class Call:
    """A call on one lane of a device; it starts once everything it needs has ended.

    Calls with the same name on several devices run as one, like the two ends of a transfer. That is how devices wait
    for each other: a call can need only calls on its own device.
    """

    name: str
    device: int = 0
    lane: str = "compute"
    needs: tuple[str, ...] | list[str] = ()


def program_of(calls: Iterable[Call]) -> Program:
    """Return a program of these calls. Each lane runs its calls in the order given here.

    >>> from stretto import simulate
    >>> read = [Call(f"read{k}", lane="disk") for k in range(3)]
    >>> work = [Call(f"work{k}", needs=[f"read{k}"]) for k in range(3)]
    >>> simulate(program_of([*read, *work])).makespan
    4.0
    """
    calls = list(calls)
    for call in calls:
        _validate(call)
    if not calls:
        raise ProgramError("a program needs one call at least")
    names = {name: number for number, name in enumerate(dict.fromkeys(call.name for call in calls))}
    place: dict[tuple[int, str], int] = {}
    ends: dict[str, list[int]] = defaultdict(list)
    for at, call in enumerate(calls):
        if (call.device, call.name) in place:
            raise ProgramError(f"device {call.device} has two calls of the name {call.name!r:.40}; give each its own")
        place[call.device, call.name] = at
        ends[call.name].append(at)
    tasks = [
        Task(Lane(call.device, call.lane), Kind.CALL, call.device, 0, part=names[call.name], phase=call.name)
        for call in calls
    ]
    needs = [(at, place[_needed(call, need, place)]) for at, call in enumerate(calls) for need in call.needs]
    needing, need = np.array(needs, dtype=np.int64).reshape(-1, 2).T
    counterpart = np.full(len(calls), -1)
    for ring in ends.values():
        if len(ring) > 1:
            counterpart[ring] = np.roll(ring, -1)
    lanes, lane = lanes_of(tasks)
    devices = 1 + max(call.device for call in calls)
    placement, anatomy = Placement((tuple(range(devices)),), 1), Anatomy.whole(devices, calls=names)
    return Program.of(lanes, lane, TaskColumns.of_tasks(tasks), [(needing, need)], counterpart, placement, anatomy)


def _validate(call: Call) -> None:
    if not isinstance(call, Call):
        raise ProgramError(f"a program is made of Calls (got {call!r:.60})")
    for what, value in (("name", call.name), ("lane", call.lane)):
        if not isinstance(value, str) or not value or not value.isprintable():
            raise ProgramError(f"a call's {what} is a word (got {value!r:.60})")
    if not isinstance(call.device, int) or not 0 <= call.device < 2**20:
        raise ProgramError(f"the device of {call.name!r:.40} is a number from 0 on (got {call.device!r:.40})")
    if not isinstance(call.needs, list | tuple) or not all(isinstance(need, str) for need in call.needs):
        raise ProgramError(f"what {call.name!r:.40} needs is a list of names (got {call.needs!r:.60})")


def _needed(call: Call, need: str, place: dict[tuple[int, str], int]) -> tuple[int, str]:
    if (call.device, need) not in place or need == call.name:
        where = f"{call.name!r:.40} on device {call.device} needs {need!r:.40}"
        if need == call.name:
            raise ProgramError(f"{where}, which is itself")
        elsewhere = any(name == need for _, name in place)
        hint = "; what another device does is brought by a call of one name on both" if elsewhere else ""
        raise ProgramError(f"{where}, which is not there{hint}")
    return call.device, need
