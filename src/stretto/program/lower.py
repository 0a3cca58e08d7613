"""Plan → program: every action a task or its phases, every hand-over a transfer, all in one global order."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from stretto.costs import Costs
from stretto.ir.action import Op, Pair
from stretto.ir.errors import PlanError
from stretto.ir.plan import Plan, Slot
from stretto.program.expand import Expansion, expand
from stretto.program.link import link
from stretto.program.order import FREE, RESULT, start_ticks
from stretto.program.phases import Anatomy, Layer
from stretto.program.program import Program
from stretto.program.tables import Tables
from stretto.program.task import Kind, Lane
from stretto.program.work import Bools, Ints, Work

_KIND = {op: int(Kind[op.name]) for op in Op}


def lower(plan: Plan, *, layers: Sequence[Sequence[Layer]] | None = None, costs: Costs | None = None) -> Program:
    """Tasks on lanes: compute, and one lane for each end of every directed link.

    A full backward, alone or in a pair, becomes its input part and a WGRAD task; what the device
    sends and receives before its next action is issued between them, the gradient first of all.

    With `layers`, those of each stage, every pass becomes its layers' phases on compute and comm
    lanes, and a pair's two passes are woven into one order from the phases' costs.

    All tasks are put into one order, by the times of a run in which every pass takes one tick and
    transfers take none; a device issues its own tasks in that order. Since every task stands behind
    all that it needs, and a transfer's two ends side by side, the program completes even if every
    transfer blocks until its other end is there.

    An unsound plan is lowered too, as far as it goes: `check` says what is wrong with it.
    """
    if layers is not None and len(layers) != plan.stages:
        raise PlanError(f"the plan has {plan.stages} stages, but layers are given for {len(layers)}")
    device, actions = _actions(plan)
    actions.demand(plan.placement)
    whole = Anatomy.whole(plan.stages)
    tables = Tables(actions, whole, plan.placement)
    forward, backward = tables.first(tables.forward), tables.first(tables.backward)
    start, stuck = start_ticks(device, actions, forward, backward)
    result = start + RESULT[actions.kind]
    source, target, gradient = _transfers(device, forward[:-1], backward[:-1])
    anatomy = whole if layers is None else Anatomy(layers)
    parts = expand(actions, anatomy, costs)

    order = _global_order(parts, device, actions, start, result, stuck, source, target)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    send, receive = np.split(place[len(parts.work) :], 2)
    mate = np.full(len(order), -1)
    mate[send], mate[receive] = receive, send

    stages, microbatches = actions.backward
    stage = np.where(gradient, stages[source], actions.stage[source])
    microbatch = np.where(gradient, microbatches[source], actions.microbatch[source])
    sends = _ends(np.where(gradient, Kind.SEND_B, Kind.SEND_F), stage, microbatch)
    receives = _ends(np.where(gradient, Kind.RECV_B, Kind.RECV_F), stage + np.where(gradient, -1, 1), microbatch)
    slots = 2 * plan.devices + 2  # lanes a device could have: compute, comm, sends, receives
    lane = (
        device[parts.action] * slots + parts.comm,
        device[source] * slots + 2 + device[target],
        device[target] * slots + 2 + plan.devices + device[source],
    )
    lanes, at = _used_lanes(np.concatenate(lane)[order], plan.devices)
    return link(lanes, at, Work.joined((parts.work, sends, receives), order), mate, plan.placement, anatomy)


def _global_order(
    parts: Expansion,
    device: Ints,
    actions: Work,
    start: Ints,
    result: Ints,
    stuck: Bools,
    source: Ints,
    target: Ints,
) -> Ints:
    """The order of parts, sends and receives: by (2 × tick, number of a transfer, place within an action).

    What a tick's results set moving comes before its actions. What comes late, such as WGRADs, stands
    right before its device's next action. What a stuck action should send is received at the last
    moment instead, so that `check` sees the circle of waits and not a stray receive.
    """
    follows = np.append(start[1:], 0)
    last = np.append(device[1:] != device[:-1], True)
    follows[last] = (start + FREE[actions.kind])[last]
    number = 2 * np.arange(len(source))
    arrival = np.where(stuck[source], 2 * start[target], 2 * result[source])
    numbers, places = 2 * len(source) + 2, int(parts.place.max()) + 1
    main = (2 * start[parts.action] + 1) * numbers + 1
    late = (2 * follows[parts.action] + 1) * numbers
    keys = (
        np.where(parts.late, late, main) * places + parts.place,
        (2 * result[source] * numbers + number) * places,
        (arrival * numbers + number + 1) * places,
    )
    return np.argsort(np.concatenate(keys), kind="stable")


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
        np.zeros(len(slots), dtype=np.int64),
    )
    paired = [at for at, _ in pairs]
    work.kind[paired] = Kind.PAIR
    work.stage_b[paired] = [pair.backward.stage for _, pair in pairs]
    work.microbatch_b[paired] = [pair.backward.microbatch for _, pair in pairs]
    return np.repeat(np.arange(plan.devices), [len(row) for row in plan.rows]), work


def _ends(kind: Ints, stage: Ints, microbatch: Ints) -> Work:
    none = np.full(len(stage), -1)
    return Work(kind, stage, microbatch, none, none, np.zeros(len(stage), dtype=np.int64))


def _transfers(device: Ints, forward: Ints, backward: Ints) -> tuple[Ints, Ints, Ints]:
    """Every hand-over between two devices: the action it comes from, the one it goes to, is it a gradient."""
    source = np.concatenate((forward[:-1].ravel(), backward[1:].ravel()))
    target = np.concatenate((forward[1:].ravel(), backward[:-1].ravel()))
    gradient = np.repeat([0, 1], len(source) // 2)
    crosses = (source >= 0) & (target >= 0) & (device[source] != device[target])
    return source[crosses], target[crosses], gradient[crosses]


def _used_lanes(code: Ints, devices: int) -> tuple[tuple[Lane, ...], Ints]:
    used = np.flatnonzero(np.bincount(code)) if devices < 1000 else np.unique(code)  # counting is quicker
    lanes = []
    for device, slot in (divmod(int(lane), 2 * devices + 2) for lane in used):
        if slot < 2:
            lanes.append(Lane(device, ("compute", "comm")[slot]))
        elif slot < devices + 2:
            lanes.append(Lane(device, "send", slot - 2))
        else:
            lanes.append(Lane(device, "recv", slot - 2 - devices))
    return tuple(lanes), np.searchsorted(used, code)
