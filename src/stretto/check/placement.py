"""Every task on the device where its stage lives."""

from collections.abc import Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.program import Ints, Program
from stretto.program.task import Kind, among


def home_devices(program: Program, stage: Ints, microbatch: Ints) -> Ints:
    """Where these stages live for these microbatches, by the placement; −1 for a stage that does not exist."""
    placement = program.placement
    routes = np.array(placement.routes)
    exists = (stage >= 0) & (stage < placement.stages)
    route = microbatch * len(routes) // placement.microbatches
    return np.where(exists, routes[route, np.where(exists, stage, 0)], -1)


def placement(program: Program) -> Iterator[Violation]:
    device = program.device
    home = home_devices(program, program.stage, program.microbatch)
    home_b = np.where(program.kind == Kind.PAIR, home_devices(program, program.stage_b, program.microbatch_b), home)
    for task in np.flatnonzero((device != home) | (device != home_b)).tolist():
        it = program.task(task)
        belongs = (it.stage, it.microbatch, home[task])
        if device[task] == home[task] and it.backward is not None:
            belongs = (*it.backward, home_b[task])
        message = "{} is on device {}, but stage {} of microbatch {} belongs on device {}"
        yield Violation("placement", message.format(it, it.device, *belongs), (task,))
    # A transfer's lane leads to the device where the neighbouring stage lives.
    peers = np.array([-1 if lane.peer is None else lane.peer for lane in program.lanes])[program.lane]
    onward = among(program.kind, (Kind.SEND_F, Kind.RECV_B))
    ends = among(program.kind, (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B))
    neighbour = program.stage + np.where(onward, 1, -1)
    far = home_devices(program, neighbour, program.microbatch)
    for task in np.flatnonzero(ends & (device == home) & (peers != far) & (far >= 0)).tolist():
        it = program.task(task)
        message = (
            f"{it} is on lane {it.lane} of device {it.device}, "
            f"but stage {neighbour[task]} of microbatch {it.microbatch} lives on device {far[task]}"
        )
        yield Violation("placement", message, (task,))
