"""Reused buffers: which tasks refill each one, and which task empties it in between."""

from collections.abc import Iterator

import numpy as np

from stretto.program.columns import Ints, TaskColumns
from stretto.program.index import TaskIndex
from stretto.program.task import COPIES, Kind


def refills(tables: TaskIndex, device: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield three columns per kind of buffer: the tasks that refill a buffer, the tasks that filled it before, and
    the tasks that empty it in between (−1 where none does).

    Forwards and onloads fill activation buffers, offloads host buffers. H2D copies and broadcasts have buffers of
    their own.
    """
    work = tables.work
    fills = np.flatnonzero(work.slot >= 0)
    if not len(fills):
        return
    for kinds in ((Kind.F, Kind.PAIR, Kind.ONLOAD), (Kind.OFFLOAD,), (Kind.H2D,), (Kind.BROADCAST,)):
        task = fills[work.among(kinds)[fills]]
        place = device[task] * (int(work.slot.max()) + 1) + work.slot[task]
        order = np.argsort(place, kind="stable")
        again = place[order[1:]] == place[order[:-1]]
        before, after = task[order[:-1][again]], task[order[1:][again]]
        yield after, before, _emptying(tables, device, before)


def _emptying(tables: TaskIndex, device: Ints, fills: Ints) -> Ints:
    """Return, for each task that fills a buffer, the task that uses the contents last.

    A forward's buffer is emptied by its offload if there is one, otherwise by its backward; an onload's by the
    backward; an offload's by the onload; an H2D copy's by the broadcast (without one, by the reload); a broadcast's by
    the reload.
    """
    work = tables.work
    kind, stage, microbatch = work.kind[fills], work.stage[fills], work.microbatch[fills]
    broadcast, reload = (
        by_bucket(work, device, kind)[device[fills], microbatch] for kind in (Kind.BROADCAST, Kind.RELOAD)
    )
    offload, onload = (tables.end(kind)[stage, microbatch] for kind in COPIES)
    backward = tables.back_results[stage, microbatch]
    update = np.where((kind == Kind.H2D) & (broadcast >= 0), broadcast, reload)
    training = np.where((kind != Kind.ONLOAD) & (offload >= 0), offload, backward)
    training = np.where(kind == Kind.OFFLOAD, onload, training)
    return np.where((kind == Kind.H2D) | (kind == Kind.BROADCAST), update, training)


def by_bucket(work: TaskColumns, device: Ints, kind: Kind) -> Ints:
    """Return a weight update's tasks of this kind as a table [device, bucket]; −1 where there is none."""
    table = np.full((int(device.max()) + 1, int(work.microbatch.max()) + 1), -1)
    task = np.flatnonzero(work.kind == kind)[::-1]
    table[device[task], work.microbatch[task]] = task
    return table
