"""Gives tasks their needs and joins the two ends of each transfer."""

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from stretto.ir.placement import Placement
from stretto.program.program import Ints, Program, columns, grouped
from stretto.program.task import (
    BACKWARDS,
    FORWARDS,
    RECEIVES,
    SENDS,
    WEIGHTS,
    Kind,
    Lane,
    Task,
    among,
)

_WHAT = ("kind", "stage", "microbatch", "stage_b", "microbatch_b")


class Finder:
    """Which task, if any, does a given thing for a stage and microbatch."""

    def __init__(self, placement: Placement, what: dict[str, Ints]) -> None:
        self._shape = (placement.stages + 1, placement.microbatches)  # one more row, for "no such stage"
        self.what = what

    @staticmethod
    def of(program: Program) -> "Finder":
        return Finder(program.placement, {name: getattr(program, name) for name in _WHAT})

    def forward(self) -> Ints:
        return self._find(FORWARDS, self.what["stage"], self.what["microbatch"])

    def backward(self) -> Ints:
        paired = self.what["kind"] == Kind.PAIR
        stage = np.where(paired, self.what["stage_b"], self.what["stage"])
        return self._find(BACKWARDS, stage, np.where(paired, self.what["microbatch_b"], self.what["microbatch"]))

    def end(self, kind: Kind) -> Ints:
        return self._find((kind,), self.what["stage"], self.what["microbatch"])

    def _find(self, kinds: Collection[Kind], stage: Ints, microbatch: Ints) -> Ints:
        """Task indexes by [stage, microbatch], −1 where there is none; the first where there are several."""
        chosen = np.flatnonzero(among(self.what["kind"], kinds))[::-1]
        table = np.full(self._shape, -1, dtype=np.int64)
        table[stage[chosen], microbatch[chosen]] = chosen
        return table


def link(tasks: Iterable[Task], placement: Placement) -> Program:
    """A program of these tasks in this order, with the needs that training gives them.

    Nothing is demanded here: a task whose need is not among them goes without, and `check` says so.
    """
    lanes, what = columns(tasks)
    return link_columns(lanes, what, placement)


def link_columns(lanes: tuple[Lane, ...], what: dict[str, Ints], placement: Placement) -> Program:
    find = Finder(placement, what)
    device = np.array([lane.device for lane in lanes])[what["lane"]]
    kind, stage, microbatch = what["kind"], what["stage"], what["microbatch"]
    back_stage = np.where(what["stage_b"] < 0, stage, what["stage_b"])
    back_microbatch = np.where(what["stage_b"] < 0, microbatch, what["microbatch_b"])
    forward, backward = find.forward(), find.backward()
    edges: list[tuple[Ints, Ints]] = []

    def need(tasks: Ints, sources: Ints, *, local: bool) -> None:
        there = sources >= 0
        if local:
            there &= device[tasks] == device[sources]
        edges.append((tasks[there], sources[there]))

    # A forward needs the stage before, a backward the stage after: by a transfer, or on this device.
    for of, produced, received, step, stages, microbatches in (
        (FORWARDS, forward, find.end(Kind.RECV_F), -1, stage, microbatch),
        (BACKWARDS, backward, find.end(Kind.RECV_B), 1, back_stage, back_microbatch),
    ):
        tasks = np.flatnonzero(among(kind, of))
        s, m = stages[tasks], microbatches[tasks]
        arrival = received[s, m]
        arrival = np.where((arrival >= 0) & (device[arrival] == device[tasks]), arrival, -1)
        handed = np.where(arrival >= 0, -1, produced[s + step, m])  # row −1 is the spare one: no such stage
        need(tasks, arrival, local=True)
        need(tasks, handed, local=True)
    tasks = np.flatnonzero(among(kind, BACKWARDS))
    need(tasks, forward[back_stage[tasks], back_microbatch[tasks]], local=True)
    tasks = np.flatnonzero(among(kind, WEIGHTS))
    need(tasks, backward[stage[tasks], microbatch[tasks]], local=True)
    for end, produced in ((Kind.SEND_F, forward), (Kind.SEND_B, backward)):
        tasks = np.flatnonzero(kind == end)
        need(tasks, produced[stage[tasks], microbatch[tasks]], local=True)

    task = np.concatenate([edge[0] for edge in edges])
    order, need_start = grouped(task, len(kind))
    return Program(
        placement=placement,
        lanes=lanes,
        need_start=need_start,
        need=np.concatenate([edge[1] for edge in edges])[order],
        mate=_mates(lanes, what, device),
        **what,
    )


def _mates(lanes: tuple[Lane, ...], what: dict[str, Ints], device: Ints) -> Ints:
    """The n-th send of a thing from one device to another meets its n-th receive."""
    kind = what["kind"]
    peer = np.array([-1 if lane.peer is None else lane.peer for lane in lanes])[what["lane"]]
    mate = np.full(len(kind), -1, dtype=np.int64)
    sends, receives = np.flatnonzero(among(kind, SENDS)), np.flatnonzero(among(kind, RECEIVES))
    step = np.where(kind == Kind.SEND_F, 1, np.where(kind == Kind.SEND_B, -1, 0))

    def meeting(ends: Ints, source: Ints, target: Ints) -> NDArray[np.int64]:
        """One number for where and what; a send and a receive that meet share it."""
        number = np.zeros(len(ends), dtype=np.int64)
        gradient = among(kind[ends], (Kind.SEND_B, Kind.RECV_B))
        for part, base in (
            (source, len(lanes) + 1),
            (target, len(lanes) + 1),
            (what["stage"][ends] + step[ends] + 1, int(what["stage"].max()) + 3),
            (what["microbatch"][ends], int(what["microbatch"].max()) + 1),
            (gradient, 2),
        ):
            number = number * base + part
        return number

    out = meeting(sends, device[sends], peer[sends])
    into = meeting(receives, peer[receives], device[receives])
    send_order, receive_order = np.argsort(out, kind="stable"), np.argsort(into, kind="stable")
    out, into = out[send_order], into[receive_order]
    at = np.searchsorted(into, out) + (np.arange(len(out)) - np.searchsorted(out, out))
    met = at < len(into)
    met[met] = into[at[met]] == out[met]
    a, b = sends[send_order[met]], receives[receive_order[at[met]]]
    mate[a], mate[b] = b, a
    return mate
