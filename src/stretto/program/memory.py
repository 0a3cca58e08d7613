"""Plans activation offload: what goes to host memory, when it comes back, and which buffers are filled."""

from collections import defaultdict, deque
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
    host_slot: Ints
    """The host buffer it is copied out into."""
    beside: Ints
    """The action beside which it is copied back."""
    slot: Ints
    """The device buffer it is copied back into."""
    forward_slot: Ints
    """For every action, the device buffer its forward fills; −1 if it has no forward."""


def no_copies(actions: int) -> Copies:
    none = np.empty(0, dtype=np.int64)
    return Copies(none, none, none, none, np.full(actions, -1))


def plan_copies(device: Ints, actions: TaskColumns, backward: Ints, copy_actions: int) -> Copies:
    """Plan copies by Kimi K2's rule: what a forward saved is copied out during the `copy_actions` actions after it, and
    back during the `copy_actions` actions before its backward. In a steady state of pairs, the activations of the
    previous forward are copied out while those of the next backward are copied back.

    Activations that are used again too soon for that stay. Buffers are assigned in issue order. A device buffer is free
    again once its contents have been copied out, or used for the last time; a host buffer once they have been copied
    back. Each copy counts as long as it may take. Stages differ in size, so they do not share host buffers.

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
    slots, back, host = _share_out(device, actions.stage, runs, uses, first, copy_actions)
    return Copies(first, host[first], uses[first] - copy_actions, back[first], slots)


def _share_out(
    device: Ints, stage: Ints, runs: Ints, uses: Ints, leaving: Ints, copy_actions: int
) -> tuple[Ints, Ints, Ints]:
    """Return the device buffer of each action's forward, the device buffer that its activations are copied back into,
    and the host buffer that they are copied out into.
    """
    count = len(device)
    slots, back, host = [-1] * count, [-1] * count, [-1] * count
    last, stages = uses.tolist(), stage.tolist()
    returning = {last[action] - copy_actions: action for action in leaving.tolist()}
    leaves, fills = set(leaving.tolist()), set(runs.tolist())
    bounds = np.searchsorted(device, np.arange(device.max() + 2)).tolist()
    for begin, stop in pairwise(bounds):
        on_device, on_host = _Buffers(), _Buffers()
        for action in range(begin, stop):
            on_device.release(action - 1)
            on_host.release(action - 1)
            if (before := action - 1) in leaves:
                host[before] = on_host.take(until=last[before] - 1, stage=stages[before])
            if (coming := returning.get(action, -1)) >= 0:
                back[coming] = on_device.take(until=action + copy_actions)
            if action in fills:
                slots[action] = on_device.take(until=action + copy_actions if action in leaves else last[action])
    return np.array(slots), np.array(back), np.array(host)


class _Buffers:
    """The reused buffers of one memory, numbered from 0. Those taken for a stage are reused only for that stage."""

    def __init__(self) -> None:
        self._count = 0
        self._free: defaultdict[int, deque[int]] = defaultdict(deque)
        self._held: dict[int, list[tuple[int, int]]] = {}  # stages and buffers, by the last action that holds them

    def take(self, *, until: int, stage: int = -1) -> int:
        """Return a buffer that is held until the end of this action; forever if it is −1, no action."""
        free = self._free[stage]
        if not free:
            free.append(self._count)
            self._count += 1
        buffer = free.popleft()
        if until >= 0:
            self._held.setdefault(until, []).append((stage, buffer))
        return buffer

    def release(self, action: int) -> None:
        """Free the buffers that were held until the end of this action."""
        for stage, buffer in self._held.pop(action, ()):
            self._free[stage].append(buffer)
