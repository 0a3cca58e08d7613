"""Merges a pair's two passes step by step; keeps the partial merges that can still become the shortest."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from stretto.program.passes import Passes, Step, Token


class Released(NamedTuple):
    """The weight gradients that can run once a step has ended, and their total time."""

    weights: tuple[Token, ...] = ()
    time: float = 0.0


class Merge(NamedTuple):
    """A partial merge: when each pass may go on, when each lane is free, and the tokens that led here."""

    forward: float = 0.0
    backward: float = 0.0
    compute: float = 0.0
    comm: float = 0.0
    work: float = 0.0
    """When compute is done if it now runs the weight gradients that wait."""
    waiting: tuple[Token, ...] = ()
    """The weight gradients that wait, oldest first."""
    last: "tuple[Merge, Token] | None" = None

    def tokens(self) -> list[Token]:
        merge, tokens = self, []
        while merge.last is not None:
            merge, token = merge.last
            tokens.append(token)
        return tokens[::-1]

    @property
    def length(self) -> float:
        """The length of a whole merge, with the weight gradients that wait at its end."""
        return max(self.forward, self.backward, self.comm, self.work)

    def then(self, token: Token, step: Step, released: Released, *, work: Callable[["Merge", float], float]) -> "Merge":
        """Return this merge and a pass's next step. `work` gives `Merge.work` when compute has idled until a time."""
        own, other = (self.forward, self.backward) if token.of == "F" else (self.backward, self.forward)
        compute, comm, pending = self.compute, self.comm, self.work
        if step.lane == "compute":
            start = max(own, compute)
            own = compute = start + step.time
            pending = work(self, start) + step.time
        elif step.lane == "comm":
            own = comm = max(own, comm) + step.time
        else:
            own += step.time
            other, compute, comm = max(own, other), max(own, compute), max(own, comm)
            pending = work(self, compute)
        forward, backward = (own, other) if token.of == "F" else (other, own)
        waiting = self.waiting + released.weights
        return Merge(forward, backward, compute, comm, pending + released.time, waiting, (self, token))


Extend: TypeAlias = Callable[[Merge, Token, Step, Released], Iterable[Merge]]
"""Returns the merges that a pass's next step makes of a merge."""


def merges(passes: Passes, extend: Extend, *, below: float, width: float = math.inf) -> list[Merge]:
    """Return merges of all steps that are shorter than `below`, the shortest first.

    Cell (i, j) holds the partial merges of i forward and j backward steps. The next step of either pass extends each
    of them. A merge is dropped if it cannot be shorter than `below`, or if another is as good in all times. Of the
    others, a cell keeps the `width` that promise most.
    """
    released = _released(passes)
    forward = [(Token("F", i), step, Released()) for i, step in enumerate(passes.forward)]
    backward = [(Token("B", j), step, released[j]) for j, step in enumerate(passes.backward)]
    left = _Left(passes, released)
    cells: dict[tuple[int, int], list[Merge]] = {
        (i, j): [] for i in range(len(passes.forward) + 1) for j in range(len(passes.backward) + 1)
    }
    cells[0, 0] = [Merge()]
    for (i, j), cell in cells.items():
        cell[:] = _kept(left.in_time(cell, i, j, below), width)
        for merge in cell:
            if i < len(forward):
                cells[i + 1, j].extend(extend(merge, *forward[i]))
            if j < len(backward):
                cells[i, j + 1].extend(extend(merge, *backward[j]))
    return cell


def _released(passes: Passes) -> list[Released]:
    weights: list[list[int]] = [[] for _ in passes.backward]
    for number, weight in enumerate(passes.weights):
        weights[weight.after].append(number)
    return [
        Released(tuple(Token("W", k) for k in numbers), sum(passes.weights[k].time for k in numbers))
        for numbers in weights
    ]


class _Left:
    """What is left to do after each step: the rest of each pass, and each lane's load."""

    def __init__(self, passes: Passes, released: Sequence[Released]) -> None:
        weights = [release.time for release in released]
        self._forward = _sums(step.time for step in passes.forward)
        self._backward = [0.0]
        for step, weight in zip(reversed(passes.backward), reversed(weights), strict=True):
            self._backward.append(step.time + max(self._backward[-1], weight))
        self._backward.reverse()
        self._forward_loads = _loads(passes.forward, [0.0] * len(passes.forward))
        self._backward_loads = _loads(passes.backward, weights)

    def in_time(self, merges: list[Merge], i: int, j: int, below: float) -> Iterator[tuple[float, float, Merge]]:
        """Yield the merges at cell (i, j) that may end in time, with their least length and the sum of their times."""
        forward, backward = self._forward[i], self._backward[j]
        compute, comm = (a + b for a, b in zip(self._forward_loads[i], self._backward_loads[j], strict=True))
        for merge in merges:
            least = max(merge.forward + forward, merge.backward + backward, merge.work + compute, merge.comm + comm)
            if least < below:
                yield least, sum(merge[:4]), merge


def _loads(steps: tuple[Step, ...], weights: list[float]) -> list[tuple[float, float]]:
    """Return the load of compute, with the weight gradients that steps release, and of comm, from each step on."""
    compute = _sums((step.lane == "compute") * step.time + w for step, w in zip(steps, weights, strict=True))
    return list(zip(compute, _sums((step.lane == "comm") * step.time for step in steps), strict=True))


def _sums(times: Iterable[float]) -> list[float]:
    return list(accumulate(reversed(list(times)), initial=0.0))[::-1]


def _kept(found: Iterable[tuple[float, float, Merge]], width: float) -> list[Merge]:
    kept: list[Merge] = []
    for _, _, new in sorted(found, key=lambda item: item[:2]):
        if not any(_as_good(old, new) for old in kept):
            kept.append(new)
        if len(kept) >= width:
            break
    return kept


def _as_good(a: Merge, b: Merge) -> bool:
    return (
        a.forward <= b.forward
        and a.backward <= b.backward
        and a.compute <= b.compute
        and a.comm <= b.comm
        and a.work <= b.work
    )
