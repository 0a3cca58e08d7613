"""When each action of a plan would start, if every pass took one tick and transfers none."""

import numpy as np

from stretto.program.columns import Ints, TaskColumns
from stretto.program.task import BACKWARDS, FORWARDS, Kind

# Ticks by kind (F, B, I, W, PAIR): until the result can be sent on, and until the device is free.
RESULT = np.array([1, 1, 1, 1, 2])
FREE = np.array([1, 2, 1, 1, 3])


def start_ticks(device: Ints, work: TaskColumns, forward: Ints, backward: Ints) -> Ints:
    """Return the tick in which each action starts.

    Actions are listed device by device, each device's in row order. Actions that are stuck, and so never start, come
    after all others, in row order. `forward` and `backward` hold the action that runs each [stage, microbatch].
    """
    index = np.arange(len(work))
    back_stage, back_microbatch = work.backward
    is_backward = work.among(BACKWARDS)
    before = np.where(work.among(FORWARDS), forward[work.stage - 1, work.microbatch], -1)
    after = np.where(is_backward, backward[np.where(is_backward, back_stage + 1, 0), back_microbatch], -1)
    own = np.where(is_backward, forward[back_stage, back_microbatch], -1)
    own = np.where(work.kind == Kind.W, backward[work.stage, work.microbatch], own)
    # A need before the action in its own row is met by row order; a need at or after the action is never met.
    for need in (before, after):
        need[(need >= 0) & (need < index) & (device[need] == device)] = -1
    never = (own >= index) & (device[own] == device)
    before[never] = index[never]

    bounds = np.searchsorted(device, np.arange(device.max() + 2))
    ticks = _replay(
        bounds.tolist(), before.tolist(), after.tolist(), RESULT[work.kind].tolist(), FREE[work.kind].tolist()
    )
    start = np.array(ticks, dtype=np.int64)
    stuck = start < 0
    start[stuck] = (start.max() + 4 + 4 * (index - bounds[device]))[stuck]
    return start


def _replay(bounds: list[int], before: list[int], after: list[int], result: list[int], free: list[int]) -> list[int]:
    """Return when each action starts if devices run in row order and wait for needs; −1 if it never does."""
    head, clock = bounds[:-1], [0] * (len(bounds) - 1)
    start, done = [-1] * len(before), [-1] * len(before)
    waiting: dict[int, list[int]] = {}  # devices, by the action they wait for
    runnable = list(range(len(head)))
    while runnable:
        device = runnable.pop()
        action, time, stop = head[device], clock[device], bounds[device + 1]
        while action < stop:
            first, second = before[action], after[action]  # unrolled: this loop is hot
            if first >= 0:
                if (ready := done[first]) < 0:
                    waiting.setdefault(first, []).append(device)
                    break
                if ready > time:
                    time = ready
            if second >= 0:
                if (ready := done[second]) < 0:
                    waiting.setdefault(second, []).append(device)
                    break
                if ready > time:
                    time = ready
            start[action], done[action] = time, time + result[action]
            time += free[action]
            if action in waiting:
                runnable += waiting.pop(action)
            action += 1
        head[device], clock[device] = action, time
    return start
