"""Receive buffers: allocated once, and reused in an order that the program fixes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.pipeline.descriptions import Description, TensorMeta, moved_as
from stretto.pipeline.pytree import Tree
from stretto.program.task import COMPUTE, RECEIVES, Kind, Lane, Task

BufferKey = tuple[Kind, int, int]
"""A kind of receive, a stage, and the buffer's number among theirs."""


def share_recv_buffers(
    tasks: Sequence[Task], ends: Mapping[int, int]
) -> tuple[dict[int, BufferKey], dict[int, list[int]]]:
    """Return two maps by the index of each receive among a rank's tasks: the buffer that it fills, and the last earlier
    tasks that used that buffer, one of each lane.

    A stage needs a microbatch's input and the gradient of its output until all its work on that microbatch is done,
    since weight gradients are computed from both. Then another receive may reuse the buffers. `ends` maps tasks that
    end only with a later task to that task.
    """
    last: dict[tuple[int, int], dict[Lane, int]] = defaultdict(dict)
    for at, task in enumerate(tasks):
        for owner in _computes(task):
            last[owner][task.lane] = max(last[owner].get(task.lane, 0), ends.get(at, at))
    free: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    count: dict[tuple[Kind, int], int] = defaultdict(int)
    held: dict[int, list[tuple[BufferKey, list[int]]]] = defaultdict(list)
    taken: dict[int, BufferKey] = {}
    released: dict[BufferKey, list[int]] = {}
    after: dict[int, list[int]] = {}
    for at, task in enumerate(tasks):
        if task.kind in RECEIVES:
            kind = task.kind, task.stage
            if not free[kind]:
                free[kind].append(count[kind])
                count[kind] += 1
            taken[at] = key = (*kind, free[kind].pop())
            users = sorted(last[task.stage, task.microbatch].values())
            held[users[-1]].append((key, users))
            if key in released:
                after[at] = released[key]
        for key, users in held.pop(at, ()):
            free[key[:2]].append(key[2])
            released[key] = users
    return taken, after


def _computes(task: Task) -> list[tuple[int, int]]:
    """Return the (stage, microbatch) pairs for which a task computes."""
    if task.kind not in COMPUTE:
        return []
    return [(task.stage, task.microbatch), *([] if task.backward is None else [task.backward])]


@dataclass(frozen=True, slots=True)
class RecvBuffer:
    """The tensors of a buffer, valid until the next message is received into it."""

    metas: list[TensorMeta]
    tensors: list[Tensor]
    raws: list[Tensor]
    """The non-empty tensors, in the form in which process groups transfer them."""
    storages: frozenset[int]

    def own(self, tree: Tree) -> Tree:
        """Return the tree with the tensors that lie in this buffer copied."""
        return tree.copied(self.holds)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages


class RecvBuffers:
    """All receive buffers of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[BufferKey, RecvBuffer] = {}
        self.reader: Any = None
        """On a device, the stream that reads the buffers. One that no longer fits is not reused before that is done."""

    def take(self, key: BufferKey, description: Description) -> RecvBuffer:
        """Return the buffer, reallocated if the described message does not fit it."""
        metas, buffer = description.metas, self._buffers.get(key)
        if buffer is None or buffer.metas != metas:
            if buffer is not None and self.reader is not None:
                for tensor in buffer.tensors:
                    tensor.record_stream(self.reader)
            tensors = description.empty(self._device)
            raws = [moved_as(tensor) for tensor in tensors if tensor.numel()]
            storages = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors) - {0}
            self._buffers[key] = buffer = RecvBuffer(metas, tensors, raws, storages)
        return buffer
