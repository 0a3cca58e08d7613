"""Lowers a plan to a program: actions become tasks or phases, hand-overs transfers, all in one global order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from stretto.costs import Costs, costs_or_default
from stretto.ir.action import Op, Pair
from stretto.ir.errors import PlanError
from stretto.ir.plan import Cell, Plan
from stretto.layers import Layer
from stretto.program.anatomy import Anatomy
from stretto.program.columns import Ints, TaskColumns
from stretto.program.expand import Expansion, expand
from stretto.program.index import TaskIndex
from stretto.program.memory import Copies, no_copies, plan_copies
from stretto.program.needs import join_rings, link
from stretto.program.order import FREE, RESULT, start_ticks
from stretto.program.program import Program
from stretto.program.sums import Sums
from stretto.program.task import GRADIENTS, PHASE_LANES, Kind, Lane
from stretto.program.wgrads import apart, side_by_side

_OWN_LANES = (*PHASE_LANES, "d2h", "h2d", "reduce")
"""A device's own lanes. Its link lanes are numbered after them: one to each device, then one from each."""
_KIND = {op: int(Kind[op.name]) for op in Op}


@dataclass(frozen=True)
class _Actions:
    """A plan's actions, device by device: what each one does, where it runs, and the tick it starts in."""

    columns: TaskColumns
    device: Ints
    start: Ints
    forward: Ints
    """For each stage and microbatch, the action that runs its forward; −1 if there is none."""
    backward: Ints

    @cached_property
    def result(self) -> Ints:
        """The tick at which each action's result is ready."""
        result: Ints = self.start + RESULT[self.columns.kind]
        return result

    @cached_property
    def follows(self) -> Ints:
        """The tick at which each action's device starts its next action, or is free after its last."""
        follows = np.append(self.start[1:], 0)
        last = np.append(self.device[1:] != self.device[:-1], True)
        follows[last] = (self.start + FREE[self.columns.kind])[last]
        return follows


@dataclass(frozen=True, slots=True)
class _SortKey:
    """Sorts tasks into program order: by half tick, then by transfer, then by place within an action.

    The first half of a tick holds the transfers of results that are ready then, the second half the actions that start
    then. Transfers are numbered so that the two ends of each are adjacent. All three are packed into one number, which
    sorts faster.
    """

    actions: _Actions
    transfers: int
    places: int

    def of(self, half_tick: Ints, transfer: Ints | int = 0, place: Ints | int = 0) -> Ints:
        key: Ints = (half_tick * (2 * self.transfers + 2) + transfer) * self.places + place
        return key

    def late(self, action: Ints, place: Ints | int = 0) -> Ints:
        """Return the key right before the next action of the action's device, after the sends of this one."""
        return self.of(2 * self.actions.follows[action] + 1, 0, place)

    def beside(self, action: Ints, place: Ints | int = 0) -> Ints:
        """Return the key of the action itself."""
        return self.of(2 * self.actions.start[action] + 1, 1, place)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """Tasks of one sort: what they do, their devices and lanes, and their sort keys."""

    columns: TaskColumns
    device: Ints
    lane: Ints | int
    """Each lane's number within its device."""
    key: Ints

    def __len__(self) -> int:
        return len(self.columns)


def lowered(program: Plan | Program) -> Program:
    """Return a program unchanged; lower a plan."""
    return program if isinstance(program, Program) else lower(program)


