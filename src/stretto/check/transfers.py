"""Rule: every transfer has one send and one receive, which meet, in the same order on both sides."""

from collections.abc import Iterator

import numpy as np

from stretto.check.placement import home_devices, settled, transfer_ends
from stretto.check.violation import Violation
from stretto.program.columns import Bools
from stretto.program.needs import messages
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, SENDS, Kind


def transfers(program: Program, judged: Bools) -> Iterator[Violation]:
    """Check that the transfers in `judged` have two ends each, once."""
    yield from _ends(program, judged, gradient=False)
    if program.work.among((*BACKWARDS, Kind.SEND_B, Kind.RECV_B)).any():
        yield from _ends(program, judged, gradient=True)
    yield from _unmatched(program, judged)
    yield from _strangers(program)


def _ends(program: Program, judged: Bools, *, gradient: bool) -> Iterator[Violation]:
    """Require one send and one receive for each hand-over between devices, and no other transfers."""
    work = program.work
    stages, microbatches = program.placement.stages, program.placement.microbatches
    sends, receives, step = (Kind.SEND_B, Kind.RECV_B, -1) if gradient else (Kind.SEND_F, Kind.RECV_F, 1)
    stage, microbatch = (grid.ravel() for grid in np.indices((stages, microbatches)))
    sender, receiver = home_devices(program, stage, microbatch), home_devices(program, stage + step, microbatch)
    runs = settled(program, gradient=gradient)
    expected = (receiver >= 0) & (sender != receiver)
    expected &= runs[stage + 1, microbatch] & runs[stage + 1 + step, microbatch]

    origin, _ = transfer_ends(program)
    for kind in (sends, receives):
        moved = (work.kind == kind) & (origin >= 0) & (origin < stages)
        count = np.bincount(origin[moved] * microbatches + work.microbatch[moved], minlength=stages * microbatches)
        for k in np.flatnonzero(expected & (count == 0)).tolist():
            yield Violation("transfers", _missing(kind, int(stage[k]), int(microbatch[k]), sender[k], receiver[k]))
        for k in np.flatnonzero(expected & (count > 1)).tolist():
            name = f"{stage[k] + (step if kind is receives else 0)}{kind.name}{microbatch[k]}"
            yield Violation("transfers", f"{name} takes place {count[k]} times")
    needed = np.zeros((stages + 2, microbatches), dtype=np.bool_)  # a spare row on either side
    needed[stage + 1, microbatch] = expected
    needless = work.among((sends, receives)) & judged & ~needed[origin + 1, work.microbatch]
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


def _unmatched(program: Program, judged: Bools) -> Iterator[Violation]:
    for index in np.flatnonzero(judged & (program.counterpart < 0)).tolist():
        task = program.task(index)
        does, other = ("sends to", "receives it there") if task.kind in SENDS else ("waits for", "sends it from there")
        message = f"{task} on device {task.device} {does} device {task.lane.peer}, but nothing {other}"
        yield Violation("transfers", message, (index,))


def _strangers(program: Program) -> Iterator[Violation]:
    """Report transfers whose ends form a ring with anything but their other end."""
    for index in np.flatnonzero(program.moving & (program.counterpart >= 0) & ~_met(program)).tolist():
        task, others = program.task(index), [program.task(end) for end in program.ends(index)[1:]]
        names = ", ".join(f"{other} on device {other.device}" for other in others)
        message = f"{task} on device {task.device} is joined to {names}, but that is not its other end"
        yield Violation("transfers", message, (index,))


def _met(program: Program) -> Bools:
    """Return which tasks are ends of a transfer that meet: a send and a receive of one message on one link."""
    ends = np.flatnonzero(program.moving & (program.counterpart >= 0))
    message, sends = np.full(len(program), -1), program.work.among(SENDS)
    message[ends] = messages(program.lanes, program.lane, program.work, ends)
    other = program.counterpart[ends]
    met = np.zeros(len(program), dtype=np.bool_)
    met[ends] = (program.counterpart[other] == ends) & (message[other] == message[ends]) & (sends[other] != sends[ends])
    return met


def transfer_order(program: Program) -> Iterator[Violation]:
    """Require each link's receives to be in the order of its sends."""
    sent = np.flatnonzero(program.work.among(SENDS) & _met(program))
    sent = sent[np.argsort(program.lane[sent], kind="stable")]
    first, second = sent[:-1], sent[1:]
    swapped = (program.lane[first] == program.lane[second]) & (program.counterpart[first] > program.counterpart[second])
    for a, b in zip(first[swapped].tolist(), second[swapped].tolist(), strict=True):
        lane = program.lanes[program.lane[a]]
        message = (
            f"device {lane.device} sends {program.task(a)} before {program.task(b)}, "
            f"but device {lane.peer} receives {program.task(int(program.counterpart[b]))} first"
        )
        yield Violation("transfers", message, (a, b))
