"""When memory that tasks of several streams share may go back to the allocator."""

from bisect import bisect_left
from collections.abc import Sequence

from stretto.program.task import Lane, Task

_OWNERS = ("compute", "comm", "host")  # lanes in whose streams tasks make memory that others use


def kept_until(tasks: Sequence[Task], needs: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each task, the number of tasks to issue before what it used may be released.

    Released memory is given to the next task of the stream that it was made in. That stream must by then have been made
    to wait for everything that used the memory: an order of the program, which holds however far ahead of the device
    the host is. Waits for transfers and copies do not count, since such work may run in streams of its own.
    """
    lanes = sorted({task.lane for task in tasks if task.lane.name in _OWNERS})
    places: dict[Lane, list[int]] = {lane: [] for lane in lanes}  # of the tasks of each lane
    seen: dict[Lane, list[dict[Lane, int]]] = {lane: [] for lane in lanes}  # the last tasks these have waited for
    known: list[dict[Lane, int]] = []  # the same by task
    for at, task in enumerate(tasks):
        own = task.lane
        if own not in places:
            known.append({})
            continue
        waited = dict(seen[own][-1]) if seen[own] else {}
        for need in needs[at]:
            for lane, last in known[need].items():
                waited[lane] = max(last, waited.get(lane, -1))
        waited[own] = at
        known.append(waited)
        places[own].append(at)
        seen[own].append(waited)
    until = []
    for at, task in enumerate(tasks):
        first = at + 1
        for lane in lanes:
            if lane != task.lane:
                safe = bisect_left(seen[lane], at, key=lambda waited: waited.get(task.lane, -1))
                first = max(first, places[lane][safe - 1] + 1 if safe else 0)
        until.append(first)
    return until
