"""The anatomy of each stage's passes: the phases of its layers, in order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from stretto.ir.errors import PlanError
from stretto.layers import Layer, Phase
from stretto.program.columns import Ints
from stretto.program.task import COMPUTE, WEIGHTS, Kind


@dataclass(frozen=True, slots=True)
class Part:
    """A phase of the n-th layer of a stage."""

    layer: int
    kind: str
    phase: Phase

    def __str__(self) -> str:
        return f"{self.phase.name}{self.layer}"


class Anatomy:
    """The parts of each stage's forward, of its backward (the same in reverse) and of its weight gradients.

    A program of whole actions has a single unnamed part per pass. Each tuple in `ties` lists stages that share
    weights. The weight gradients of `wgrad_microbatches` microbatches are computed together. In a user-defined program
    (`program_of`), `calls` holds the names of the calls.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Layer]],
        *,
        ties: Iterable[Iterable[int]] = (),
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
        for stage, parts in enumerate(self.forward):
            if not any(part.phase.lane == "compute" for part in parts):
                raise PlanError(f"stage {stage} has no layer that computes anything")
        self.backward = tuple(parts[::-1] for parts in self.forward)
        # For each weight gradient, the backward step it follows.
        self.weight_steps = tuple(
            tuple(step for step, part in enumerate(parts) if part.phase.lane == "compute") for parts in self.backward
        )

    @staticmethod
    def whole(
        stages: int, *, ties: Iterable[Iterable[int]] = (), calls: Iterable[str] = (), wgrad_microbatches: int = 1
    ) -> "Anatomy":
        """Return the anatomy of stages that are not split into layers."""
        layers = [[Layer("", (Phase(""),))]] * stages
        return Anatomy(layers, ties=ties, calls=calls, wgrad_microbatches=wgrad_microbatches, is_whole=True)

    def name(self, kind: Kind, stage: int, index: int) -> str:
        """Return the name of a part; empty for whole passes and transfers."""
        if kind is Kind.CALL:
            return self.calls[index]
        if kind is Kind.REDUCE and index:
            return "tied" + "+".join(map(str, self.summed(stage, index)[1:]))
        if self.is_whole or kind not in COMPUTE:
            return ""
        if kind is Kind.F:
            return str(self.forward[stage][index])
        return str(self.backward[stage][self.weight_steps[stage][index] if kind in WEIGHTS else index])

    def summed(self, stage: int, part: int) -> tuple[int, ...]:
        """Return the stages whose gradients a sum adds up: its own for part 0, else those of tie `part`, from 1 on."""
        return self.ties[part - 1] if part else (stage,)

    @cached_property
    def pass_rows(self) -> Ints:
        """The row where each stage's parts begin in a table of all forward (or backward) parts, then the row count."""
        return np.array([0, *accumulate(map(len, self.forward))])

    @cached_property
    def first_compute_rows(self) -> Ints:
        """The row of each stage's first backward part on the compute lane."""
        rows: Ints = self.pass_rows[:-1] + np.array([steps[0] for steps in self.weight_steps])
        return rows

    @cached_property
    def weight_rows(self) -> Ints:
        """The row where each stage's parts begin in a table of all weight gradients, then the row count."""
        return np.array([0, *accumulate(map(len, self.weight_steps))])

    @cached_property
    def weight_needs(self) -> Ints:
        """For each row of weight gradients, the row of the backward part it needs."""
        rows = zip(self.pass_rows[:-1], self.weight_steps, strict=True)
        return np.concatenate([row + np.array(steps) for row, steps in rows])


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
