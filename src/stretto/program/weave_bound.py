"""A length that no order of a pair's passes can beat."""

from collections.abc import Iterator

from stretto.program.merge import Merge, Released, merges
from stretto.program.passes import Passes, Step, Token


def bound(passes: Passes, *, length: float) -> float:
    """Return a lower bound on the length of all orders, given the length of one of them.

    It is the length of the best order if weight gradients could be divided at will, so that they fill any time in which
    compute idles, and delay nothing. Without weight gradients it is the shortest length there is.
    """

    def extend(merge: Merge, token: Token, step: Step, released: Released) -> Iterator[Merge]:
        yield merge.then(token, step, released, work=_work)

    return min((merge.length for merge in merges(passes, extend, below=length)), default=length)


def _work(merge: Merge, start: float) -> float:
    """The weight gradients that wait run while compute idles."""
    return max(merge.work, start)
