"""Buffers that tasks fill one after the other, and which task empties each."""

from collections.abc import Iterator

import numpy as np

from stretto.program.columns import Ints, TaskColumns
from stretto.program.index import TaskIndex
from stretto.program.task import Kind


def refills(tables: TaskIndex, device: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """For each time a buffer is filled again: the task that fills it, the one that filled it before, and the one
    that empties it in between (−1 where none does).

    Activations are one kind of buffer, filled by forwards and onloads; the buffers of H2D and of broadcasts
    are two more.
    """
    work = tables.work
    fills = np.flatnonzero(work.slot >= 0)
    if not len(fills):
        return
    for kinds in ((Kind.F, Kind.PAIR, Kind.ONLOAD), (Kind.H2D,), (Kind.BROADCAST,)):
        task = fills[work.among(kinds)[fills]]
        place = device[task] * (int(work.slot.max()) + 1) + work.slot[task]
        order = np.argsort(place, kind="stable")
        again = place[order[1:]] == place[order[:-1]]
        before, after = task[order[:-1][again]], task[order[1:][again]]
        yield after, before, _emptying(tables, device, before)


def _emptying(tables: TaskIndex, device: Ints, fills: Ints) -> Ints:
    """The task that empties what each of these filled, for the last time.

    What a forward filled is emptied by its offload, if there is one, or else by its backward; what an onload
    filled by the backward; what H2D filled by the broadcast, and what a broadcast filled by the reload.
    """
    work = tables.work
    kind, stage, microbatch = work.kind[fills], work.stage[fills], work.microbatch[fills]
    broadcast, reload = (
        by_bucket(work, device, kind)[device[fills], microbatch] for kind in (Kind.BROADCAST, Kind.RELOAD)
    )
    offload = tables.end(Kind.OFFLOAD)[stage, microbatch]
    backward = tables.last(tables.backward)[stage, microbatch]
    update = np.where((kind == Kind.H2D) & (broadcast >= 0), broadcast, reload)
    training = np.where((kind != Kind.ONLOAD) & (offload >= 0), offload, backward)
    return np.where((kind == Kind.H2D) | (kind == Kind.BROADCAST), update, training)


def by_bucket(work: TaskColumns, device: Ints, kind: Kind) -> Ints:
    """A weight update's tasks of this kind, with a row per device and a column per bucket; −1 where there is none."""
    table = np.full((int(device.max()) + 1, int(work.microbatch.max()) + 1), -1)
    task = np.flatnonzero(work.kind == kind)[::-1]
    table[device[task], work.microbatch[task]] = task
    return table
