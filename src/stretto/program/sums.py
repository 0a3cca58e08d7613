"""Sums of gradients over devices: which sums a step has, and which tasks each one waits for."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from stretto.ir.placement import Placement
from stretto.program.anatomy import Anatomy
from stretto.program.columns import Ints, TaskColumns, grouped
from stretto.program.task import GRADIENTS, Kind


class Sums:
    """All sums of a step: one for each stage that lives on several devices, and for weights that stages share.

    All columns have an entry for each end of a sum, one per device; the ends of a sum are adjacent.
    """

    def __init__(self, placement: Placement, anatomy: Anatomy) -> None:
        homes: dict[int, set[int]] = defaultdict(set)
        for device, stage in placement.homes:
            homes[stage].add(device)
        every: list[tuple[int, int, tuple[int, ...]]] = [(stage, 0, (stage,)) for stage in range(placement.stages)]
        every += [(tie[0], part, tie) for part, tie in enumerate(anatomy.ties, 1)]
        ends = [
            (stage, part, stages, device)
            for stage, part, stages in every
            for devices in [sorted(set().union(*(homes[member] for member in stages)))]
            if len(devices) > 1
            for device in devices
        ]
        self.stages = [stages for _, _, stages, _ in ends]
        """The stages whose gradients are added up."""
        self.stage, self.part, self.device = (
            np.array([end[column] for end in ends], dtype=np.int64) for column in (0, 1, 3)
        )

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def work(self) -> TaskColumns:
        return TaskColumns.simple(
            np.full(len(self), Kind.REDUCE), self.stage, np.zeros_like(self.stage), part=self.part
        )

    def latest(self, key: Ints, work: TaskColumns) -> Ints:
        """Return, for each end, the greatest key of the tasks that add to its sum's gradients on any device."""
        adds = work.among(GRADIENTS)
        of_stage = np.full(1 + max(max(stages) for stages in self.stages), -1)
        stage = work.backward[0][adds]
        known = stage < len(of_stage)
        np.maximum.at(of_stage, stage[known], key[adds][known])
        return np.array([max(of_stage[member] for member in stages) for stages in self.stages])


def reduces(work: TaskColumns) -> Ints:
    """Return the tasks that are sums."""
    return np.flatnonzero(work.kind == Kind.REDUCE)


def sum_needs(work: TaskColumns, anatomy: Anatomy, lane: Ints, device: Ints) -> tuple[Ints, Ints]:
    """Return pairs of columns: sums, and for each lane of their device the last task that adds to their gradients."""
    tasks = reduces(work)
    pairs = [
        (task, stage)
        for task, part, own in zip(tasks.tolist(), work.part[tasks].tolist(), work.stage[tasks].tolist(), strict=True)
        for stage in anatomy.summed(own, part)
    ]
    if not pairs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    adds = np.flatnonzero(work.among(GRADIENTS))[::-1]
    stages = int(max(work.stage.max(), work.stage_b.max())) + 1
    _, first = np.unique(lane[adds] * stages + work.backward[0][adds], return_index=True)
    last = adds[first]  # for each lane and stage
    place = device[last] * stages + work.backward[0][last]
    order, start = grouped(place, stages * (int(device.max()) + 1))
    needs = [
        (task, last[k])
        for task, stage in pairs
        for at in [device[task] * stages + stage]
        for k in order[start[at] : start[at + 1]]
    ]
    needing, need = np.array(sorted(needs), dtype=np.int64).reshape(-1, 2).T
    return needing, need


def sum_rings(work: TaskColumns, counterpart: Ints) -> None:
    """Join the ends of each sum into a ring, in place."""
    tasks = reduces(work)
    for ends in _alike(tasks, zip(work.stage[tasks].tolist(), work.part[tasks].tolist(), strict=True)):
        counterpart[ends] = np.roll(ends, -1)


def _alike(tasks: Ints, names: Iterable[tuple[int, int]]) -> list[Ints]:
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for task, name in zip(tasks.tolist(), names, strict=True):
        groups[name].append(task)
    return [np.array(group) for group in groups.values() if len(group) > 1]
