"""Where what arrives is put: rooms that are made once, and taken in turns by the program's own order."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.program.task import RECEIVES, Kind, Task
from stretto.runtime.structure import Value, leaves_of, rebuilt, tensors_of

Room = tuple[Kind, int, int]
"""A kind of receive, a stage and a number."""


def share_rooms(tasks: Sequence[Task]) -> tuple[dict[int, Room], dict[int, int]]:
    """For each task of a rank that receives, by its place: the room that it fills, and the last task before it that
    needed what was there.

    What arrives for a microbatch is needed until its stage has done all for it: the forward's input and the output's
    gradient both, since weight gradients are made of them. Then the next one may take the room.
    """
    last = {(stage, microbatch): at for at, task in enumerate(tasks) for stage, microbatch in _computes(task)}
    free: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    made: dict[tuple[Kind, int], int] = defaultdict(int)
    held: dict[int, list[Room]] = defaultdict(list)
    taken: dict[int, Room] = {}
    emptied: dict[Room, int] = {}
    after: dict[int, int] = {}
    for at, task in enumerate(tasks):
        if task.kind in RECEIVES:
            of = (task.kind, task.stage)
            if not free[of]:
                free[of].append(made[of])
                made[of] += 1
            taken[at] = room = (*of, free[of].pop())
            held[last[task.stage, task.microbatch]].append(room)
            if room in emptied:
                after[at] = emptied[room]
        for room in held.pop(at, ()):
            free[room[:2]].append(room[2])
            emptied[room] = at
    return taken, after


def _computes(task: Task) -> list[tuple[int, int]]:
    """The stages and microbatches that a task computes for."""
    if task.lane.peer is not None:
        return []
    return [(task.stage, task.microbatch), *([] if task.backward is None else [task.backward])]


@dataclass(frozen=True, slots=True)
class Lent:
    """What a room holds, good until the next one takes the room."""

    value: Value
    tensors: list[Tensor]
    storages: frozenset[int]

    @staticmethod
    def of(value: Value) -> "Lent":
        tensors = tensors_of(value)
        return Lent(value, tensors, frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors) - {0})

    def own(self, value: Value) -> Value:
        """The same value; what of it lies in the room, copied."""
        if isinstance(value, Tensor):
            return value.clone() if self.holds(value) else value
        leaves = leaves_of(value)
        if any(isinstance(leaf, Tensor) and self.holds(leaf) for leaf in leaves):
            return rebuilt(value, [self.own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        return value

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages


class Rooms:
    """All rooms of a rank."""

    def __init__(self) -> None:
        self._made: dict[Room, Lent] = {}

    def take(self, room: Room | None, make: Callable[[], Value]) -> Lent:
        """What this room holds; None is a room for once."""
        if room is None:
            return Lent.of(make())
        lent = self._made.get(room)
        if lent is None:
            self._made[room] = lent = Lent.of(make())
        return lent
