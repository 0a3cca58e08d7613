"""Plans activation offload: what goes to host memory, when it comes back, and which device buffers are used."""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stretto.program.columns import Ints, TaskColumns
from stretto.program.task import FORWARDS


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """The passes whose activations are offloaded, one entry each, and the buffer of every forward."""

    forward: Ints
    """The action after which each is copied out."""
    beside: Ints
    """The action beside which it is copied back."""
    slot: Ints
    """The buffer it is copied back into."""
    forward_slot: Ints
    """For every action, the buffer its forward fills; −1 if it has no forward."""


def no_copies(actions: int) -> Copies:
    none = np.empty(0, dtype=np.int64)
    return Copies(none, none, none, np.full(actions, -1))


def plan_copies(device: Ints, actions: TaskColumns, backward: Ints, copy_actions: int) -> Copies:
    """Plan copies by Kimi K2's rule: what a forward saved is copied out during the `copy_actions` actions after it, and
    back during the `copy_actions` actions before its backward. In a steady state of pairs, the activations of the
    previous forward are copied out while those of the next backward are copied back.

    Activations that are used again too soon for that stay. Buffers are assigned in issue order; a buffer is free again
    once its contents have been copied out, or used for the last time.

    Actions are listed device by device; `backward` holds the action that runs each [stage, microbatch]'s backward.
    """
    count = len(actions)
    uses = np.full(count, -1)  # for each action with a forward, the action of its backward
    runs = np.flatnonzero(actions.among(FORWARDS))
    uses[runs] = backward[actions.stage[runs], actions.microbatch[runs]]
    sound = (uses >= 0) & (device[uses] == device) & (uses > np.arange(count))
    uses[~sound] = -1
    first = np.flatnonzero(sound & (uses - np.arange(count) > 2 * copy_actions))
    if not len(first):
        return no_copies(count)
    slots, back = _share_out(device, runs, uses, first, copy_actions)
    return Copies(first, uses[first] - copy_actions, back[first], slots)


def _share_out(device: Ints, runs: Ints, uses: Ints, leaving: Ints, copy_actions: int) -> tuple[Ints, Ints]:
    """Return the buffer of each action's forward, and the buffer its activations are copied back into."""
    count = len(device)
    slots, back = [-1] * count, [-1] * count
    last = uses.tolist()
    returning = {last[action] - copy_actions: action for action in leaving.tolist()}
    leaves, fills = set(leaving.tolist()), set(runs.tolist())
    bounds = np.searchsorted(device, np.arange(device.max() + 2)).tolist()
    for begin, stop in pairwise(bounds):
        free: deque[int] = deque()
        released: dict[int, list[int]] = {}  # buffers, by the last action during which they are held
        buffers = 0
        for action in range(begin, stop):
            free.extend(released.pop(action - 1, ()))
            for filler, into, until in (
                (returning.get(action, -1), back, action + copy_actions),
                (action if action in fills else -1, slots, action + copy_actions if action in leaves else last[action]),
            ):
                if filler >= 0:
                    if not free:
                        free.append(buffers)
                        buffers += 1
                    into[filler] = buffer = free.popleft()
                    if until >= 0:  # a buffer that no backward uses is never released
                        released.setdefault(until, []).append(buffer)
    return np.array(slots), np.array(back)
