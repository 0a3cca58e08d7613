"""Layers and their phases: what a pass through a stage consists of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, TypeVar

import numpy as np

from stretto.ir.errors import PlanError
from stretto.program.columns import Ints
from stretto.program.task import COMPUTE, WEIGHTS, Kind

_T = TypeVar("_T")
PhaseLane = Literal["compute", "comm"]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a layer that lives on one lane. Compute phases have weights, so a weight gradient each."""

    name: str
    lane: PhaseLane = "compute"


@dataclass(frozen=True, slots=True)
class Layer:
    """Phases that follow one another in the forward; the backward takes them in reverse."""

    name: str
    phases: tuple[Phase, ...]


_ATTN, _MLP, _LOSS = Phase("attn"), Phase("mlp"), Phase("loss")
EMBEDDING = Layer("embedding", (Phase("embedding"),))
DENSE = Layer("dense", (_ATTN, _MLP))
MOE = Layer("moe", (_ATTN, Phase("dispatch", "comm"), _MLP, Phase("combine", "comm")))
MTP = Layer("mtp", (*MOE.phases, _LOSS))
"""Multi-token prediction: one more MoE layer with a loss of its own."""
LOSS = Layer("loss", (_LOSS,))


@dataclass(frozen=True, slots=True)
class Part:
    """A phase of the n-th layer of a stage."""

    layer: int
    kind: str
    phase: Phase

    def __str__(self) -> str:
        return f"{self.phase.name}{self.layer}"


class Anatomy:
    """The parts of every pass through every stage: a forward, its backward in reverse, its weight gradients.

    A program of whole actions has one nameless part in each. `ties` are the stages that share weights, a tuple of them
    for each set of stages that does. Weight gradients of `wgrad_microbatches` are computed together. A program of a
    user's own has the names of its calls instead.
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
        self.ties = tuple(sorted({tuple(sorted({*tie})) for tie in ties}))
        for tie in self.ties:
            if len(tie) < 2 or not 0 <= tie[0] <= tie[-1] < len(layers):
                raise PlanError(f"a tie is of two or more of the {len(layers)} stages, by number (got {tie})")
        self.is_whole = is_whole
        self.forward = tuple(
            tuple(Part(n, layer.name, phase) for n, layer in enumerate(stage) for phase in layer.phases)
            for stage in layers
        )
        for stage, parts in enumerate(self.forward):
            if not any(part.phase.lane == "compute" for part in parts):
                raise PlanError(f"stage {stage} has no layer that computes anything")
        self.backward = tuple(parts[::-1] for parts in self.forward)
        # Of each weight gradient, the step of the backward it follows.
        self.weight_steps = tuple(
            tuple(step for step, part in enumerate(parts) if part.phase.lane == "compute") for parts in self.backward
        )

    @staticmethod
    def whole(
        stages: int, *, ties: Iterable[Iterable[int]] = (), calls: Iterable[str] = (), wgrad_microbatches: int = 1
    ) -> "Anatomy":
        """Of stages that are not taken apart."""
        layers = [[Layer("", (Phase(""),))]] * stages
        return Anatomy(layers, ties=ties, calls=calls, wgrad_microbatches=wgrad_microbatches, is_whole=True)

    def name(self, kind: Kind, stage: int, index: int) -> str:
        """What a part of a pass is called; nothing for a whole one or a transfer."""
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
        """The stages whose gradients a sum adds up: its own, or those of a tie, which are counted from 1."""
        return self.ties[part - 1] if part else (stage,)

    @cached_property
    def pass_rows(self) -> Ints:
        """Where each stage's parts begin in a table of all stages' parts, forward or backward; and the end."""
        return np.array([0, *accumulate(map(len, self.forward))])

    @cached_property
    def first_compute_rows(self) -> Ints:
        """The row of the first part of each stage's backward that is on the compute lane."""
        rows: Ints = self.pass_rows[:-1] + np.array([steps[0] for steps in self.weight_steps])
        return rows

    @cached_property
    def weight_rows(self) -> Ints:
        """The same for weight gradients."""
        return np.array([0, *accumulate(map(len, self.weight_steps))])

    @cached_property
    def weight_needs(self) -> Ints:
        """Of each row of weights, the row of the backward part it needs."""
        rows = zip(self.pass_rows[:-1], self.weight_steps, strict=True)
        return np.concatenate([row + np.array(steps) for row, steps in rows])


def parse_layers(text: str) -> list[Layer]:
    """Read a model's layers in order.

    >>> [layer.name for layer in parse_layers("embedding, dense, moe*2, loss")]
    ['embedding', 'dense', 'moe', 'moe', 'loss']
    """
    known = {layer.name: layer for layer in (EMBEDDING, DENSE, MOE, MTP, LOSS)}
    layers: list[Layer] = []
    for word in text.split(","):
        name, times, count = (side.strip() for side in word.partition("*"))
        number = int(count) if count.isascii() and count.isdecimal() and len(count) < 6 else 0 if times else 1
        if name not in known or number < 1:
            raise PlanError(f"{word.strip()!r:.40} is no layer; write e.g. moe or moe*3, of {', '.join(known)}")
        layers += [known[name]] * number
    return layers


def cut_layers(
    layers: Sequence[_T], *, stages: int, balance: Sequence[int] | None = None
) -> tuple[tuple[_T, ...], ...]:
    """Share a model's layers out among stages: evenly, the first ones taking one more, or as `balance` says.

    >>> [len(stage) for stage in cut_layers([EMBEDDING, *[MOE] * 5, LOSS], stages=3)]
    [3, 2, 2]
    """
    if balance is None:
        each, more = divmod(len(layers), stages)
        balance = [each + (stage < more) for stage in range(stages)]
    if len(balance) != stages or sum(balance) != len(layers) or min(balance) < 1:
        shares = f"{stages} shares of at least 1 that add up (got {list(balance)})"
        raise PlanError(f"{len(layers)} layers on {stages} stages need {shares}")
    return tuple(tuple(layers[a:b]) for a, b in pairwise(accumulate(balance, initial=0)))
