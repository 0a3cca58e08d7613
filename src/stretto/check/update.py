"""A weight update: every bucket once into every device, each step after the one before it."""

from collections.abc import Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.check.waits import Waits
from stretto.program.program import Program
from stretto.program.slots import by_bucket
from stretto.program.task import UPDATES, Kind
from stretto.program.work import Bools


def update(program: Program, waits: Waits) -> Iterator[Violation]:
    alone = program.placement.stages == 1  # a stage is a device that buckets come from
    yield from _coverage(program, alone=alone)
    yield from _meetings(program)
    copied, sent, loaded = (by_bucket(program.work, program.device, kind) for kind in UPDATES)
    yield from waits.missing(sent, copied)
    yield from waits.missing(loaded, copied if alone else sent)


def _coverage(program: Program, *, alone: bool) -> Iterator[Violation]:
    devices, buckets = program.placement.stages, program.placement.microbatches
    source = np.arange(buckets) % devices
    for kind in UPDATES:
        wanted: Bools = np.full((devices, buckets), not (alone and kind is Kind.BROADCAST))
        if kind is Kind.H2D:
            wanted = np.arange(devices)[:, None] == source
        task = np.flatnonzero(program.work.kind == kind)
        count = np.zeros((devices, buckets), dtype=np.int64)
        np.add.at(count, (program.device[task], program.work.microbatch[task]), 1)
        for device, bucket in np.argwhere(count != wanted).tolist():
            times = f"{count[device, bucket]} times" if count[device, bucket] else "never"
            message = f"{kind.name}{bucket} runs {times} on device {device}"
            if kind is Kind.H2D and not wanted[device, bucket]:
                message += f", but its bucket comes from device {source[bucket]}"
            yield Violation("coverage", message)


def _meetings(program: Program) -> Iterator[Violation]:
    """All ends of a broadcast are of the same bucket, one on every device."""
    devices = set(range(program.placement.stages))
    for task in np.flatnonzero(program.work.kind == Kind.BROADCAST).tolist():
        ends = program.ends(task)
        if task == min(ends):
            met = sorted(int(program.device[end]) for end in ends)
            same = len({int(program.work.microbatch[end]) for end in ends}) == 1
            if not same or met != sorted(devices):
                message = f"{program.task(task)} on device {program.device[task]} does not meet its own on every device"
                yield Violation("transfers", message, tuple(ends))
