"""Prints uncaught errors that other ranks caused as one line."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from stretto.ir.errors import StrettoError

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def print_peer_errors_as_one_line() -> None:
    """Print uncaught errors that other ranks caused without a traceback.

    After a failure all ranks raise, and only the traceback of the rank that failed matters.
    """
    previous = sys.excepthook
    if isinstance(previous, _Hook):
        return
    sys.excepthook = _Hook(previous)


class _Hook:
    def __init__(self, previous: _ExceptHook) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, StrettoError) and error.from_peer:
            error.__cause__, error.__suppress_context__, error.__traceback__, trace = None, True, None, None
        self._previous(kind, error, trace)
