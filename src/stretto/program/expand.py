"""Expands actions into tasks: the action and its weight part, or its layers' phases, which pairs weave."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.costs import Costs
from stretto.program.anatomy import Anatomy, Part
from stretto.program.columns import Bools, Ints, TaskColumns, grouped
from stretto.program.passes import Passes, Step, Token, Weight
from stretto.program.task import BACKWARDS, PHASE_LANES, Kind
from stretto.program.timing import Times, part_times
from stretto.program.weave import weave


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """The tasks of all actions, with each task's action, place within the action, lane, and whether it is late."""

    work: TaskColumns
    action: Ints
    place: Ints
    """Counted from 1; 0 is reserved for copies."""
    lane: Ints
    """As an index into `PHASE_LANES`."""
    late: Bools
    """Whether the task is issued right before the device's next action, after this action's sends."""


class _Piece(NamedTuple):
    kind: Kind
    backward: bool
    """Whether the piece belongs to a pair's backward."""
    part: int
    lane: int = 0
    """As an index into `PHASE_LANES`."""
    late: bool = False


def expand(actions: TaskColumns, anatomy: Anatomy, costs: Costs, *, recompute: bool) -> Expansion:
    if anatomy.is_whole:
        return _whole(actions, recompute=recompute)
    return _phases(actions, anatomy, costs, recompute=recompute)


def _whole(actions: TaskColumns, *, recompute: bool) -> Expansion:
    """Make each action one task; a full backward, alone or in a pair, also gets a WGRAD."""
    recomputed = np.flatnonzero(actions.among(BACKWARDS)) if recompute else np.empty(0, dtype=np.int64)
    split = np.flatnonzero(actions.among((Kind.B, Kind.PAIR)))
    stage, microbatch = actions.backward
    recomputes, wgrads = (
        TaskColumns.simple(np.full(len(action), kind), stage[action], microbatch[action])
        for kind, action in ((Kind.RECOMPUTE, recomputed), (Kind.WGRAD, split))
    )
    action = np.concatenate((recomputed, np.arange(len(actions)), split))
    work = TaskColumns.joined((recomputes, actions, wgrads), np.arange(len(action)))
    late = np.arange(len(action)) >= len(action) - len(split)
    place = np.where(np.arange(len(action)) < len(recomputed), 1, 2)
    return Expansion(work, action, place, np.zeros_like(action), late)


def _phases(actions: TaskColumns, anatomy: Anatomy, costs: Costs, *, recompute: bool) -> Expansion:
    """Split actions into phases. Actions of the same kind and stages yield the same pieces, so each set is cut once."""
    stages = len(anatomy.forward)
    code = (actions.kind * (stages + 1) + actions.stage) * (stages + 1) + actions.stage_b + 1
    alike, group = np.unique(code, return_inverse=True)
    order, start = grouped(group, len(alike))
    cutter = _Cutter(anatomy, part_times(anatomy, costs, woven=True), recompute=recompute)
    columns: list[list[NDArray[Any]]] = [[] for _ in range(12)]
    for a, b in pairwise(start.tolist()):
        action = order[a:b]
        kind, stage, stage_b = (int(column[action[0]]) for column in (actions.kind, actions.stage, actions.stage_b))
        pieces = cutter.pieces(Kind(kind), stage, stage_b)
        kinds, backward, part, lane, late = (np.array(column)[:, None] for column in zip(*pieces, strict=True))
        shape = (len(pieces), len(action))
        none = np.full(shape, -1)
        filled = (
            np.broadcast_to(kinds, shape),
            np.broadcast_to(np.where(backward, stage_b, stage), shape),
            np.where(backward, actions.microbatch_b[action], actions.microbatch[action]),
            none,
            none,
            np.broadcast_to(part, shape),
            np.where((kinds == Kind.F) & (part == 0), actions.slot[action], -1),
            np.full(shape, kind == Kind.PAIR),
            np.broadcast_to(action, shape),
            np.broadcast_to(np.arange(len(pieces))[:, None] + 1, shape),
            np.broadcast_to(lane, shape),
            np.broadcast_to(late, shape),
        )
        for column, values in zip(columns, filled, strict=True):
            column.append(values.ravel())
    *work, action, place, lane, late = (np.concatenate(column) for column in columns)
    return Expansion(TaskColumns(*work), action, place, lane, late)


class _Cutter:
    """Cuts actions into pieces; equal pairs are woven only once."""

    def __init__(self, anatomy: Anatomy, times: Times, *, recompute: bool) -> None:
        self._anatomy, self._recompute = anatomy, recompute
        self._times = times  # in pairs
        self._woven: dict[Passes, tuple[Token, ...]] = {}

    def pieces(self, kind: Kind, stage: int, stage_b: int) -> list[_Piece]:
        if kind is Kind.PAIR:
            return self._weave(stage, stage_b)
        weights = range(len(self._anatomy.weight_steps[stage]))
        match kind:
            case Kind.F:
                return [_Piece(kind, False, k, _lane(part)) for k, part in enumerate(self._anatomy.forward[stage])]
            case Kind.W:
                return [_Piece(kind, False, part) for part in weights]
            case _:
                parts = range(len(self._anatomy.backward[stage]))
                pieces = [piece for part in parts for piece in self._backward(kind, stage, part, False)]
                if kind is Kind.B:
                    pieces += [_Piece(Kind.WGRAD, False, part, late=True) for part in weights]
                return pieces

    def _backward(self, kind: Kind, stage: int, part: int, paired: bool) -> list[_Piece]:
        """Return a backward part, preceded by the recomputation of what it uses."""
        lane = _lane(self._anatomy.backward[stage][part])
        recomputation = [] if lane or not self._recompute else [_Piece(Kind.RECOMPUTE, paired, part)]
        return [*recomputation, _Piece(kind, paired, part, lane)]

    def _weave(self, stage: int, stage_b: int) -> list[_Piece]:
        times = self._times
        forward, backward = self._anatomy.forward[stage], self._anatomy.backward[stage_b]
        steps = self._anatomy.weight_steps[stage_b]
        recompute = times[Kind.RECOMPUTE][stage_b] if self._recompute else [0.0] * len(backward)
        passes = Passes(
            tuple(
                Step(part.phase.lane, times[Kind.F][stage][k], part.phase.backward) for k, part in enumerate(forward)
            ),
            tuple(Step(part.phase.lane, recompute[k] + times[Kind.B][stage_b][k]) for k, part in enumerate(backward)),
            tuple(Weight(step, times[Kind.WGRAD][stage_b][k]) for k, step in enumerate(steps)),
        )
        if passes not in self._woven:
            self._woven[passes] = weave(passes)
        order = self._woven[passes]
        last_result = max(place for place, token in enumerate(order) if token.of != "W")
        pieces = []
        for place, (of, number) in enumerate(order):
            if of == "F":
                pieces.append(_Piece(Kind.F, False, number, _lane(forward[number])))
            elif of == "B":
                pieces += self._backward(Kind.B, stage_b, number, True)
            else:
                pieces.append(_Piece(Kind.WGRAD, True, number, late=place > last_result))
        return pieces


def _lane(part: Part) -> int:
    return PHASE_LANES.index(part.phase.lane)
