"""Merges a pair's two passes into one order, so that each hides the other's communication."""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal

from stretto.program.host_waits import bare_waits, covered, early_counts, late_waits
from stretto.program.merge import Merge, Released, merges
from stretto.program.passes import Passes, Step, Token

_WIDTH = 8
"""How many partial merges a cell keeps. In 480 random pairs, 32 gave no shorter order."""
_LEAST_GAIN = 1e-9
"""The share of its length by which an order must be shorter to count as shorter: less is rounding."""


def weave(passes: Passes) -> tuple[Token, ...]:
    """Return the shortest merged order among the candidates; among equals, the one in which the host waits least often
    before it has issued compute of the other pass, and then the one whose gradient leaves first.

    The candidates are the passes in alternation and one after the other, with weight gradients last or right behind
    the step they belong to, and what a search finds that is shorter than all of these. Alternation with weight
    gradients last is Kimi K2's order, and with weight gradients right behind is DualPipe's, so a pair is never longer
    than in either, nor than unwoven. Waits of the host are then moved to where they come as late as they can without
    delaying anything.
    """
    forward, backward = list(_tokens("F", passes.forward)), list(_tokens("B", passes.backward))
    both = zip_longest(_turns("B", passes.backward), _turns("F", passes.forward), fillvalue=())
    turns = [token for turn in both for tokens in turn for token in tokens]
    orders = [
        tuple(place(passes, order))
        for order in (turns, forward + backward, backward + forward)
        for place in (_weights_last, _weights_behind)
    ]
    orders += map(tuple, _shorter(passes, min(map(passes.length, orders))))
    if not any(step.lane == "host" for step in passes.forward + passes.backward):
        return _best(passes, orders)
    orders = [early_counts(passes, order) for order in orders]
    orders += [covered(passes, order) for order in orders]
    return late_waits(passes, _best(passes, orders))


def _best(passes: Passes, orders: Sequence[tuple[Token, ...]]) -> tuple[Token, ...]:
    """Return the best order by length, then by waits, then by when the gradient leaves; the first of equals."""
    orders = _least(orders, passes.length)
    orders = _least(orders, lambda order: len(bare_waits(passes, order)))
    return _least(orders, lambda order: _gradient_leaves(passes, order))[0]


def _least(
    orders: Sequence[tuple[Token, ...]], key: Callable[[tuple[Token, ...]], float]
) -> Sequence[tuple[Token, ...]]:
    """Return the orders whose key is least, but for rounding, which depends on the unit of time."""
    keys = [key(order) for order in orders]
    most = min(keys) * (1 + _LEAST_GAIN)
    return [order for order, value in zip(orders, keys, strict=True) if value <= most]


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


def _weights_last(passes: Passes, order: Sequence[Token]) -> list[Token]:
    return [*order, *_tokens("W", passes.weights)]


def _weights_behind(passes: Passes, order: Sequence[Token]) -> Iterator[Token]:
    """Each weight gradient right behind the backward step it belongs to."""
    for token in order:
        yield token
        if token.of == "B":
            yield from (Token("W", k) for k, weight in enumerate(passes.weights) if weight.after == token.number)


def _shorter(passes: Passes, length: float) -> Iterator[list[Token]]:
    """Yield orders that are shorter than this length, if there are any.

    Weight gradients run oldest first, where compute would otherwise idle, even if one then delays the next step; the
    rest run last. Before a step that need not wait, a weight gradient gains nothing, because no step waits for it.
    """

    def extend(merge: Merge, token: Token, step: Step, released: Released) -> Iterator[Merge]:
        yield merge.then(token, step, released, work=_work)
        own = merge.forward if token.of == "F" else merge.backward
        idle_until = own + step.time if step.lane == "host" else own  # compute idles while the host waits, too
        while step.lane != "comm" and merge.compute < idle_until and merge.waiting:
            oldest, *waiting = merge.waiting
            compute = merge.compute + passes.weights[oldest.number].time
            merge = merge._replace(compute=compute, waiting=tuple(waiting), last=(merge, oldest))
            yield merge.then(token, step, released, work=_work)

    for merge in merges(passes, extend, below=length * (1 - _LEAST_GAIN), width=_WIDTH):
        yield [*merge.tokens(), *merge.waiting]


def _work(merge: Merge, start: float) -> float:
    """While compute idles, weight gradients wait on: those that were to run are already placed."""
    return merge.work + (start - merge.compute)
