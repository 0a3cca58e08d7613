"""Waits of the host in a woven pair: after compute of the other pass has been issued, and as late as possible."""

from collections.abc import Sequence

from stretto.program.passes import Passes, Run, Token


def bare_waits(passes: Passes, order: Sequence[Token]) -> list[int]:
    """Return the places of waits before which no compute of the other pass is issued since the step that they wait
    for, though the pass has some left.
    """
    run, bare = Run(passes), []
    for place, token in enumerate(order):
        if run.step(token).lane == "host":
            since = order.index(Token(token.of, token.number - 1)) if token.number else -1
            between = order[since + 1 : place]
            left = any(_hides(run, token, other) for other in order[place:])
            if left and not any(_hides(run, token, other) for other in between):
                bare.append(place)
    return bare


def early_counts(passes: Passes, order: Sequence[Token]) -> tuple[Token, ...]:
    """Return the order with communication that the host will wait for issued before compute of the other pass that
    stands right before it. Times stay the same, and that compute hides the wait.
    """
    run, early = Run(passes), list(order)
    for wait in [token for token in order if run.step(token).lane == "host" and token.number]:
        awaited = Token(wait.of, wait.number - 1)
        place = early.index(awaited)
        while run.step(awaited).lane == "comm" and place and _hides(run, wait, early[place - 1]):
            early[place - 1 : place + 1] = awaited, early[place - 1]
            place -= 1
    return tuple(early)


def covered(passes: Passes, order: Sequence[Token]) -> tuple[Token, ...]:
    """Return the order with the next compute of the other pass moved before each wait that lacks it.

    Each wait is moved once: where both passes have waits, covering one may uncover another.
    """
    run, moved = Run(passes), set[Token]()
    while bare := [place for place in bare_waits(passes, order) if order[place] not in moved]:
        place = bare[0]
        wait = order[place]
        moved.add(wait)
        last = next(k for k in range(place, len(order)) if _hides(run, wait, order[k]))
        order = _sunk(order, place, last)
    return tuple(order)


def late_waits(passes: Passes, order: tuple[Token, ...]) -> tuple[Token, ...]:
    """Return the order with each wait, and what follows it in its pass, as late as it can be without delaying anything.
    The first to move is the last wait.
    """
    run, ends = Run(passes), dict(zip(order, passes.ends(order), strict=True))
    for wait in [token for token in reversed(order) if run.step(token).lane == "host"]:
        while True:
            place = order.index(wait)
            other = next((k for k in range(place, len(order)) if _is_other(wait, order[k])), None)
            if other is None:
                break
            later = _sunk(order, place, other)
            if any(end > ends[token] for token, end in zip(later, passes.ends(later), strict=True)):
                break
            order = later
    return order


def _sunk(order: Sequence[Token], place: int, last: int) -> tuple[Token, ...]:
    """Return the order with the wait at this place behind all of the other pass up to `last`."""
    wait, moved = order[place], order[place : last + 1]
    other, own = ([token for token in moved if _is_other(wait, token) is is_other] for is_other in (True, False))
    return (*order[:place], *other, *own, *order[last + 1 :])


def _is_other(wait: Token, token: Token) -> bool:
    """Return whether a token belongs to the other pass; weight gradients belong to the backward."""
    return (wait.of == "F") != (token.of == "F")


def _hides(run: Run, wait: Token, token: Token) -> bool:
    return _is_other(wait, token) and run.step(token).lane == "compute"
