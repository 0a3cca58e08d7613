"""Every task on the device where its stage lives."""

from collections.abc import Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.program import Program
from stretto.program.task import RECEIVES, SENDS, Kind
from stretto.program.work import Ints


def home_devices(program: Program, stage: Ints, microbatch: Ints) -> Ints:
    """Where these stages live for these microbatches, by the placement; −1 for a stage that does not exist."""
    placement = program.placement
    routes = np.array(placement.routes)
    exists = (stage >= 0) & (stage < placement.stages)
    route = microbatch * len(routes) // placement.microbatches
    return np.where(exists, routes[route, np.where(exists, stage, 0)], -1)


def placement(program: Program) -> Iterator[Violation]:
    device, work = program.device, program.work
    home, home_b = home_devices(program, work.stage, work.microbatch), home_devices(program, *work.backward)
    for task in np.flatnonzero((device != home) | (device != home_b)).tolist():
        it = program.task(task)
        belongs = (it.stage, it.microbatch, home[task])
        if device[task] == home[task] and it.backward is not None:
            belongs = (*it.backward, home_b[task])
        message = "{} is on device {}, but stage {} of microbatch {} belongs on device {}"
        yield Violation("placement", message.format(it, it.device, *belongs), (task,))
    # A transfer's lane leads to the device where the neighbouring stage lives.
    peers = np.array([-1 if lane.peer is None else lane.peer for lane in program.lanes])[program.lane]
    onward = work.among((Kind.SEND_F, Kind.RECV_B))
    ends = work.among((*SENDS, *RECEIVES))
    neighbour = work.stage + np.where(onward, 1, -1)
    far = home_devices(program, neighbour, work.microbatch)
    for task in np.flatnonzero(ends & (device == home) & (peers != far) & (far >= 0)).tolist():
        it = program.task(task)
        message = (
            f"{it} is on lane {it.lane} of device {it.device}, "
            f"but stage {neighbour[task]} of microbatch {it.microbatch} lives on device {far[task]}"
        )
        yield Violation("placement", message, (task,))
