"""An upper bound on each device's memory, from the order of tasks alone, before their times are known."""

from itertools import pairwise

import numpy as np

from stretto.costs import Costs
from stretto.program.columns import Ints, grouped
from stretto.program.program import Program
from stretto.program.task import Kind
from stretto.timeline.memory import Changes, DeviceMemory


def memory_bound(program: Program, costs: Costs) -> list[DeviceMemory]:
    """Return an upper bound on each device's memory, from which task waits for which. All its times are 0."""
    changes = Changes.of(program, costs)
    late = costs.per_stage("BW", stages=program.placement.stages)
    instant = late[program.work.stage[changes.task]] == 0
    order = _latest_order(program, costs, changes)
    return changes.summed(program, costs, when=np.zeros(len(changes.task)), order=order, instant=instant)


def _latest_order(program: Program, costs: Costs, changes: Changes) -> Ints:
    """Return a safe position for each change when only the order of compute is known: memory is never freed too early
    and never taken too late.

    Compute task t starts at 4t and ends at 4t + 1. A task on another lane may take memory once the compute task that
    it waits for has ended. It has freed memory by the time a compute task starts that waits for it, or for a later
    task on its lane.
    """
    compute = program.compute
    need, task, index = program.need, program.needing, np.arange(len(program))
    after = np.full(len(program), len(program))
    np.minimum.at(after, need[compute[task]], task[compute[task]])
    before, known = np.where(compute, index, -1), np.empty(0)
    order, bounds = grouped(program.lane, len(program.lanes))
    lanes = [
        order[a:b]
        for lane, (a, b) in zip(program.lanes, pairwise(bounds.tolist()), strict=True)
        if lane.name != "compute"
    ]
    for lane in lanes:
        after[lane] = np.minimum.accumulate(after[lane][::-1])[::-1]
    others = ~compute[task]
    while not np.array_equal(before, known):  # waits chain across lanes; a few iterations find them all
        known = before.copy()
        np.maximum.at(before, task[others], known[need[others]])
        for lane in lanes:
            before[lane] = np.maximum.accumulate(before[lane])
    starts, ends = np.where(compute, 4 * index, 4 * before + 3), np.where(compute, 4 * index + 1, 4 * after - 1)
    # An onload waits for the offload whose buffer it takes; if it is no smaller, the offload is gone when it begins.
    size = costs.leaving_bytes(stages=program.placement.stages, recompute=program.recomputes)[program.work.stage]
    swaps = (
        (program.work.kind[need] == Kind.OFFLOAD)
        & (program.work.kind[task] == Kind.ONLOAD)
        & (size[need] <= size[task])
    )
    np.minimum.at(ends, need[swaps], 4 * before[task[swaps]] + 2)
    return np.where(changes.is_end, ends[changes.task], starts[changes.task])
