"""Streams that run nothing and only know what they wait for, to find memory that is given away too early."""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Event:
    def __init__(self) -> None:
        self.passed: set[Hashable] = set()

    def record(self, stream: "Stream") -> None:
        self.passed = set(stream.passed)

    def synchronize(self) -> None: ...


class Stream:
    """Knows the tasks that have ended when it gets to its end."""

    def __init__(self, priority: int = 0) -> None:  # noqa: ARG002
        self.passed: set[Hashable] = set()

    def wait_event(self, event: Event) -> None:
        self.passed |= event.passed

    def wait_stream(self, other: "Stream") -> None:
        self.passed |= other.passed

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Streams:
    """Stands for `torch.cuda` within `patched`."""

    def __init__(self) -> None:
        self.now = self.main = Stream()

    def set_stream(self, stream: Stream) -> None:
        self.now = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def patched(self) -> Any:
        return mock.patch.multiple(
            "torch.cuda",
            Event=Event,
            Stream=Stream,
            current_stream=lambda: self.now,
            set_stream=self.set_stream,
            stream=self.stream,
        )


class Memory:
    """Made in a stream; `users` are the tasks that use it, each in a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.users = stream, set[tuple[Hashable, Stream]]()


class Allocator:
    """Gives memory that was freed in a stream to the next that asks for some there, as PyTorch's does.

    `wrong` tells of memory that was given away while others may use it.
    """

    def __init__(self) -> None:
        self._freed: list[tuple[Stream, set[tuple[Hashable, Stream]]]] = []
        self.wrong: list[str] = []

    def make(self, owner: Stream, task: Hashable) -> Memory:
        for stream, users in self._freed:
            late = {str(by) for by, where in users if where is not owner and by not in owner.passed}
            if stream is owner and late:
                self.wrong.append(f"{task} is given memory of {', '.join(sorted(late))}")
        self._freed[:] = [(stream, users) for stream, users in self._freed if stream is not owner]
        made = Memory(owner)
        weakref.finalize(made, self.free, owner, made.users)
        return made

    def free(self, owner: Stream, users: set[tuple[Hashable, Stream]]) -> None:
        self._freed.append((owner, users))


class Watching(TorchDispatchMode):
    """Sees which task makes and uses each tensor, in which of the fake streams."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams, self.allocator = streams, Allocator()
        self._memory: dict[int, tuple[Any, Memory, int]] = {}  # by storage: a weak reference, what it is, its bytes
        self.task: Hashable = None
        self.peak = 0
        """The most bytes that were alive at a time."""
        self.peak_at_ends = 0
        """The same when a task ends."""

    def doing(self, task: Hashable, act: Callable[[], Any]) -> Callable[[], Any]:
        """Return the function of a task, seen."""

        def seen() -> Any:
            self.task = task
            self._streams.now.passed.add(task)
            try:
                return act()
            finally:
                self._sweep()
                self.peak_at_ends = max(self.peak_at_ends, self._alive())
                self.task = None

        return seen

    def _sweep(self) -> None:
        gone = [key for key, (reference, _, _) in self._memory.items() if reference.expired()]
        for key in gone:
            del self._memory[key]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = function(*args, **(kwargs or {}))
        if self.task is None:
            return out
        self._sweep()
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for key in given & self._memory.keys():
            self._memory[key][1].users.add((self.task, self._streams.now))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata in given or storage._cdata in self._memory or not storage.nbytes():
                continue
            made = self.allocator.make(self._streams.now, self.task)
            made.users.add((self.task, self._streams.now))
            weak: Any = StorageWeakRef
            self._memory[storage._cdata] = weak(storage), made, storage.nbytes()
        self.peak = max(self.peak, self._alive())
        return out

    def _alive(self) -> int:
        return sum(nbytes for _, _, nbytes in self._memory.values())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
