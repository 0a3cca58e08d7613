"""Plan → program: every action a task, every hand-over a transfer, all in one global order."""

from collections.abc import Sequence

import numpy as np

from stretto.ir.action import Op, Pair
from stretto.ir.plan import Plan
from stretto.program.link import Finder, link_columns
from stretto.program.program import Ints, Program
from stretto.program.task import BACKWARDS, FORWARDS, Kind, Lane, among

_KIND = {op: int(Kind[op.name]) for op in Op}

# Ticks by kind: until the result is there to be sent on, and until the device is free again.
_RESULT = np.array([1, 1, 1, 1, 2])
_FREE = np.array([1, 2, 1, 1, 3])
_STUCK = 1 << 40


def lower(plan: Plan) -> Program:
    """Tasks on lanes: compute, and one lane for each end of every directed link.

    A full backward, alone or in a pair, becomes its input part and a WGRAD task; what the device
    sends and receives before its next action is issued between them, the gradient first of all.

    All tasks are put into one order, by the times of a run in which every pass takes one tick and
    transfers take none; a device issues its own tasks in that order. Since every task stands behind
    all that it needs, and a transfer's two ends side by side, the program completes even if every
    transfer blocks until its other end is there.

    An unsound plan is lowered too, as far as it goes: `check` says what is wrong with it.
    """
    device, what = _actions(plan)
    find = Finder(plan.placement, what)
    forward, backward = find.forward(), find.backward()
    start = np.array(_start_ticks(device, what, forward, backward), dtype=np.int64)
    result = start + _RESULT[what["kind"]]
    split = np.flatnonzero(among(what["kind"], (Kind.B, Kind.PAIR)))
    source, target, gradient = _transfers(device, forward, backward)

    # Where in the global order: (tick, then the two ends of transfer t at 2t and 2t + 1, or WGRAD before action).
    width = 2 * len(source) + 2
    free = np.append(start, 0)[1:]  # when a row's next action starts
    last = np.append(device[1:] != device[:-1], True)
    free[last] = (start + _FREE[what["kind"]])[last]
    # What can never be sent is received at the last moment, so that the circle of waits shows.
    arrival = np.where(start[source] < _STUCK, 2 * result[source], 2 * start[target])
    number = 2 * np.arange(len(source))
    keys = (
        (2 * start + 1) * width + 1,
        (2 * free[split] + 1) * width,
        2 * result[source] * width + number,
        arrival * width + number + 1,
    )
    order = np.argsort(np.concatenate(keys), kind="stable")

    slots = 2 * plan.devices + 1  # lanes per device: compute, sends, receives
    back_stage, back_microbatch = _backward_columns(what)
    stage = np.where(gradient, back_stage[source], what["stage"][source])
    microbatch = np.where(gradient, back_microbatch[source], what["microbatch"][source])
    none = np.full(max(len(split), len(source)), -1)
    parts = (
        (device * slots, *(what[name] for name in _WHAT)),
        (device[split] * slots, none[: len(split)] * 0 + Kind.WGRAD, back_stage[split], back_microbatch[split]),
        (device[source] * slots + 1 + device[target], np.where(gradient, Kind.SEND_B, Kind.SEND_F), stage, microbatch),
        (
            device[target] * slots + 1 + plan.devices + device[source],
            np.where(gradient, Kind.RECV_B, Kind.RECV_F),
            stage + np.where(gradient, -1, 1),
            microbatch,
        ),
    )
    filled = [(*part, *(none[: len(part[0])],) * (6 - len(part))) for part in parts]
    names = ("lane", *_WHAT)
    table = {name: np.concatenate(column)[order] for name, column in zip(names, zip(*filled, strict=True), strict=True)}
    used = np.flatnonzero(np.bincount(table["lane"], minlength=plan.devices * slots))
    table["lane"] = np.searchsorted(used, table["lane"])
    return link_columns(tuple(_lane(int(code), plan.devices) for code in used), table, plan.placement)


_WHAT = ("kind", "stage", "microbatch", "stage_b", "microbatch_b")


def _lane(code: int, devices: int) -> Lane:
    device, slot = divmod(code, 2 * devices + 1)
    if slot == 0:
        return Lane(device)
    name, peer = ("send", slot - 1) if slot <= devices else ("recv", slot - 1 - devices)
    return Lane(device, name, peer)


