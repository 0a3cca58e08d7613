"""Rule: expert-parallel ranks run together what exchanges tokens, each with its own end, in the same order."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from stretto.check.meetings import in_order, meet
from stretto.check.placement import home_devices
from stretto.check.violation import Violation
from stretto.program.experts import meeting_points
from stretto.program.program import Program


def experts(program: Program) -> Iterator[Violation]:
    """Check what ranks run together. A task on a wrong device is reported by itself, without its ends elsewhere."""
    mesh, work, device = program.placement.mesh, program.work, program.device
    point = meeting_points(work, program.anatomy, program.placement)
    tasks = np.flatnonzero(point >= 0)
    if mesh is None or not len(tasks):
        return
    home = home_devices(program, work.stage, work.microbatch)
    meetings: dict[int, dict[int, list[int]]] = defaultdict(dict)
    misplaced: set[int] = set()
    for task in tasks.tolist():
        meetings[point.item(task)].setdefault(device.item(task), []).append(task)
        if device[task] != home[task]:
            misplaced.add(point.item(task))
    for name in misplaced:
        del meetings[name]
    for ends in meetings.values():
        here, (task, *_) = next(iter(ends.items()))
        pp, replica = mesh.place(here)
        for other in (mesh.device(pp=pp, replica=number) for number in mesh.ep_replicas(replica)):
            if other not in ends:
                message = (
                    f"{program.task(task)} on device {here} exchanges tokens with device {other}, "
                    "which does not take part"
                )
                yield Violation("transfers", message, (task,))
    complete = {name: ends for name, ends in meetings.items() if len(ends) == mesh.ep}
    yield from meet(program, complete, "one on every expert-parallel rank")
    yield from in_order(program, complete)
