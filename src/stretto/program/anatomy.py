"""The anatomy of each stage's passes: the phases of its layers, in order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from stretto.ir.errors import PlanError
from stretto.layers import Layer, Phase
from stretto.program.columns import Ints
from stretto.program.task import COMPUTE, EXPERT_SUM, WEIGHTS, Kind


@dataclass(frozen=True, slots=True)
class Part:
    """A phase of the n-th layer of a stage."""

    layer: int
    kind: str
    phase: Phase

    def __str__(self) -> str:
        return f"{self.phase.name}{self.layer}"


class Anatomy:
    """The parts of each stage's forward, of its backward (those that have one, in reverse) and of its weight gradients.

    A program of whole actions has a single unnamed part per pass. Each tuple in `ties` lists stages that share
    weights. `experts` are the stages whose experts are shared out among expert-parallel ranks, which therefore run
    these stages' joint phases together, or their whole passes. The weight gradients of `wgrad_microbatches`
    microbatches are computed together. In a user-defined program (`program_of`), `calls` holds the names of the calls.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Layer]],
        *,
        ties: Iterable[Iterable[int]] = (),
        experts: Iterable[int] = (),
        calls: Iterable[str] = (),
        wgrad_microbatches: int = 1,
        is_whole: bool = False,
    ) -> None:
        self.calls = tuple(calls)
        self.wgrad_microbatches = wgrad_microbatches
        self.layers = tuple(map(tuple, layers))
        self.ties = _ties(ties, stages=len(self.layers))
        self.is_whole = is_whole
        self.forward = tuple(
            tuple(Part(n, layer.name, phase) for n, layer in enumerate(stage) for phase in layer.phases)
            for stage in self.layers
        )
        # For each part of a backward, the part of the forward it belongs to.
        self.forward_steps = tuple(
            tuple(step for step in reversed(range(len(parts))) if parts[step].phase.backward) for parts in self.forward
        )
        self.backward = tuple(
            tuple(parts[step] for step in steps) for parts, steps in zip(self.forward, self.forward_steps, strict=True)
        )
        for stage, parts in enumerate(self.backward):
            if not any(part.phase.lane == "compute" for part in parts):
                raise PlanError(f"stage {stage} has no layer that computes anything with a backward")
        self.experts = self._experts(experts)
        # For each weight gradient, the backward step it follows.
        self.weight_steps = tuple(
            tuple(step for step, part in enumerate(parts) if part.phase.lane == "compute") for parts in self.backward
        )

    @staticmethod
    def whole(
        stages: int,
        *,
        ties: Iterable[Iterable[int]] = (),
        experts: Iterable[int] = (),
        calls: Iterable[str] = (),
        wgrad_microbatches: int = 1,
    ) -> "Anatomy":
        """Return the anatomy of stages that are not split into layers."""
        layers = [[Layer("", (Phase("", joint=True),))]] * stages
        return Anatomy(
            layers, ties=ties, experts=experts, calls=calls, wgrad_microbatches=wgrad_microbatches, is_whole=True
        )

    def name(self, kind: Kind, stage: int, index: int) -> str:
        """Return the name of a part; empty for whole passes and transfers."""
        if kind is Kind.CALL:
            return self.calls[index]
        if kind is Kind.REDUCE and index:
            if index == EXPERT_SUM:
                return "experts"
            return "tied" + "+".join(map(str, self.summed(stage, index)[1:]))
        if self.is_whole or kind not in COMPUTE:
            return ""
        if kind is Kind.F:
            return str(self.forward[stage][index])
        return str(self.backward[stage][self.weight_steps[stage][index] if kind in WEIGHTS else index])

    def summed(self, stage: int, part: int) -> tuple[int, ...]:
        """Return the stages whose gradients a sum adds up: those of tie `part`, from 1 on, or the stage itself, for
        part 0 and for its experts (`EXPERT_SUM`).
        """
        return self.ties[part - 1] if part > 0 else (stage,)

    def is_joint(self, stage: int, part: Part) -> bool:
        """Return whether expert-parallel ranks run a part of this stage together."""
        return stage in self.experts and part.phase.is_joint

    @cached_property
    def forward_rows(self) -> Ints:
        """The row where each stage's parts begin in a table of all forward parts, then the row count."""
        return np.array([0, *accumulate(map(len, self.forward))])

    @cached_property
    def backward_rows(self) -> Ints:
        """The same for backward parts, and for their recomputation."""
        return np.array([0, *accumulate(map(len, self.backward))])

    @cached_property
    def first_compute_rows(self) -> Ints:
        """The row of each stage's first backward part on the compute lane."""
        rows: Ints = self.backward_rows[:-1] + np.array([steps[0] for steps in self.weight_steps])
        return rows

    @cached_property
    def weight_rows(self) -> Ints:
        """The row where each stage's parts begin in a table of all weight gradients, then the row count."""
        return np.array([0, *accumulate(map(len, self.weight_steps))])

    @cached_property
    def weight_needs(self) -> Ints:
        """For each row of weight gradients, the row of the backward part it needs."""
        rows = zip(self.backward_rows[:-1], self.weight_steps, strict=True)
        return np.concatenate([row + np.array(steps) for row, steps in rows])

    def _experts(self, experts: Iterable[int]) -> tuple[int, ...]:
        try:
            stages = tuple(sorted({*experts}))
        except TypeError:
            raise PlanError(f"experts are the stages that have experts, e.g. [0, 3] (got {experts!r:.40})") from None
        for stage in stages:
            if type(stage) is not int or not 0 <= stage < len(self.layers):
                raise PlanError(f"experts are some of the {len(self.layers)} stages, by number (got {stage!r:.40})")
            if not any(part.phase.is_joint for part in self.forward[stage]):
                raise PlanError(f"stage {stage} has no phase in which tokens go to experts on other ranks")
        return stages


def _ties(ties: Iterable[Iterable[int]], *, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return which stages share weights, each group sorted; raise PlanError if that is not what `ties` holds."""
    try:
        sorted_ties = tuple(sorted({tuple(sorted({*tie})) for tie in ties}))
        wrong = [
            tie
            for tie in sorted_ties
            if len(tie) < 2 or not all(type(stage) is int and 0 <= stage < stages for stage in tie)
        ]
    except TypeError:
        raise PlanError(f"ties are lists of stages that share weights, e.g. [[0, 3]] (got {ties!r:.40})") from None
    if wrong:
        raise PlanError(f"a tie is of two or more of the {stages} stages, by number (got {wrong[0]!r:.40})")
    return sorted_ties
