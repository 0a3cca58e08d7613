"""The modes of PyTorch (`TorchFunctionMode`, `TorchDispatchMode`) within which something ran, for a second run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from stretto.ir.errors import PipelineError


class Modes:
    """The modes that are active now."""

    __slots__ = ("_stacks",)

    def __init__(self) -> None:
        self._stacks = _stacks()

    def entered(self, name: str) -> AbstractContextManager[None]:
        """Return a context with those that are not active, for the second run of what has this name."""
        now = _stacks()
        return _NOTHING if now == self._stacks else self._entered(name, now)

    @contextmanager
    def _entered(self, name: str, stacks: tuple[list[Any], list[Any]]) -> Iterator[None]:
        with ExitStack() as contexts:
            for then, now in zip(self._stacks, stacks, strict=True):
                if len(now) > len(then) or not all(map(_is_same, then, now)):
                    raise PipelineError(
                        f"{name} is recomputed within modes of PyTorch in which it did not run at first"
                    )
                for mode in then[len(now) :]:
                    contexts.enter_context(DeviceContext(mode.device) if isinstance(mode, DeviceContext) else mode)
            yield


def _stacks() -> tuple[list[Any], list[Any]]:
    functions = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []  # type: ignore[no-untyped-call]
    dispatches = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    return functions, dispatches


def _is_same(one: Any, other: Any) -> bool:
    devices = isinstance(one, DeviceContext) and isinstance(other, DeviceContext)
    return one is other or (devices and one.device == other.device)


_NOTHING = nullcontext()
