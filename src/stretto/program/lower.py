"""Plan → program: every action a task or its phases, every hand-over a transfer, all in one global order."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

import numpy as np

from stretto.costs import Costs
from stretto.ir.action import Op, Pair
from stretto.ir.errors import PlanError
from stretto.ir.plan import Plan, Slot
from stretto.program.columns import Ints, TaskColumns
from stretto.program.expand import Expansion, expand
from stretto.program.index import TaskIndex
from stretto.program.memory import Copies, no_copies, plan_copies
from stretto.program.needs import link
from stretto.program.order import FREE, RESULT, start_ticks
from stretto.program.phases import Anatomy, Layer
from stretto.program.program import Program
from stretto.program.sums import Sums, sum_rings
from stretto.program.task import GRADIENTS, Kind, Lane
from stretto.program.wgrads import apart, side_by_side

_OWN_LANES = ("compute", "comm", "d2h", "h2d", "reduce")
_KIND = {op: int(Kind[op.name]) for op in Op}


def lowered(program: Plan | Program) -> Program:
    """A program as it is, a plan lowered."""
    return program if isinstance(program, Program) else lower(program)


def lower(
    plan: Plan,
    *,
    layers: Sequence[Sequence[Layer]] | None = None,
    ties: Sequence[Sequence[int]] = (),
    costs: Costs | None = None,
    offload: int = 0,
    recompute: bool = False,
    wgrad_microbatches: int = 1,
) -> Program:
    """Tasks on lanes: compute, and one lane for each end of every directed link.

    A full backward, alone or in a pair, becomes its input part and a WGRAD task; what the device
    sends and receives before its next action is issued between them, the gradient first of all.

    With `layers`, those of each stage, every pass becomes its layers' phases on compute and comm
    lanes, and a pair's two passes are woven into one order from the phases' costs.

    Gradients of a stage that lives on several devices are summed over them, on a lane `reduce`, as soon as the
    stage's last weight gradients are there; with `ties`, the stages that share weights, so are these.

    With `offload`, what a forward saved goes to host memory and comes back before its backward, on lanes of
    its own; each copy has that many actions' time, and 1 is Kimi K2's rule. With `recompute`, what a forward
    discarded is computed again right before the backward, phase by phase.

    With `wgrad_microbatches`, so many weight gradients of a stage, or of a phase of it, wait for the last of them and
    stand side by side, to be computed as one; a full backward that is in no pair is an I and a W then.

    All tasks are put into one order, by the times of a run in which every pass takes one tick and
    transfers take none; a device issues its own tasks in that order. Since every task stands behind
    all that it needs, and a transfer's two ends side by side, the program completes even if every
    transfer blocks until its other end is there.

    An unsound plan is lowered too, as far as it goes: `check` says what is wrong with it.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"a plan is wanted, and a {type(plan).__name__} is none; parse_plan() reads one from its text, "
            "and program_of() makes a program of calls"
        )
    if layers is not None and len(layers) != plan.stages:
        raise PlanError(f"the plan has {plan.stages} stages, but layers are given for {len(layers)}")
    if not isinstance(offload, int) or offload < 0:
        raise PlanError(f"offload is a number of actions of at least 0 (got {offload!r:.40})")
    if type(wgrad_microbatches) is not int or wgrad_microbatches < 1:
        raise PlanError(f"wgrad_microbatches is a whole number of at least 1 (got {wgrad_microbatches!r:.40})")
    wgrad_microbatches = min(wgrad_microbatches, plan.microbatches)
    device, actions = _actions(plan)
    actions.demand(plan.placement)
    whole = Anatomy.whole(plan.stages)
    tables = TaskIndex(actions, whole, plan.placement)
    forward, backward = tables.first(tables.forward), tables.first(tables.backward)
    start = start_ticks(device, actions, forward, backward)
    result = start + RESULT[actions.kind]
    source, target, gradient = _transfers(device, forward[:-1], backward[:-1])
    make = partial(Anatomy.whole, plan.stages) if layers is None else partial(Anatomy, layers)
    anatomy = make(ties=ties, wgrad_microbatches=wgrad_microbatches)
    copies = plan_copies(device, actions, backward, min(offload, len(actions))) if offload else no_copies(len(actions))
    actions = replace(actions, slot=copies.forward_slot)
    parts = expand(actions, anatomy, costs, recompute=recompute)
    if wgrad_microbatches > 1:
        parts = replace(parts, work=replace(parts.work, kind=apart(parts.work, actions.kind[parts.action])))

    keys = _keys(parts, copies, device, actions, start, result, source)
    sums = Sums(plan.placement, anatomy) if parts.work.among(GRADIENTS).any() else None
    if sums:
        keys.append(sums.latest(keys[0], parts.work))
    order = np.argsort(np.concatenate(keys), kind="stable")
    if wgrad_microbatches > 1:
        order = side_by_side(order, parts.work, device[parts.action], wgrad_microbatches)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    sends_at, receives_at = len(parts.work), len(parts.work) + len(source)
    send, receive = place[sends_at:receives_at], place[receives_at : receives_at + len(source)]
    counterpart = np.full(len(order), -1)
    counterpart[send], counterpart[receive] = receive, send

    stages, microbatches = actions.backward
    stage = np.where(gradient, stages[source], actions.stage[source])
    microbatch = np.where(gradient, microbatches[source], actions.microbatch[source])
    sends = TaskColumns.simple(np.where(gradient, Kind.SEND_B, Kind.SEND_F), stage, microbatch)
    receives = TaskColumns.simple(
        np.where(gradient, Kind.RECV_B, Kind.RECV_F), stage + np.where(gradient, -1, 1), microbatch
    )
    leaves, comes = (
        TaskColumns.simple(
            np.full(len(slot), kind), actions.stage[copies.forward], actions.microbatch[copies.forward], slot=slot
        )
        for kind, slot in ((Kind.OFFLOAD, np.full_like(copies.slot, -1)), (Kind.ONLOAD, copies.slot))
    )
    own, possible = len(_OWN_LANES), len(_OWN_LANES) + 2 * plan.devices  # lanes that a device could have
    lane = [
        device[parts.action] * possible + parts.comm,
        device[source] * possible + own + device[target],
        device[target] * possible + own + plan.devices + device[source],
        device[copies.forward] * possible + _OWN_LANES.index("d2h"),
        device[copies.forward] * possible + _OWN_LANES.index("h2d"),
        *([sums.device * possible + _OWN_LANES.index("reduce")] if sums else []),
    ]
    lanes, at = _used_lanes(np.concatenate(lane)[order], plan.devices)
    every = [parts.work, sends, receives, leaves, comes, *([sums.work] if sums else [])]
    work = TaskColumns.joined(every, order)
    sum_rings(work, counterpart)
    return link(lanes, at, work, counterpart, plan.placement, anatomy)


