"""Which activations leave for host memory, when they come back, and which buffer each takes on the device."""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stretto.program.columns import Ints, TaskColumns
from stretto.program.task import FORWARDS


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """The passes whose activations leave and come back, one entry each; and every forward's buffer."""

    forward: Ints
    """The action each leaves after."""
    beside: Ints
    """The action beside which it comes back."""
    slot: Ints
    """The buffer it comes back into."""
    forward_slot: Ints
    """Of every action, the buffer that its forward fills, −1 without a forward."""


def no_copies(actions: int) -> Copies:
    none = np.empty(0, dtype=np.int64)
    return Copies(none, none, none, np.full(actions, -1))


def plan_copies(device: Ints, actions: TaskColumns, backward: Ints, room: int) -> Copies:
    """Kimi K2's rule: what a forward saved leaves during the `room` actions after it, and comes back during the
    `room` actions before its backward; in a steady state of pairs, the previous microbatch's forward goes
    while the next one's backward comes.

    What is used again too soon for that stays. Buffers are shared out in issue order: one is free again
    when what it held has left, or was used for the last time.

    Actions are listed device by device; `backward` says which one runs each [stage, microbatch]'s.
    """
    count = len(actions)
    uses = np.full(count, -1)  # of each action with a forward, the action of its backward
    runs = np.flatnonzero(actions.among(FORWARDS))
    uses[runs] = backward[actions.stage[runs], actions.microbatch[runs]]
    sound = (uses >= 0) & (device[uses] == device) & (uses > np.arange(count))
    uses[~sound] = -1
    first = np.flatnonzero(sound & (uses - np.arange(count) > 2 * room))
    if not len(first):
        return no_copies(count)
    slots, back = _share_out(device, runs, uses, first, room)
    return Copies(first, uses[first] - room, back[first], slots)


def _share_out(device: Ints, runs: Ints, uses: Ints, leaving: Ints, room: int) -> tuple[Ints, Ints]:
    """The buffer of each action's forward, and the one that what left after it comes back into."""
    count = len(device)
    slots, back = [-1] * count, [-1] * count
    last = uses.tolist()
    returning = {last[action] - room: action for action in leaving.tolist()}
    leaves, fills = set(leaving.tolist()), set(runs.tolist())
    bounds = np.searchsorted(device, np.arange(device.max() + 2)).tolist()
    for begin, stop in pairwise(bounds):
        free: deque[int] = deque()
        released: dict[int, list[int]] = {}  # buffers, by the last action during which they are held
        made = 0
        for action in range(begin, stop):
            free.extend(released.pop(action - 1, ()))
            for filler, into, until in (
                (returning.get(action, -1), back, action + room),
                (action if action in fills else -1, slots, action + room if action in leaves else last[action]),
            ):
                if filler >= 0:
                    if not free:
                        free.append(made)
                        made += 1
                    into[filler] = buffer = free.popleft()
                    if until >= 0:  # what no backward uses is never given back
                        released.setdefault(until, []).append(buffer)
    return np.array(slots), np.array(back)
