"""When memory that tasks of several streams share may go back to the allocator."""

from bisect import bisect_left
from collections.abc import Sequence

from stretto.program.task import PHASE_LANES, Kind, Lane, Task


def kept_until(tasks: Sequence[Task], needs: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each task of a device, the number of tasks to issue before what it used may be released.

    Released memory is given to the next task that makes memory in the stream in which it was made. That stream must by
    then have been made to wait for everything that used the memory: an order of the program, which holds however far
    ahead of the device the host is. Only phases make memory that others use. Waits for transfers and copies do not
    count, since such work may run in streams of its own. An onload takes memory of the compute lane, and makes that
    lane wait for nothing.
    """
    owner = [Lane(task.device) if task.kind is Kind.ONLOAD else task.lane for task in tasks]
    lanes = sorted({lane for lane in owner if lane.name in PHASE_LANES})
    places: dict[Lane, list[int]] = {lane: [] for lane in lanes}  # of the tasks that make memory of each lane
    seen: dict[Lane, list[dict[Lane, int]]] = {lane: [] for lane in lanes}  # the last tasks its stream has waited for
    known: list[dict[Lane, int]] = []  # the same by task
    for at, (task, own) in enumerate(zip(tasks, owner, strict=True)):
        if own not in places:
            known.append({})
            continue
        waited = dict(seen[own][-1]) if seen[own] else {}
        if task.kind is not Kind.ONLOAD:
            for need in needs[at]:
                for lane, last in known[need].items():
                    waited[lane] = max(last, waited.get(lane, -1))
            waited[own] = at
        known.append({} if task.kind is Kind.ONLOAD else waited)
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
