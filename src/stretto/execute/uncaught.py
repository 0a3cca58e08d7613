"""How an error is printed that nothing has caught."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from stretto.ir.errors import StrettoError

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def print_told_errors_as_one_line() -> None:
    """From now on. Of a failure all ranks raise, and the traceback that matters is that of the rank that failed."""
    before = sys.excepthook
    if isinstance(before, _Hook):
        return
    sys.excepthook = _Hook(before)


class _Hook:
    def __init__(self, before: _ExceptHook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, StrettoError) and error.is_told:
            error.__cause__, error.__suppress_context__, error.__traceback__, trace = None, True, None, None
        self._before(kind, error, trace)