def _keys(
    parts: Expansion,
    copies: Copies,
    device: Ints,
    actions: TaskColumns,
    start: Ints,
    result: Ints,
    source: Ints,
) -> list[Ints]:
    """Numbers that put parts, sends, receives and copies into order: by (2 × tick, number of a transfer, place within
    an action).

    What a tick's results set moving comes before its actions. What comes late, such as WGRADs, stands
    right before its device's next action, behind what leaves the device after this one. What comes back
    stands before the action beside which it does.
    """
    follows = np.append(start[1:], 0)
    last = np.append(device[1:] != device[:-1], True)
    follows[last] = (start + FREE[actions.kind])[last]
    number = 2 * np.arange(len(source))
    numbers, places = 2 * len(source) + 2, int(parts.place.max()) + 1
    main = (2 * start + 1) * numbers + 1
    late = (2 * follows + 1) * numbers
    return [
        np.where(parts.late, late[parts.action], main[parts.action]) * places + parts.place,
        (2 * result[source] * numbers + number) * places,
        (2 * result[source] * numbers + number + 1) * places,
        late[copies.forward] * places,
        main[copies.beside] * places,
    ]


def _actions(plan: Plan) -> tuple[Ints, TaskColumns]:
    """The plan's slots, device by device: where, and what."""
    slots = [slot for row in plan.rows for slot in row]
    pairs = [(at, slot) for at, slot in enumerate(slots) if isinstance(slot, Pair)]
    first: list[Slot] = slots.copy()
    for at, pair in pairs:
        first[at] = pair.forward
    work = TaskColumns(
        np.array([_KIND[op] for op in map(attrgetter("op"), first)]),
        np.array(list(map(attrgetter("stage"), first))),
        np.array(list(map(attrgetter("microbatch"), first))),
        np.full(len(slots), -1),
        np.full(len(slots), -1),
        np.zeros(len(slots), dtype=np.int64),
        np.full(len(slots), -1),
    )
    paired = [at for at, _ in pairs]
    work.kind[paired] = Kind.PAIR
    work.stage_b[paired] = [pair.backward.stage for _, pair in pairs]
    work.microbatch_b[paired] = [pair.backward.microbatch for _, pair in pairs]
    return np.repeat(np.arange(plan.devices), [len(row) for row in plan.rows]), work


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
    own = len(_OWN_LANES)
    for device, slot in (divmod(int(lane), 2 * devices + own) for lane in used):
        if slot < own:
            lanes.append(Lane(device, _OWN_LANES[slot]))
        else:
            direction, peer = divmod(slot - own, devices)
            lanes.append(Lane(device, ("send", "recv")[direction], peer))
    return tuple(lanes), np.searchsorted(used, code)
