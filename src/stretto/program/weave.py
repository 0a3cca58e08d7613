"""Merges a pair's two passes into one order, so that each hides the other's communication."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from stretto.program.host_waits import bare_waits, covered, early_counts, late_waits
from stretto.program.passes import Passes, Run, Step, Token


def weave(passes: Passes) -> tuple[Token, ...]:
    """Return the shortest merged order among the candidates; among equals, the one in which the host waits least often
    before it has issued compute of the other pass, and then the one whose gradient leaves first.

    The candidates are the best merges of the two passes (`_merges`), the passes in alternation, and one after the
    other. In each, weight gradients go last, into gaps of the compute lane, or right behind the step they belong to.
    Alternation with weight gradients last is Kimi K2's order, and with weight gradients right behind is DualPipe's, so
    a pair is never longer than in either, nor than unwoven. Waits of the host are then moved to where they come as late
    as they can without delaying anything.
    """
    forward, backward = list(_tokens("F", passes.forward)), list(_tokens("B", passes.backward))
    both = zip_longest(_turns("B", passes.backward), _turns("F", passes.forward), fillvalue=())
    turns = [token for turn in both for tokens in turn for token in tokens]
    orders = [
        tuple(place(passes, order))
        for order in (*_merges(passes), turns, forward + backward, backward + forward)
        for place in (_weights_last, _weights_in_gaps, _weights_behind)
    ]
    if not any(step.lane == "host" for step in passes.forward + passes.backward):
        return min(orders, key=lambda order: (passes.length(order), _gradient_leaves(passes, order)))
    orders = [early_counts(passes, order) for order in orders]
    orders += [covered(passes, order) for order in orders]
    best = min(orders, key=lambda o: (passes.length(o), len(bare_waits(passes, o)), _gradient_leaves(passes, o)))
    return late_waits(passes, best)


def _tokens(of: Literal["F", "B", "W"], steps: Sequence[object]) -> Iterator[Token]:
    return (Token(of, index) for index in range(len(steps)))


def _turns(of: Literal["F", "B"], steps: Sequence[Step]) -> Iterator[list[Token]]:
    """Yield a pass's steps; one that the other pass lacks comes with the next step."""
    turn = []
    for token, step in zip(_tokens(of, steps), steps, strict=True):
        turn.append(token)
        if step.backward:
            yield turn
            turn = []
    yield turn


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
    if step.lane == "host":
        end = state.forward + step.time
        _, backward, compute, comm = (max(end, time) for time in state[:4])
        return _State(end, backward, compute, comm, (state, Token("F", index)))
    end = max(state.forward, state.comm) + step.time
    return _State(end, state.backward, state.compute, end, (state, Token("F", index)))


def _backwarded(state: _State, step: Step, index: int) -> _State:
    if step.lane == "compute":
        end = max(state.backward, state.compute) + step.time
        return _State(state.forward, end, end, state.comm, (state, Token("B", index)))
    if step.lane == "host":
        end = state.backward + step.time
        forward, _, compute, comm = (max(end, time) for time in state[:4])
        return _State(forward, end, compute, comm, (state, Token("B", index)))
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
    run = Run(passes)
    waiting = deque(_tokens("W", passes.weights))
    for token in order:
        step = run.step(token)
        if step.lane != "comm":
            idle = 0.0 if step.lane == "compute" else step.time  # compute idles while the host waits, too
            while waiting and run.start(waiting[0]) + run.step(waiting[0]).time <= run.start(token) + idle:
                run.place(waiting[0])
                yield waiting.popleft()
        run.place(token)
        yield token
    yield from waiting
