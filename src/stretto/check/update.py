"""Rules of a weight update: every bucket reaches every device once, each step after the one before it."""

from collections.abc import Iterator

import numpy as np

from stretto.check.meetings import alone
from stretto.check.violation import Violation
from stretto.check.waits import Waits
from stretto.program.buffers import by_bucket
from stretto.program.columns import Bools, Ints
from stretto.program.program import Program
from stretto.program.task import UPDATES, Kind


def update(program: Program, waits: Waits) -> Iterator[Violation]:
    single = program.placement.stages == 1  # a stage is a device that buckets come from
    yield from _coverage(program, single=single)
    yield from _sources(program)
    yield from alone(program, program.work.kind == Kind.BROADCAST)
    copied, sent, loaded = (by_bucket(program.work, program.device, kind) for kind in UPDATES)
    if not single:
        yield from _meetings(program, sent)
    yield from waits.missing(sent, copied)
    yield from waits.missing(loaded, copied if single else sent)


def _coverage(program: Program, *, single: bool) -> Iterator[Violation]:
    devices, buckets = program.placement.stages, program.placement.microbatches
    source = np.arange(buckets) % devices
    for kind in UPDATES:
        expected: Bools = np.full((devices, buckets), not (single and kind is Kind.BROADCAST))
        if kind is Kind.H2D:
            expected = np.arange(devices)[:, None] == source
        task = np.flatnonzero(program.work.kind == kind)
        count = np.zeros((devices, buckets), dtype=np.int64)
        np.add.at(count, (program.device[task], program.work.microbatch[task]), 1)
        for device, bucket in np.argwhere(count != expected).tolist():
            times = f"{count[device, bucket]} times" if count[device, bucket] else "never"
            message = f"{kind.name}{bucket} runs {times} on device {device}"
            if kind is Kind.H2D and not expected[device, bucket]:
                message += f", but its bucket comes from device {source[bucket]}"
            yield Violation("coverage", message)


def _sources(program: Program) -> Iterator[Violation]:
    """Require bucket k to come from device k mod the number of devices."""
    wrong = program.work.stage != program.work.microbatch % program.placement.stages
    for index in np.flatnonzero(wrong).tolist():
        task = program.task(index)
        message = f"{task} on device {task.device} is to come from device {task.stage}, but its bucket is not there"
        yield Violation("placement", message, (index,))


def _meetings(program: Program, sent: Ints) -> Iterator[Violation]:
    """Require the ends of a broadcast to be those of its bucket, one on every device."""
    sent = sent[:, (sent >= 0).all(axis=0)]  # _coverage reports missing ends
    bucket = np.arange(sent.shape[1])
    met = np.zeros(sent.shape, dtype=np.bool_)
    end = sent[0]
    for _ in range(len(sent)):
        met[program.device[end], bucket] |= sent[program.device[end], bucket] == end
        end = program.counterpart[end]
    for k in np.flatnonzero(~met.all(axis=0) | (end != sent[0])).tolist():
        message = f"the ends of {program.task(int(sent[0, k]))} do not meet, one on every device"
        yield Violation("transfers", message, tuple(sent[:, k].tolist()))