def _actions(plan: Plan) -> tuple[Ints, dict[str, Ints]]:
    """The plan's slots, device by device, as columns."""
    slots = [slot for row in plan.rows for slot in row]
    first = [slot.forward if isinstance(slot, Pair) else slot for slot in slots]
    what = {
        "kind": np.array([_KIND[action.op] for action in first]),
        "stage": np.array([action.stage for action in first]),
        "microbatch": np.array([action.microbatch for action in first]),
        "stage_b": np.full(len(slots), -1),
        "microbatch_b": np.full(len(slots), -1),
    }
    pairs = [(at, slot.backward) for at, slot in enumerate(slots) if isinstance(slot, Pair)]
    at = [at for at, _ in pairs]
    what["kind"][at] = Kind.PAIR
    what["stage_b"][at] = [backward.stage for _, backward in pairs]
    what["microbatch_b"][at] = [backward.microbatch for _, backward in pairs]
    return np.repeat(np.arange(plan.devices), [len(row) for row in plan.rows]), what


def _backward_columns(what: dict[str, Ints]) -> tuple[Ints, Ints]:
    paired = what["stage_b"] >= 0
    return (
        np.where(paired, what["stage_b"], what["stage"]),
        np.where(paired, what["microbatch_b"], what["microbatch"]),
    )


def _transfers(device: Ints, forward: Ints, backward: Ints) -> tuple[Ints, Ints, Ints]:
    """Every hand-over between two devices: the action it comes from, the one it goes to, is it a gradient."""
    ends = []
    for produced, step in ((forward[:-1], 1), (backward[:-1], -1)):
        source = produced[:-1] if step == 1 else produced[1:]
        target = produced[1:] if step == 1 else produced[:-1]
        there = (source >= 0) & (target >= 0)
        source, target = source[there], target[there]
        apart = device[source] != device[target]
        ends.append((source[apart], target[apart]))
    gradient = np.repeat([0, 1], [len(source) for source, _ in ends])
    return (
        np.concatenate([source for source, _ in ends]),
        np.concatenate([target for _, target in ends]),
        gradient,
    )


def _start_ticks(device: Ints, what: dict[str, Ints], forward: Ints, backward: Ints) -> list[int]:
    """When each action would start; actions that never could come last, in their rows' order."""
    index = np.arange(len(device))
    back_stage, back_microbatch = _backward_columns(what)
    is_forward, is_backward = among(what["kind"], FORWARDS), among(what["kind"], BACKWARDS)
    before = np.where(is_forward, forward[what["stage"] - 1, what["microbatch"]], -1)
    after = np.where(is_backward, backward[np.where(is_backward, back_stage + 1, 0), back_microbatch], -1)
    own = np.where(is_backward, forward[back_stage, back_microbatch], -1)
    own = np.where(what["kind"] == Kind.W, backward[what["stage"], what["microbatch"]], own)
    # The row's own order settles whatever stands before an action in its row, and defeats what stands after.
    for need in (before, after, own):
        need[(need >= 0) & (need < index) & (device[need] == device)] = -1
    impossible = (own >= 0) & (device[own] == device)
    after[impossible] = index[impossible]

    bounds = np.searchsorted(device, np.arange(int(device.max()) + 2)).tolist()
    needs = (before.tolist(), after.tolist())
    return _replay(bounds, *needs, _RESULT[what["kind"]].tolist(), _FREE[what["kind"]].tolist())


def _replay(
    bounds: Sequence[int], before: list[int], after: list[int], result: list[int], free: list[int]
) -> list[int]:
    """Run every device's actions in row order, each as soon as its needs have a result."""
    head, clock = list(bounds[:-1]), [0] * (len(bounds) - 1)
    start = [-1] * len(before)
    done = [-1] * len(before)
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(head)))
    while runnable:
        device = runnable.pop()
        action, time, stop = head[device], clock[device], bounds[device + 1]
        while action < stop:
            if (need := before[action]) >= 0:
                if (ready := done[need]) < 0:
                    waiting.setdefault(need, []).append(device)
                    break
                if ready > time:
                    time = ready
            if (need := after[action]) >= 0:
                if (ready := done[need]) < 0:
                    waiting.setdefault(need, []).append(device)
                    break
                if ready > time:
                    time = ready
            start[action] = time
            done[action] = time + result[action]
            time += free[action]
            if action in waiting:
                runnable += waiting.pop(action)
            action += 1
        head[device], clock[device] = action, time
    for device, stuck in enumerate(head):
        for action in range(stuck, bounds[device + 1]):
            start[action] = _STUCK + 4 * (action - bounds[device])
    return start
