"""Rule: every task runs on a lane of its kind, or its phase's, on the device where its stage lives."""

from collections.abc import Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.columns import Bools, Ints
from stretto.program.program import Program
from stretto.program.task import COMPUTE, LANES, PHASE_LANES, RECEIVES, SENDS, Kind


def lanes(program: Program) -> Iterator[Violation]:
    """Require every task to be on a lane of its kind, and every phase on its own."""
    fits = np.array([[kind in LANES and lane.name in LANES[kind] for kind in Kind] for lane in program.lanes])
    number = np.array([PHASE_LANES.index(lane.name) if lane.name in PHASE_LANES else -1 for lane in program.lanes])
    elsewhere = program.work.among(COMPUTE) & (number[program.lane] != _phase_lanes(program))
    for index in np.flatnonzero(~fits[program.lane, program.work.kind] | elsewhere).tolist():
        task = program.task(index)
        message = f"{task} on device {task.device} is on lane {task.lane}, where such tasks are not done"
        yield Violation("placement", message, (index,))


def _phase_lanes(program: Program) -> Ints:
    """Return the lane of each task's phase, as an index into `PHASE_LANES`; weight gradients and pairs compute."""
    work, anatomy = program.work, program.anatomy
    own = np.zeros(len(program), dtype=np.int64)
    for kinds, parts, rows in (
        ((Kind.F,), anatomy.forward, anatomy.forward_rows),
        ((Kind.B, Kind.I, Kind.RECOMPUTE), anatomy.backward, anatomy.backward_rows),
    ):
        lane = np.array([PHASE_LANES.index(part.phase.lane) for stage in parts for part in stage])
        task = np.flatnonzero(work.among(kinds))
        own[task] = lane[rows[work.stage[task]] + work.part[task]]
    return own


def placement(program: Program, judged: Bools) -> Iterator[Violation]:
    """Check actions, and the transfers in `judged`."""
    device, work = program.device, program.work
    judged = judged | ~(program.moving | (work.kind == Kind.REDUCE))
    home, home_b = home_devices(program, work.stage, work.microbatch), home_devices(program, *work.backward)
    for index in np.flatnonzero(judged & ((device != home) | (device != home_b))).tolist():
        task = program.task(index)
        belongs = (task.stage, task.microbatch, home[index])
        if device[index] == home[index] and task.backward is not None:
            belongs = (*task.backward, home_b[index])
        message = "{} is on device {}, but stage {} of microbatch {} belongs on device {}"
        yield Violation("placement", message.format(task, task.device, *belongs), (index,))
    # A transfer's lane leads to the device where the neighbouring stage lives.
    peers = np.array([-1 if lane.peer is None else lane.peer for lane in program.lanes])[program.lane]
    origin, target = transfer_ends(program)
    neighbour = np.where(work.among(SENDS), target, origin)
    far = home_devices(program, neighbour, work.microbatch)
    for index in np.flatnonzero(program.moving & judged & (device == home) & (peers != far) & (far >= 0)).tolist():
        task = program.task(index)
        message = (
            f"{task} is on lane {task.lane} of device {task.device}, "
            f"but stage {neighbour[index]} of microbatch {task.microbatch} lives on device {far[index]}"
        )
        yield Violation("placement", message, (index,))


def home_devices(program: Program, stage: Ints, microbatch: Ints) -> Ints:
    """Return the device of each stage for each microbatch, by the placement; −1 for a stage that does not exist."""
    placement = program.placement
    routes = np.array(placement.routes)
    exists = (stage >= 0) & (stage < placement.stages)
    route = microbatch * len(routes) // placement.microbatches
    return np.where(exists, routes[route, np.where(exists, stage, 0)], -1)


def transfer_ends(program: Program) -> tuple[Ints, Ints]:
    """Return the stage each transfer comes from and the stage it goes to; for other tasks, their own stage."""
    work = program.work
    onward = np.where(work.among((Kind.SEND_F, Kind.RECV_F)), 1, np.where(program.moving, -1, 0))
    received = work.among(RECEIVES)
    return np.where(received, work.stage - onward, work.stage), np.where(received, work.stage, work.stage + onward)


def settled(program: Program, *, gradient: bool) -> Bools:
    """Return which [stage + 1, microbatch] forwards (or backwards) run, and run where they should.

    The first and last rows stand for stages that do not exist; nothing waits for them, so they count as settled.
    """
    tables = program.tables
    task = (tables.back_starts if gradient else tables.starts)[:-1]
    stage, microbatch = np.indices(task.shape)
    home = home_devices(program, stage.ravel(), microbatch.ravel()).reshape(task.shape)
    return np.pad((task >= 0) & (program.device[task] == home), ((1, 1), (0, 0)), constant_values=True)


def judged_transfers(program: Program) -> Bools:
    """Return which tasks are transfers between two actions that run where they should.

    A missing or misplaced action is reported by itself, without its transfers.
    """
    work = program.work
    origin, target = transfer_ends(program)
    both = [
        kinds[origin + 1, work.microbatch] & kinds[target + 1, work.microbatch]
        for kinds in (settled(program, gradient=False), settled(program, gradient=True))
    ]
    gradient = work.among((Kind.SEND_B, Kind.RECV_B))
    return program.moving & np.where(gradient, both[1], both[0])
