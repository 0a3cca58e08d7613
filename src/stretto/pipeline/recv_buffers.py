"""Where what arrives is put: rooms that are made once, and taken in turns by the program's own order."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.pipeline.descriptions import Description, TensorMeta, moved_as
from stretto.pipeline.pytree import Tree
from stretto.program.task import COMPUTE, RECEIVES, Kind, Task

BufferKey = tuple[Kind, int, int]
"""A kind of receive, a stage and a number."""


def share_recv_buffers(tasks: Sequence[Task], ends: Mapping[int, int]) -> tuple[dict[int, BufferKey], dict[int, int]]:
    """For each task of a rank that receives, by its place: the room that it fills, and the last task before it that
    needed what was there.

    What arrives for a microbatch is needed until its stage has done all for it: the forward's input and the output's
    gradient both, since weight gradients are made of them. Then the next one may take the room. `ends` are tasks that
    only the end of another one ends.
    """
    last: dict[tuple[int, int], int] = defaultdict(int)
    for at, task in enumerate(tasks):
        for of in _computes(task):
            last[of] = max(last[of], ends.get(at, at))
    free: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    made: dict[tuple[Kind, int], int] = defaultdict(int)
    held: dict[int, list[BufferKey]] = defaultdict(list)
    taken: dict[int, BufferKey] = {}
    emptied: dict[BufferKey, int] = {}
    after: dict[int, int] = {}
    for at, task in enumerate(tasks):
        if task.kind in RECEIVES:
            kind = task.kind, task.stage
            if not free[kind]:
                free[kind].append(made[kind])
                made[kind] += 1
            taken[at] = key = (*kind, free[kind].pop())
            held[last[task.stage, task.microbatch]].append(key)
            if key in emptied:
                after[at] = emptied[key]
        for key in held.pop(at, ()):
            free[key[:2]].append(key[2])
            emptied[key] = at
    return taken, after


def _computes(task: Task) -> list[tuple[int, int]]:
    """The stages and microbatches that a task computes for."""
    if task.kind not in COMPUTE:
        return []
    return [(task.stage, task.microbatch), *([] if task.backward is None else [task.backward])]


@dataclass(frozen=True, slots=True)
class RecvBuffer:
    """The tensors of a room, good until the next one takes it."""

    metas: list[TensorMeta]
    tensors: list[Tensor]
    raws: list[Tensor]
    """Those of them that hold anything, as they are moved."""
    storages: frozenset[int]

    def own(self, tree: Tree) -> Tree:
        """The same; what of it lies in the room, copied."""
        return tree.copied(self.holds)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages


class RecvBuffers:
    """All rooms of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[BufferKey, RecvBuffer] = {}

    def take(self, key: BufferKey, what: Description) -> RecvBuffer:
        """The room, made anew if what is to come does not fit it."""
        metas, buffer = what.metas, self._made.get(key)
        if buffer is None or buffer.metas != metas:
            tensors = what.empty(self._device)
            raws = [moved_as(tensor) for tensor in tensors if tensor.numel()]
            storages = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors) - {0}
            self._made[key] = buffer = RecvBuffer(metas, tensors, raws, storages)
        return buffer
