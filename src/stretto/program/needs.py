"""Gives tasks their needs and joins the ends of each transfer and collective."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from stretto.ir.placement import Placement
from stretto.program.anatomy import Anatomy
from stretto.program.buffers import refills
from stretto.program.columns import Bools, Ints, TaskColumns, last_before, next_after, queue_edges
from stretto.program.experts import expert_rings
from stretto.program.index import TaskIndex
from stretto.program.program import Program
from stretto.program.sums import sum_needs, sum_rings
from stretto.program.task import COMPUTE, COPIES, RECEIVES, SENDS, Kind, Lane, Task


def link_tasks(tasks: Iterable[Task], placement: Placement, anatomy: Anatomy | None = None) -> Program:
    """Return a program of these tasks, in this order."""
    tasks = list(tasks)
    lanes, lane = lanes_of(tasks)
    work = TaskColumns.of_tasks(tasks)
    anatomy = anatomy or Anatomy.whole(placement.stages)
    counterpart = _counterparts(lanes, lane, work)
    join_rings(lanes, lane, work, counterpart, placement, anatomy)
    return link(lanes, lane, work, counterpart, placement, anatomy)


def join_rings(
    lanes: tuple[Lane, ...],
    lane: Ints,
    work: TaskColumns,
    counterpart: Ints,
    placement: Placement,
    anatomy: Anatomy,
) -> None:
    """Join the ends of each sum, and of what expert-parallel ranks run together, in place."""
    device = np.array([lane.device for lane in lanes])[lane]
    sum_rings(work, device, placement, counterpart)
    expert_rings(work, anatomy, placement, counterpart)


def lanes_of(tasks: Sequence[Task]) -> tuple[tuple[Lane, ...], Ints]:
    """Return the lanes that tasks use, and each task's lane as an index into them."""
    lanes = tuple(sorted({task.lane for task in tasks}))
    index = {lane: k for k, lane in enumerate(lanes)}
    return lanes, np.array([index[task.lane] for task in tasks])


def link(
    lanes: tuple[Lane, ...], lane: Ints, work: TaskColumns, counterpart: Ints, placement: Placement, anatomy: Anatomy
) -> Program:
    """Return a program of this work on these lanes, with the needs that training implies.

    A missing need is no error here: the task goes without it, and `check` reports it.
    """
    work.validate(placement)
    device = np.array([lane.device for lane in lanes])[lane]
    tables = TaskIndex(work, anatomy, placement)
    needs = (
        (task, np.where(device[task] == device[need], need, -1))  # transfers cover the others
        for task, need in (
            *_needs(tables, device),
            *_memory_needs(tables, device, *(_on(name, lanes, lane) for name in ("compute", "comm"))),
            sum_needs(work, anatomy, lane, device),
            _host_needs(lanes, lane, device),
        )
    )
    return Program.of(lanes, lane, work, needs, counterpart, placement, anatomy)


