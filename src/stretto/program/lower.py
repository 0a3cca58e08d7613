"""Plan → program: every action a task, every hand-over a transfer, all in one global order."""

from operator import attrgetter

import numpy as np

from stretto.ir.action import Op, Pair
from stretto.ir.plan import Plan, Slot
from stretto.program.link import link
from stretto.program.order import FREE, RESULT, start_ticks
from stretto.program.program import Program
from stretto.program.task import Kind, Lane
from stretto.program.work import Ints, Work

_KIND = {op: int(Kind[op.name]) for op in Op}


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
    device, actions = _actions(plan)
    actions.demand(plan.placement)
    start, stuck = start_ticks(device, actions, plan.placement)
    result = start + RESULT[actions.kind]
    split = np.flatnonzero(actions.among((Kind.B, Kind.PAIR)))
    source, target, gradient = _transfers(plan, device, actions)

    # The global order, by (2 × tick, number): what a tick's results set moving comes before its actions.
    # A WGRAD stands right before its device's next action. What a stuck action should send is received
    # at the last moment instead, so that `check` sees the circle of waits and not a stray receive.
    follows = np.append(start[1:], 0)
    last = np.append(device[1:] != device[:-1], True)
    follows[last] = (start + FREE[actions.kind])[last]
    number = 2 * np.arange(len(source))
    arrival = np.where(stuck[source], 2 * start[target], 2 * result[source])
    numbers = 2 * len(source) + 2
    keys = (
        (2 * start + 1) * numbers + 1,
        (2 * follows[split] + 1) * numbers,
        2 * result[source] * numbers + number,
        arrival * numbers + number + 1,
    )
    order = np.argsort(np.concatenate(keys), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    send, receive = np.split(place[len(start) + len(split) :], 2)
    mate = np.full(len(order), -1)
    mate[send], mate[receive] = receive, send

    stages, microbatches = actions.backward
    wgrads = _work(Kind.WGRAD, stages[split], microbatches[split])
    stage = np.where(gradient, stages[source], actions.stage[source])
    microbatch = np.where(gradient, microbatches[source], actions.microbatch[source])
    sends = _work(np.where(gradient, Kind.SEND_B, Kind.SEND_F), stage, microbatch)
    receives = _work(np.where(gradient, Kind.RECV_B, Kind.RECV_F), stage + np.where(gradient, -1, 1), microbatch)
    slots = 2 * plan.devices + 1  # lanes a device could have: compute, sends, receives
    lane = (
        device * slots,
        device[split] * slots,
        device[source] * slots + 1 + device[target],
        device[target] * slots + 1 + plan.devices + device[source],
    )
    lanes, at = _used_lanes(np.concatenate(lane)[order], plan.devices)
    return link(lanes, at, Work.joined((actions, wgrads, sends, receives), order), mate, plan.placement)


def _actions(plan: Plan) -> tuple[Ints, Work]:
    """The plan's slots, device by device: where, and what."""
    slots = [slot for row in plan.rows for slot in row]
    pairs = [(at, slot) for at, slot in enumerate(slots) if isinstance(slot, Pair)]
    first: list[Slot] = slots.copy()
    for at, pair in pairs:
        first[at] = pair.forward
    work = Work(
        np.array([_KIND[op] for op in map(attrgetter("op"), first)]),
        np.array(list(map(attrgetter("stage"), first))),
        np.array(list(map(attrgetter("microbatch"), first))),
        np.full(len(slots), -1),
        np.full(len(slots), -1),
    )
    paired = [at for at, _ in pairs]
    work.kind[paired] = Kind.PAIR
    work.stage_b[paired] = [pair.backward.stage for _, pair in pairs]
    work.microbatch_b[paired] = [pair.backward.microbatch for _, pair in pairs]
    return np.repeat(np.arange(plan.devices), [len(row) for row in plan.rows]), work


def _work(kind: Ints | Kind, stage: Ints, microbatch: Ints) -> Work:
    none = np.full(len(stage), -1)
    return Work(np.broadcast_to(kind, len(stage)), stage, microbatch, none, none)


def _transfers(plan: Plan, device: Ints, actions: Work) -> tuple[Ints, Ints, Ints]:
    """Every hand-over between two devices: the action it comes from, the one it goes to, is it a gradient."""
    forward, backward = actions.forwards(plan.placement)[:-1], actions.backwards(plan.placement)[:-1]
    source = np.concatenate((forward[:-1].ravel(), backward[1:].ravel()))
    target = np.concatenate((forward[1:].ravel(), backward[:-1].ravel()))
    gradient = np.repeat([0, 1], len(source) // 2)
    crosses = (source >= 0) & (target >= 0) & (device[source] != device[target])
    return source[crosses], target[crosses], gradient[crosses]


def _used_lanes(code: Ints, devices: int) -> tuple[tuple[Lane, ...], Ints]:
    used = np.flatnonzero(np.bincount(code)) if devices < 1000 else np.unique(code)  # counting is quicker
    lanes = []
    for device, slot in (divmod(int(lane), 2 * devices + 1) for lane in used):
        if slot == 0:
            lanes.append(Lane(device))
        elif slot <= devices:
            lanes.append(Lane(device, "send", slot - 1))
        else:
            lanes.append(Lane(device, "recv", slot - 1 - devices))
    return tuple(lanes), np.searchsorted(used, code)
