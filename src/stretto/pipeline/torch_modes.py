"""The modes of PyTorch (`TorchFunctionMode`, `TorchDispatchMode`) within which something ran, for a second run."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import takewhile
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode_temporarily as leave_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode_temporarily as leave_dispatch_mode


class Modes:
    """The modes that are active now."""

    __slots__ = ("_stacks",)

    def __init__(self) -> None:
        self._stacks = _stacks()

    def entered(self) -> AbstractContextManager[None]:
        """Return a context with the same modes and no others, for a second run."""
        now = _stacks()
        return _NOTHING if now == self._stacks else self._entered(now)

    @contextmanager
    def _entered(self, stacks: tuple[list[Any], list[Any]]) -> Iterator[None]:
        with ExitStack() as contexts:
            for then, now, leave in zip(self._stacks, stacks, _LEAVE, strict=True):
                same = sum(1 for _ in takewhile(lambda both: _is_same(*both), zip(then, now, strict=False)))
                for _ in now[same:]:
                    contexts.enter_context(leave())
                for mode in then[same:]:
                    contexts.enter_context(DeviceContext(mode.device) if isinstance(mode, DeviceContext) else mode)
            yield


def _stacks() -> tuple[list[Any], list[Any]]:
    functions = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []  # type: ignore[no-untyped-call]
    dispatches = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    return functions, dispatches


def _is_same(one: Any, other: Any) -> bool:
    devices = isinstance(one, DeviceContext) and isinstance(other, DeviceContext)
    return one is other or (devices and one.device == other.device)


_LEAVE: tuple[Callable[[], Any], ...] = leave_function_mode, leave_dispatch_mode
_NOTHING = nullcontext()
