"""Sums of gradients over devices: which sums a step has, and which tasks each one waits for."""

from collections import defaultdict

import numpy as np

from stretto.ir.placement import Placement
from stretto.program.anatomy import Anatomy
from stretto.program.columns import Ints, TaskColumns, grouped
from stretto.program.task import EXPERT_SUM, GRADIENTS, Kind


class Sums:
    """All sums of a step: one for each stage that lives on several devices, and for weights that stages share.

    Of a stage whose experts are shared out among expert-parallel ranks, the first sum is of all other weights. The
    experts have sums of their own, over the devices that hold the same experts.

    All columns have an entry for each end of a sum, one per device; the ends of a sum are adjacent.
    """

    def __init__(self, placement: Placement, anatomy: Anatomy) -> None:
        homes: dict[int, set[int]] = defaultdict(set)
        for device, stage in placement.homes:
            homes[stage].add(device)
        every: list[tuple[int, int, tuple[int, ...]]] = [(stage, 0, (stage,)) for stage in range(placement.stages)]
        every += [(tie[0], part, tie) for part, tie in enumerate(anatomy.ties, 1)]
        every += [(stage, EXPERT_SUM, (stage,)) for stage in anatomy.experts]
        ends = [
            (stage, part, stages, device)
            for stage, part, stages in every
            for devices in _shares(set().union(*(homes[member] for member in stages)), part, placement)
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


def _shares(devices: set[int], part: int, placement: Placement) -> list[list[int]]:
    """Divide the devices that hold a stage into those that sum this part of its gradients together."""
    shares: dict[int, list[int]] = defaultdict(list)
    for device in sorted(devices):
        shares[sum_share(device, part, placement)].append(device)
    return list(shares.values())


def sum_share(device: int, part: int, placement: Placement) -> int:
    """Return which of the sums of a stage's part a device takes part in: experts have one for each place along "ep"."""
    if part != EXPERT_SUM or placement.mesh is None:
        return 0
    return placement.mesh.ep_rank(placement.replica(device))


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


def sum_rings(work: TaskColumns, device: Ints, placement: Placement, counterpart: Ints) -> None:
    """Join the ends of each sum into a ring, in place."""
    tasks, rings = reduces(work), defaultdict(list)
    for task, stage, part, home in zip(
        tasks.tolist(), *(column[tasks].tolist() for column in (work.stage, work.part, device)), strict=True
    ):
        rings[stage, part, sum_share(home, part, placement)].append(task)
    for ends in rings.values():
        if len(ends) > 1:
            counterpart[ends] = np.roll(ends, -1)
