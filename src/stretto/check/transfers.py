"""Every transfer has two ends, once, in the same order on both sides."""

from collections.abc import Iterator

import numpy as np

from stretto.check.placement import home_devices
from stretto.check.violation import Violation
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, RECEIVES, SENDS, Kind


def transfers(program: Program) -> Iterator[Violation]:
    yield from _ends(program)
    yield from _order(program)


def _ends(program: Program) -> Iterator[Violation]:
    """Each hand-over between devices has one send and one receive; nothing else is moved."""
    stages, microbatches = program.placement.stages, program.placement.microbatches
    work = program.work
    stage, microbatch = (grid.ravel() for grid in np.indices((stages, microbatches)))
    training = work.among(BACKWARDS).any()
    for sends, receives, step, produced in (
        (Kind.SEND_F, Kind.RECV_F, 1, work.forwards(program.placement)),
        (Kind.SEND_B, Kind.RECV_B, -1, work.backwards(program.placement)),
    ):
        here = home_devices(program, stage, microbatch)
        there = home_devices(program, stage + step, microbatch)
        crosses = (there >= 0) & (here != there) & (training or step == 1)
        # What never runs is reported as such; its transfer is not missed as well.
        runs = (produced[stage, microbatch] >= 0) & (
            produced[np.where(there >= 0, stage + step, stage), microbatch] >= 0
        )
        for kind, at in ((sends, stage), (receives, stage + step)):
            cell = work.stage * microbatches + work.microbatch
            count = np.bincount(cell[work.kind == kind], minlength=stages * microbatches)
            number = np.where(there >= 0, count[np.where(there >= 0, at * microbatches + microbatch, 0)], 0)
            for k in np.flatnonzero((number == 0) & crosses & runs).tolist():
                yield Violation("transfers", _missing(kind, int(stage[k]), int(microbatch[k]), here[k], there[k]))
            for k in np.flatnonzero((number > 1) & crosses).tolist():
                name = f"{at[k]}{kind.name}{microbatch[k]}"
                yield Violation("transfers", f"{name} takes place {number[k]} times")
        needless = work.among((sends, receives))
        origin = work.stage - np.where(work.kind == receives, step, 0)
        wanted = np.zeros((stages + 2, microbatches), dtype=np.bool_)  # a spare row on either side
        wanted[stage + 1, microbatch] = crosses
        needless &= ~wanted[origin + 1, work.microbatch]
        for task in np.flatnonzero(needless).tolist():
            message = f"{program.task(task)} on device {program.device[task]} moves what nobody there needs"
            yield Violation("transfers", message, (task,))


def _missing(kind: Kind, stage: int, microbatch: int, here: int, there: int) -> str:
    what = f"the output of {stage}F{microbatch}"
    if kind in (Kind.SEND_B, Kind.RECV_B):
        what = f"the gradient of stage {stage}'s input for microbatch {microbatch}"
    if kind in SENDS:
        return f"device {here} never sends {what} to device {there}"
    return f"device {there} never receives {what} from device {here}"


def _order(program: Program) -> Iterator[Violation]:
    """Along a link, things arrive in the order they were sent."""
    sent = np.flatnonzero(program.work.among(SENDS) & (program.mate >= 0))
    sent = sent[np.argsort(program.lane[sent], kind="stable")]
    first, second = sent[:-1], sent[1:]
    swapped = (program.lane[first] == program.lane[second]) & (program.mate[first] > program.mate[second])
    for a, b in zip(first[swapped].tolist(), second[swapped].tolist(), strict=True):
        lane = program.lanes[program.lane[a]]
        message = (
            f"device {lane.device} sends {program.task(a)} before {program.task(b)}, "
            f"but device {lane.peer} receives {program.task(int(program.mate[b]))} first"
        )
        yield Violation("transfers", message, (a, b))
    for task in np.flatnonzero(program.work.among((*SENDS, *RECEIVES)) & (program.mate < 0)).tolist():
        it = program.task(task)
        does, other = ("sends to", "receives it there") if it.kind in SENDS else ("waits for", "sends it from there")
        message = f"{it} on device {it.device} {does} device {it.lane.peer}, but nothing {other}"
        yield Violation("transfers", message, (task,))