def lower(
    plan: Plan,
    *,
    layers: Sequence[Sequence[Layer]] | None = None,
    ties: Sequence[Sequence[int]] = (),
    experts: Sequence[int] | None = None,
    costs: Costs | None = None,
    offload: int = 0,
    recompute: bool = False,
    wgrad_microbatches: int = 1,
) -> Program:
    """Lower a plan to tasks on lanes: compute, and one lane for each end of every directed link.

    A full backward, alone or in a pair, becomes its input part and a WGRAD task. What the device sends and receives
    before its next action is issued between the two, the input gradient first.

    With `layers`, one sequence per stage, every pass becomes its layers' phases on compute and comm lanes, and a
    pair's two passes are woven into one order, chosen by the phases' costs in pairs (`Costs.woven`).

    The gradients of a stage that lives on several devices are summed over them on a `reduce` lane, as soon as the
    stage's last weight gradients are ready. So are the gradients of stages that share weights, listed in `ties`.

    On a mesh with several expert-parallel ranks, `experts` lists the stages whose experts are shared out among them.
    Unless given, these are all stages whose layers have phases on the comm lane, and without `layers` all stages;
    `experts=[]` says that there are none. The ranks run such phases together, or the stage's whole passes if it is not
    cut into phases, each rank with its own microbatch of the same number. The experts' gradients are summed over the
    devices that hold the same experts, all others over all devices.

    With `offload`, what a forward saved is copied to host memory and back before its backward, on separate lanes. Each
    copy may take as long as `offload` actions; 1 is Kimi K2's rule. With `recompute`, what a forward discarded is
    recomputed right before the backward, phase by phase.

    With `wgrad_microbatches`, that many weight gradients of a stage, or of one of its phases, wait for the last of
    them and stand next to each other, to be computed as one. A full backward outside a pair then becomes an I and a W.

    All tasks are put into one global order, taken from a run in which every pass takes one tick and transfers take
    none; a device issues its own tasks in that order. Every task comes after all that it needs, and a transfer's two
    ends are adjacent, so the program completes even if every transfer blocks until its other end is ready.

    An unsound plan is lowered as far as possible; `check` reports what is wrong with it.
    """
    _validate(plan, layers, offload, wgrad_microbatches)
    joined = min(wgrad_microbatches, plan.microbatches)
    make = partial(Anatomy.whole, plan.stages) if layers is None else partial(Anatomy, layers)
    anatomy = make(ties=ties, experts=_experts(plan, layers, experts), wgrad_microbatches=joined)
    actions = _actions(plan)
    count = len(actions.columns)
    copies = (
        plan_copies(actions.device, actions.columns, actions.backward, min(offload, count))
        if offload
        else no_copies(count)
    )
    parts = expand(
        replace(actions.columns, slot=copies.forward_slot), anatomy, costs_or_default(costs), recompute=recompute
    )
    if joined > 1:
        parts = replace(parts, work=replace(parts.work, kind=apart(parts.work, actions.columns.kind[parts.action])))

    hand_overs = _hand_overs(actions)
    key = _SortKey(actions, transfers=len(hand_overs.source), places=int(parts.place.max()) + 1)
    computed = _computed(actions, parts, key)
    groups = [computed, *_transfers(actions, hand_overs, plan.devices, key), *_copied(actions, copies, key)]
    sums = Sums(plan.placement, anatomy)
    if len(sums) and parts.work.among(GRADIENTS).any():
        latest = sums.latest(computed.key, parts.work)
        groups.append(_Tasks(sums.work, sums.device, _OWN_LANES.index("reduce"), latest))
    order = np.argsort(np.concatenate([group.key for group in groups]), kind="stable")
    if joined > 1:
        order = side_by_side(order, parts.work, actions.device[parts.action], joined)
    return _linked(groups, order, plan, anatomy)


def _validate(plan: Plan, layers: Sequence[Sequence[Layer]] | None, offload: int, wgrad_microbatches: int) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(
            f"a plan is wanted, and a {type(plan).__name__} is none; parse_plan() reads one from its text, "
            "and program_of() makes a program of calls"
        )
    if layers is not None:
        nested = isinstance(layers, Sequence) and all(isinstance(stage, Sequence) for stage in layers)
        if not nested or not all(isinstance(layer, Layer) for stage in layers for layer in stage):
            raise PlanError(f"layers are lists of Layer, one per stage; cut_layers() makes them (got {layers!r:.60})")
        if len(layers) != plan.stages:
            raise PlanError(f"the plan has {plan.stages} stages, but layers are given for {len(layers)}")
    if type(offload) is not int or offload < 0:
        raise PlanError(f"offload is a number of actions of at least 0 (got {offload!r:.40})")
    if type(wgrad_microbatches) is not int or wgrad_microbatches < 1:
        raise PlanError(f"wgrad_microbatches is a whole number of at least 1 (got {wgrad_microbatches!r:.40})")


def _experts(plan: Plan, layers: Sequence[Sequence[Layer]] | None, experts: Sequence[int] | None) -> Sequence[int]:
    """Return the stages whose experts are shared out among several ranks."""
    if plan.placement.mesh is None or plan.placement.mesh.ep == 1:
        return ()
    if experts is not None:
        return experts
    if layers is None:
        return range(plan.stages)
    return [stage for stage, own in enumerate(layers) if any(phase.is_joint for layer in own for phase in layer.phases)]


def _actions(plan: Plan) -> _Actions:
    """Read a plan's actions, and compute when each would start."""
    device, columns = _columns(plan)
    columns.validate(plan.placement)
    index = TaskIndex(columns, Anatomy.whole(plan.stages), plan.placement)
    forward, backward = index.starts, index.back_starts
    return _Actions(columns, device, start_ticks(device, columns, forward, backward), forward, backward)


def _columns(plan: Plan) -> tuple[Ints, TaskColumns]:
    """Return the device of each action of a plan, and the actions as columns."""
    cells = [cell for row in plan.rows for cell in row]
    pairs = [(at, cell) for at, cell in enumerate(cells) if isinstance(cell, Pair)]
    first: list[Cell] = cells.copy()
    for at, pair in pairs:
        first[at] = pair.forward
    columns = TaskColumns(
        np.array([_KIND[op] for op in map(attrgetter("op"), first)]),
        np.array(list(map(attrgetter("stage"), first))),
        np.array(list(map(attrgetter("microbatch"), first))),
        np.full(len(cells), -1),
        np.full(len(cells), -1),
        np.zeros(len(cells), dtype=np.int64),
        np.full(len(cells), -1),
        np.zeros(len(cells), dtype=np.bool_),
    )
    paired = [at for at, _ in pairs]
    columns.kind[paired] = Kind.PAIR
    columns.stage_b[paired] = [pair.backward.stage for _, pair in pairs]
    columns.microbatch_b[paired] = [pair.backward.microbatch for _, pair in pairs]
    return np.repeat(np.arange(plan.devices), [len(row) for row in plan.rows]), columns


