"""Merges a pair's two passes into one order, so that each hides the other's communication."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeAlias

Lane: TypeAlias = Literal["compute", "comm"]


class Step(NamedTuple):
    """One phase of a pass: where it runs and for how long."""

    lane: Lane
    time: float


class Weight(NamedTuple):
    """A weight gradient, on compute: which step of the backward it follows, and its time."""

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
        run = _Run(self)
        return [run.place(token) for token in order]


class _Run:
    """Passes under way: when each lane is free and each pass may go on."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.free: dict[Lane, float] = {"compute": 0.0, "comm": 0.0}
        self.forward = 0.0
        self.backward: list[float] = []  # the end of each step so far

    def place(self, token: Token) -> float:
        step, start = self.step(token), self.start(token)
        end = self.free[step.lane] = start + step.time
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


def weave(passes: Passes) -> tuple[Token, ...]:
    """Return the shortest merged order among the candidates; among equals, the one whose gradient leaves first.

    The candidates are the best merges of the two passes (`_merges`), the passes in alternation, and one after the
    other. In each, weight gradients go last, into gaps of the compute lane, or right behind the step they belong to.
    Alternation with weight gradients last is Kimi K2's order, and with weight gradients right behind is DualPipe's, so
    a pair is never longer than in either, nor than unwoven.
    """
    forward, backward = list(_tokens("F", passes.forward)), list(_tokens("B", passes.backward))
    turns = [token for both in zip_longest(backward, forward) for token in both if token is not None]
    orders = [
        tuple(place(passes, order))
        for order in (*_merges(passes), turns, forward + backward, backward + forward)
        for place in (_weights_last, _weights_in_gaps, _weights_behind)
    ]
    return min(orders, key=lambda order: (passes.length(order), _gradient_leaves(passes, order)))


def _tokens(of: Literal["F", "B", "W"], steps: Sequence[object]) -> Iterator[Token]:
    return (Token(of, index) for index in range(len(steps)))


def _gradient_leaves(passes: Passes, order: Sequence[Token]) -> float:
    ends = passes.ends(order)
    return max((end for end, token in zip(ends, order, strict=True) if token.of == "B"), default=0.0)


class _State(NamedTuple):
    """A partial merge: when each pass may go on, when each lane is free, and the steps that led here."""

    forward: float
    backward: float
    compute: float
    comm: float
    order: "tuple[_State, Token] | None"


def _merges(passes: Passes) -> Iterator[list[Token]]:
    """Yield the merges of the two passes that no other merge beats in both passes' and both lanes' times.

    Cell (i, j) holds the partial merges of i forward and j backward steps that no other beats in all four times. The
    next step of either pass extends each of them. With two chains on two lanes, few remain.
    """
    forward, backward = passes.forward, passes.backward
    cells: dict[tuple[int, int], list[_State]] = {(0, 0): [_State(0.0, 0.0, 0.0, 0.0, None)]}
    for i in range(len(forward) + 1):
        for j in range(len(backward) + 1):
            for state in cells.get((i, j), ()):
                if i < len(forward):
                    _keep(cells.setdefault((i + 1, j), []), _forwarded(state, forward[i], i))
                if j < len(backward):
                    _keep(cells.setdefault((i, j + 1), []), _backwarded(state, backward[j], j))
    for final in cells[len(forward), len(backward)]:
        order = []
        state = final
        while state.order is not None:
            state, token = state.order
            order.append(token)
        yield order[::-1]


def _forwarded(state: _State, step: Step, index: int) -> _State:
    if step.lane == "compute":
        end = max(state.forward, state.compute) + step.time
        return _State(end, state.backward, end, state.comm, (state, Token("F", index)))
    end = max(state.forward, state.comm) + step.time
    return _State(end, state.backward, state.compute, end, (state, Token("F", index)))


def _backwarded(state: _State, step: Step, index: int) -> _State:
    if step.lane == "compute":
        end = max(state.backward, state.compute) + step.time
        return _State(state.forward, end, end, state.comm, (state, Token("B", index)))
    end = max(state.backward, state.comm) + step.time
    return _State(state.forward, end, state.compute, end, (state, Token("B", index)))


def _keep(states: list[_State], new: _State) -> None:
    """Add a state unless another is as good in every way; drop the states it beats."""
    if any(_as_good(old, new) for old in states):
        return
    states[:] = [old for old in states if not _as_good(new, old)]
    states.append(new)


def _as_good(a: _State, b: _State) -> bool:
    return a.forward <= b.forward and a.backward <= b.backward and a.compute <= b.compute and a.comm <= b.comm


def _weights_last(passes: Passes, order: Sequence[Token]) -> list[Token]:
    return [*order, *_tokens("W", passes.weights)]


def _weights_behind(passes: Passes, order: Sequence[Token]) -> Iterator[Token]:
    """Each weight gradient right behind the backward step it belongs to."""
    for token in order:
        yield token
        if token.of == "B":
            yield from (Token("W", k) for k, weight in enumerate(passes.weights) if weight.after == token.number)


def _weights_in_gaps(passes: Passes, order: Sequence[Token]) -> Iterator[Token]:
    """Weight gradients, oldest first, wherever the compute lane would idle long enough; the rest last."""
    run = _Run(passes)
    waiting = deque(_tokens("W", passes.weights))
    for token in order:
        if run.step(token).lane == "compute":
            while waiting and run.start(waiting[0]) + run.step(waiting[0]).time <= run.start(token):
                run.place(waiting[0])
                yield waiting.popleft()
        run.place(token)
        yield token
    yield from waiting
