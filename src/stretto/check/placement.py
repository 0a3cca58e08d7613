"""Every task on the device where its stage lives."""

from collections.abc import Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.columns import Bools, Ints
from stretto.program.program import Program
from stretto.program.task import LANES, RECEIVES, SENDS, Kind


def lanes(program: Program) -> Iterator[Violation]:
    """Every task is on a lane of its kind."""
    fits = np.array([[kind in LANES and lane.name in LANES[kind] for kind in Kind] for lane in program.lanes])
    for task in np.flatnonzero(~fits[program.lane, program.work.kind]).tolist():
        it = program.task(task)
        message = f"{it} on device {it.device} is on lane {it.lane}, where such tasks are not done"
        yield Violation("placement", message, (task,))


def placement(program: Program, judged: Bools) -> Iterator[Violation]:
    """Of actions, and of the transfers that are to be judged."""
    device, work = program.device, program.work
    judged = judged | ~program.joint
    home, home_b = home_devices(program, work.stage, work.microbatch), home_devices(program, *work.backward)
    for task in np.flatnonzero(judged & ((device != home) | (device != home_b))).tolist():
        it = program.task(task)
        belongs = (it.stage, it.microbatch, home[task])
        if device[task] == home[task] and it.backward is not None:
            belongs = (*it.backward, home_b[task])
        message = "{} is on device {}, but stage {} of microbatch {} belongs on device {}"
        yield Violation("placement", message.format(it, it.device, *belongs), (task,))
    # A transfer's lane leads to the device where the neighbouring stage lives.
    peers = np.array([-1 if lane.peer is None else lane.peer for lane in program.lanes])[program.lane]
    origin, target = transfer_ends(program)
    neighbour = np.where(work.among(SENDS), target, origin)
    far = home_devices(program, neighbour, work.microbatch)
    for task in np.flatnonzero(program.moving & judged & (device == home) & (peers != far) & (far >= 0)).tolist():
        it = program.task(task)
        message = (
            f"{it} is on lane {it.lane} of device {it.device}, "
            f"but stage {neighbour[task]} of microbatch {it.microbatch} lives on device {far[task]}"
        )
        yield Violation("placement", message, (task,))


def home_devices(program: Program, stage: Ints, microbatch: Ints) -> Ints:
    """Where these stages live for these microbatches, by the placement; −1 for a stage that does not exist."""
    placement = program.placement
    routes = np.array(placement.routes)
    exists = (stage >= 0) & (stage < placement.stages)
    route = microbatch * len(routes) // placement.microbatches
    return np.where(exists, routes[route, np.where(exists, stage, 0)], -1)


def transfer_ends(program: Program) -> tuple[Ints, Ints]:
    """The stage each transfer comes from and the one it goes to; other tasks' own."""
    work = program.work
    onward = np.where(work.among((Kind.SEND_F, Kind.RECV_F)), 1, np.where(program.moving, -1, 0))
    received = work.among(RECEIVES)
    return np.where(received, work.stage - onward, work.stage), np.where(received, work.stage, work.stage + onward)


def settled(program: Program, *, gradient: bool) -> Bools:
    """Which [stage + 1, microbatch] forwards (or backwards) run, and run where they should.

    Row 0 and the last stand for stages that do not exist; nobody waits for those, so they are settled.
    """
    tables = program.tables
    task = tables.first(tables.backward if gradient else tables.forward)[:-1]
    stage, microbatch = np.indices(task.shape)
    home = home_devices(program, stage.ravel(), microbatch.ravel()).reshape(task.shape)
    return np.pad((task >= 0) & (program.device[task] == home), ((1, 1), (0, 0)), constant_values=True)


def judged_transfers(program: Program) -> Bools:
    """Transfers between two actions that run where they should.

    One that is missing or misplaced is reported as such, and not its transfers with it.
    """
    work = program.work
    origin, target = transfer_ends(program)
    both = [
        kinds[origin + 1, work.microbatch] & kinds[target + 1, work.microbatch]
        for kinds in (settled(program, gradient=False), settled(program, gradient=True))
    ]
    gradient = work.among((Kind.SEND_B, Kind.RECV_B))
    return program.moving & np.where(gradient, both[1], both[0])
