"""The weight update as a program: copy from host to device, broadcast from each device in turn, reload."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from stretto.ir.errors import PlanError
from stretto.ir.placement import Placement
from stretto.program.anatomy import Anatomy
from stretto.program.buffers import by_bucket, refills
from stretto.program.columns import Ints, TaskColumns
from stretto.program.index import TaskIndex
from stretto.program.program import Program
from stretto.program.task import UPDATES, Kind, Lane

Mode = Literal["serial", "overlap_reload", "overlap_all"]
MODES: tuple[Mode, ...] = ("serial", "overlap_reload", "overlap_all")


def weight_update(*, devices: int, buckets: int, mode: Mode = "overlap_reload") -> Program:
    """Return a program that loads every bucket into every device; bucket k comes from device k mod `devices`.

    A round is one bucket from each device: all devices copy their buckets from host memory at once, then each in turn
    broadcasts its bucket into one of every device's two IPC buffers, while the other is being reloaded from.

    - "serial": no overlap; each step waits for the one before it.
    - "overlap_reload": broadcast overlaps reload. There is one H2D buffer: the next round's copies wait for this
      round's last broadcast.
    - "overlap_all": copies overlap too, into a second H2D buffer, which keeps them at most one round ahead.

    A lone device copies straight into its IPC buffers. The tasks' needs also ensure that no buffer is refilled before
    it has been emptied.

    >>> from stretto import Costs, simulate
    >>> from stretto.costs import BucketTimes
    >>> costs = Costs(bucket=BucketTimes(h2d=2, broadcast=1, reload=1))
    >>> [simulate(weight_update(devices=4, buckets=8, mode=mode), costs).makespan for mode in MODES]
    [20.0, 13.0, 11.0]
    """
    if mode not in MODES:
        raise PlanError(f"{mode!r:.40} is no mode of a weight update; there are {', '.join(MODES)}")
    for name, value in (("devices", devices), ("buckets", buckets)):
        if not isinstance(value, int) or value < 1:
            raise PlanError(f"a weight update needs at least 1 of {name} (got {value!r:.40})")
    device, work = _tasks(devices, buckets, mode)
    placement, anatomy = Placement((tuple(range(devices)),), buckets), Anatomy.whole(devices)
    refilled = ((fills, empties) for fills, _, empties in refills(TaskIndex(work, anatomy, placement), device))
    used, lane = np.unique(device * len(UPDATES) + work.kind - min(UPDATES), return_inverse=True)
    lanes = tuple(Lane(code // len(UPDATES), UPDATES[code % len(UPDATES)].name.lower()) for code in used.tolist())
    needs = (*_needs(work, device, mode), *refilled)
    return Program.of(lanes, lane, work, needs, _rings(work, device), placement, anatomy)


def _tasks(devices: int, buckets: int, mode: Mode) -> tuple[Ints, TaskColumns]:
    """Return each task's device, and the tasks, bucket by bucket; copies come before the broadcasts they overlap."""
    h2d = np.arange(buckets)
    each = np.repeat(h2d, devices)  # all devices broadcast and reload each bucket
    everyone = np.tile(np.arange(devices), buckets)
    sent = slice(None) if devices > 1 else slice(0)
    bucket = np.concatenate((h2d, each[sent], each))
    device = np.concatenate((h2d % devices, everyone[sent], everyone))
    kind = np.repeat(UPDATES, (len(h2d), len(each[sent]), len(each)))
    turns = (
        1 if devices > 1 and mode != "overlap_all" else 2
    )  # number of H2D buffers; a lone device copies into its IPC buffers
    slot = np.where(kind == Kind.H2D, bucket // devices % turns, np.where(kind == Kind.BROADCAST, bucket % 2, -1))
    ahead = 1 if mode == "overlap_all" else 0
    place = np.where(kind == Kind.H2D, np.maximum(0, bucket // devices - ahead) * devices, bucket)
    order = np.lexsort((device, kind, place))
    work = TaskColumns.simple(kind, bucket % devices, bucket, slot=slot)
    return device[order], TaskColumns.joined((work,), order)


def _needs(work: TaskColumns, device: Ints, mode: Mode) -> Iterator[tuple[Ints, Ints]]:
    """Yield needs: a broadcast needs its copy, a reload its broadcast, and each mode adds waits; −1 for none."""
    h2d, broadcast, reload = (np.flatnonzero(work.kind == kind) for kind in UPDATES)
    copied, sent, loaded = (by_bucket(work, device, kind) for kind in UPDATES)
    bucket, devices = work.microbatch, len(copied)
    alone = devices == 1
    yield broadcast, copied[device[broadcast], bucket[broadcast]]
    yield reload, (copied if alone else sent)[device[reload], bucket[reload]]
    before = bucket[h2d] // devices * devices - 1  # the last bucket of the round before the copy's
    if mode == "serial":
        yield h2d, np.where(before >= 0, loaded[device[h2d], before], -1)
        yield broadcast, np.where(bucket[broadcast] > 0, loaded[device[broadcast], bucket[broadcast] - 1], -1)
    elif mode == "overlap_reload" and not alone:
        yield h2d, np.where(before >= 0, sent[device[h2d], before], -1)


def _rings(work: TaskColumns, device: Ints) -> Ints:
    """Return the counterparts that join the ends of each broadcast into a ring."""
    counterpart = np.full(len(work), -1)
    ends = by_bucket(work, device, Kind.BROADCAST)
    if len(ends) > 1:
        counterpart[ends] = np.roll(ends, -1, axis=0)
    return counterpart
