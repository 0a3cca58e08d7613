"""A pair's two passes: their steps, and how long an order of these steps takes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Lane: TypeAlias = Literal["compute", "comm", "host"]


class Step(NamedTuple):
    """One phase of a pass: where it runs and for how long.

    A step on the "host" lane is a wait of the host. It issues nothing meanwhile, so what comes later in the order
    starts later.
    """

    lane: Lane
    time: float
    backward: bool = True
    """Whether the other direction has it too."""


class Weight(NamedTuple):
    """A weight gradient, on compute: which compute step of the backward it follows, and its time."""

    after: int
    time: float


class Token(NamedTuple):
    """A place in the woven order: the k-th step of the forward (F) or backward (B), or the k-th weight (W)."""

    of: Literal["F", "B", "W"]
    number: int


@dataclass(frozen=True, slots=True)
class Passes:
    """A forward and an independent backward. Each pass's steps follow one another."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    weights: tuple[Weight, ...] = ()

    def length(self, order: Sequence[Token]) -> float:
        """Return how long a pair takes in this order, each lane in order and each step after what it needs."""
        return max(self.ends(order), default=0.0)

    def ends(self, order: Sequence[Token]) -> list[float]:
        """Return when each token of an order ends."""
        run = Run(self)
        return [run.place(token) for token in order]


class Run:
    """Passes under way: when each lane is free and each pass may go on."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.free: dict[Lane, float] = {"compute": 0.0, "comm": 0.0, "host": 0.0}
        self.forward = 0.0
        self.backward: list[float] = []  # the end of each step so far

    def place(self, token: Token) -> float:
        step, start = self.step(token), self.start(token)
        end = self.free[step.lane] = start + step.time
        if step.lane == "host":
            self.free = {lane: max(end, free) for lane, free in self.free.items()}
        if token.of == "F":
            self.forward = end
        elif token.of == "B":
            self.backward.append(end)
        return end

    def start(self, token: Token) -> float:
        return max(self.free[self.step(token).lane], self._ready(token))

    def step(self, token: Token) -> Step:
        match token.of:
            case "F":
                return self.passes.forward[token.number]
            case "B":
                return self.passes.backward[token.number]
            case "W":
                return Step("compute", self.passes.weights[token.number].time)

    def _ready(self, token: Token) -> float:
        match token.of:
            case "F":
                return self.forward
            case "B":
                return self.backward[-1] if self.backward else 0.0
            case "W":
                after = self.passes.weights[token.number].after
                return self.backward[after] if after < len(self.backward) else math.inf