def _computed(actions: _Actions, parts: Expansion, key: _SortKey) -> _Tasks:
    """Return the tasks that the actions expand to, on the lanes of phases. A late task, such as a WGRAD, comes
    right before the device's next action.
    """
    late, beside = key.late(parts.action, parts.place), key.beside(parts.action, parts.place)
    return _Tasks(parts.work, actions.device[parts.action], parts.lane, np.where(parts.late, late, beside))


class _HandOvers(NamedTuple):
    """What actions hand to actions on other devices: both actions, and whether it is a gradient."""

    source: Ints
    target: Ints
    gradient: Ints


def _hand_overs(actions: _Actions) -> _HandOvers:
    forward, backward, device = actions.forward[:-1], actions.backward[:-1], actions.device
    source = np.concatenate((forward[:-1].ravel(), backward[1:].ravel()))
    target = np.concatenate((forward[1:].ravel(), backward[:-1].ravel()))
    gradient = np.repeat([0, 1], len(source) // 2)
    crosses = (source >= 0) & (target >= 0) & (device[source] != device[target])
    return _HandOvers(source[crosses], target[crosses], gradient[crosses])


def _transfers(actions: _Actions, hand_overs: _HandOvers, devices: int, key: _SortKey) -> tuple[_Tasks, _Tasks]:
    """Return both ends of every hand-over, in the tick in which its result is ready."""
    (source, target, gradient), device = hand_overs, actions.device
    columns = actions.columns
    stages, microbatches = columns.backward
    stage = np.where(gradient, stages[source], columns.stage[source])
    microbatch = np.where(gradient, microbatches[source], columns.microbatch[source])
    sends = TaskColumns.simple(np.where(gradient, Kind.SEND_B, Kind.SEND_F), stage, microbatch)
    receives = TaskColumns.simple(
        np.where(gradient, Kind.RECV_B, Kind.RECV_F), stage + np.where(gradient, -1, 1), microbatch
    )
    half_tick, number, own = 2 * actions.result[source], 2 * np.arange(len(source)), len(_OWN_LANES)
    return (
        _Tasks(sends, device[source], own + device[target], key.of(half_tick, number)),
        _Tasks(receives, device[target], own + devices + device[source], key.of(half_tick, number + 1)),
    )


def _copied(actions: _Actions, copies: Copies, key: _SortKey) -> tuple[_Tasks, _Tasks]:
    """Return the copies of activations to host memory, and back."""
    forward = copies.forward
    device, stage, microbatch = (
        column[forward] for column in (actions.device, actions.columns.stage, actions.columns.microbatch)
    )

    def of(kind: Kind, slot: Ints) -> TaskColumns:
        return TaskColumns.simple(np.full(len(slot), kind), stage, microbatch, slot=slot)

    out, back = of(Kind.OFFLOAD, copies.host_slot), of(Kind.ONLOAD, copies.slot)
    return (
        _Tasks(out, device, _OWN_LANES.index("d2h"), key.late(forward)),
        _Tasks(back, device, _OWN_LANES.index("h2d"), key.beside(copies.beside)),
    )


def _linked(groups: Sequence[_Tasks], order: Ints, plan: Plan, anatomy: Anatomy) -> Program:
    """Put all tasks in order, join the ends of transfers and collectives, and give each task its needs."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    first = len(groups[0])
    sends, receives = np.split(place[first : first + 2 * len(groups[1])], 2)
    counterpart = np.full(len(order), -1)
    counterpart[sends], counterpart[receives] = receives, sends
    possible = len(_OWN_LANES) + 2 * plan.devices  # lanes a device could have
    lane = np.concatenate([group.device * possible + group.lane for group in groups])
    lanes, at = _used_lanes(lane[order], plan.devices)
    columns = TaskColumns.joined([group.columns for group in groups], order)
    join_rings(lanes, at, columns, counterpart, plan.placement, anatomy)
    return link(lanes, at, columns, counterpart, plan.placement, anatomy)


def _used_lanes(code: Ints, devices: int) -> tuple[tuple[Lane, ...], Ints]:
    used = np.flatnonzero(np.bincount(code)) if devices < 1000 else np.unique(code)  # counting is quicker
    lanes = []
    own = len(_OWN_LANES)
    for device, number in (divmod(int(lane), 2 * devices + own) for lane in used):
        if number < own:
            lanes.append(Lane(device, _OWN_LANES[number]))
        else:
            direction, peer = divmod(number - own, devices)
            lanes.append(Lane(device, ("send", "recv")[direction], peer))
    return tuple(lanes), np.searchsorted(used, code)