def _needs(tables: TaskIndex, device: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield pairs of columns, tasks and what they need; −1 where either does not exist."""
    anatomy = tables.anatomy
    forward, backward = tables.forward, tables.backward
    # A pass starts from what the previous stage (backward: the next) hands over, by a transfer or on this device.
    for first, result, receive, step in (
        (tables.starts, tables.results, Kind.RECV_F, 1),
        (tables.back_starts, tables.back_results, Kind.RECV_B, -1),
    ):
        arrival = tables.end(receive)
        arrives = (arrival >= 0) & (device[arrival] == device[first])
        yield first, np.where(arrives, arrival, np.roll(result, step, axis=0))
    yield tables.back_starts, tables.results
    # A pass's parts follow one another; a weight gradient follows its own part of the backward.
    for table, rows in ((forward, anatomy.forward_rows), (backward, anatomy.backward_rows)):
        inside = np.ones(len(table), dtype=np.bool_)
        inside[rows[:-1]] = False
        yield table[inside], table[np.flatnonzero(inside) - 1]
    yield tables.weight, backward[anatomy.weight_needs]
    yield tables.end(Kind.SEND_F), tables.results
    yield tables.end(Kind.SEND_B), tables.back_results


def _memory_needs(tables: TaskIndex, device: Ints, computes: Bools, communicates: Bools) -> Iterator[tuple[Ints, Ints]]:
    """Yield the same for reused buffers, for recomputation, and for copies to host memory and back.

    `computes` and `communicates` say which tasks are on compute and comm lanes.
    """
    work = tables.work
    emptied = np.full(len(device), -1)
    for fills, _, empties in refills(tables, device):
        yield fills, empties
        emptied[fills] = empties
    if work.among((Kind.RECOMPUTE,)).any():
        yield tables.recompute, tables.per_part(tables.results)
        yield tables.backward, tables.recompute
    if not work.among(COPIES).any():
        return
    offload, onload = tables.end(Kind.OFFLOAD), tables.end(Kind.ONLOAD)
    yield offload, tables.results
    yield onload, offload
    # A backward may start with communication, and recomputation comes before it: each waits for the onload.
    yield tables.back_starts, onload
    yield tables.first_compute(tables.backward), onload
    yield tables.recompute, tables.per_part(onload)
    onloads = np.flatnonzero(work.kind == Kind.ONLOAD)
    yield onloads, last_before(work.among(COMPUTE), device)[onloads]  # no earlier than the action it runs beside
    # If that action begins with a forward that waits for a pass to leave, so does the onload: else the pass that
    # comes back would take memory beside the one that leaves, and compute would not start earlier.
    beside = next_after(computes, device)[onloads]
    left = np.where(beside >= 0, emptied[beside], -1)
    left = np.where((left >= 0) & (left < onloads) & (work.kind[left] == Kind.OFFLOAD), left, -1)
    yield onloads, left
    # The first task that waits for a pass to leave frees its memory, for every lane that computes: all of them wait.
    first = np.full(len(device), len(device))
    for task, need in ((np.arange(len(device)), emptied), (onloads, left), (onload.ravel(), offload.ravel())):
        found = (need >= 0) & (task >= 0)
        np.minimum.at(first, need[found], task[found])
    offloads = np.flatnonzero((work.kind == Kind.OFFLOAD) & (first < len(device)))
    for on_lane in (computes, communicates):
        waiting = next_after(on_lane, device)[first[offloads]]
        yield waiting[waiting >= 0], offloads[waiting >= 0]


def _host_needs(lanes: tuple[Lane, ...], lane: Ints, device: Ints) -> tuple[Ints, Ints]:
    """Return what waits because the host does: while it waits for numbers from the device, it issues nothing. Of the
    tasks that it issues afterwards, the first on each lane are enough.
    """
    waits = _on("host", lanes, lane)
    if not waits.any():
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    before, previous = last_before(waits, device), np.full(len(lane), -1)
    earlier, later = queue_edges(lane)
    previous[later] = earlier
    task = np.flatnonzero((before >= 0) & ~waits & (previous < before))
    return task, before[task]


def _on(name: str, lanes: tuple[Lane, ...], lane: Ints) -> Bools:
    """Return which tasks are on lanes of this name."""
    on: Bools = np.array([lane.name == name for lane in lanes])[lane]
    return on


def _counterparts(lanes: tuple[Lane, ...], lane: Ints, work: TaskColumns) -> Ints:
    """Match the n-th send of a tensor from one device to another with its n-th receive."""
    counterpart = np.full(len(work), -1, dtype=np.int64)
    send, receive = np.flatnonzero(work.among(SENDS)), np.flatnonzero(work.among(RECEIVES))
    sent, received = (messages(lanes, lane, work, ends) for ends in (send, receive))
    send_order, receive_order = np.argsort(sent, kind="stable"), np.argsort(received, kind="stable")
    sent, received = sent[send_order], received[receive_order]
    repeat = np.arange(len(sent)) - np.searchsorted(sent, sent)  # how many equal ones were sent before
    at = np.searchsorted(received, sent) + repeat
    met = at < len(received)
    met[met] = received[at[met]] == sent[met]
    a, b = send[send_order[met]], receive[receive_order[at[met]]]
    counterpart[a], counterpart[b] = b, a
    return counterpart


def messages(lanes: tuple[Lane, ...], lane: Ints, work: TaskColumns, ends: Ints) -> Ints:
    """Return a number for what each end moves and along which link; a matching send and receive share it."""
    devices = 1 + max(max(lane.device, lane.peer or 0) for lane in lanes)
    link = np.array(
        [
            (lane.device * devices + (lane.peer or 0))
            if lane.name == "send"
            else (lane.peer or 0) * devices + lane.device
            for lane in lanes
        ]
    )
    kind = work.kind[ends]
    gradient = (kind == Kind.SEND_B) | (kind == Kind.RECV_B)
    boundary = work.stage[ends] - ((kind == Kind.RECV_F) | (kind == Kind.SEND_B))  # the stage before the boundary
    number = link[lane[ends]] * (work.stage.max() + 2) + boundary + 1
    number = number * (work.microbatch.max() + 1) + work.microbatch[ends]
    return np.asarray(number * 2 + gradient)
