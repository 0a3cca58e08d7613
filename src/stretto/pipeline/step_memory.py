"""Predicts how much memory the passes of a step take on a rank, task by task in the order in which it issues them."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from stretto.program.anatomy import Anatomy
from stretto.program.task import WEIGHTS, Kind, Task


class PartMemory(NamedTuple):
    """The bytes of one part of a stage's pass: of a phase, or of the whole stage."""

    saved: int
    """What it saves and no part before it. Its backward frees it."""
    leaves: int
    """How much of that is offloaded."""
    backward: int
    """The most that its backward holds at a time beside that: what is recomputed, and what weight gradients need. What
    it is done with is freed as it goes on."""
    pending: int
    """What is held from its backward to its weight gradients."""
    inputs: int
    """The gradients of its inputs."""
    handed: int
    """What it hands to the next part, or to the next stage, and has not saved: held until that has run, which may save
    it."""
    passed: int
    """How much of that was handed to it."""
    loss: int
    """The gradient of the loss function's input, if this part ends with the loss."""


class StepMemory:
    """Goes through a rank's tasks. Memory is taken and freed as lanes of a device do: when a task is issued.

    That follows a device closely (see docs/design/pipeline.md), and bounds what is held where lanes are threads of the
    host.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        needs: Sequence[Sequence[int]],
        anatomy: Anatomy,
        parts: Sequence[Sequence[PartMemory]],
        *,
        joins: Collection[Task] = (),
        kept_until: Sequence[int] | None = None,
    ) -> None:
        """`parts` are those of each stage, `joins` the weight gradients that are computed with the next ones.
        `kept_until` says, where lanes share memory, how long each task keeps what is another lane's.
        """
        self._tasks, self._anatomy, self._parts = tasks, anatomy, parts
        self._joins, self._kept_until = joins, kept_until
        self._leaving = [sum(part.leaves for part in of_stage) for of_stage in parts]
        self._offloaded = {(task.stage, task.microbatch) for task in tasks if task.kind is Kind.OFFLOAD}
        self._has_forward = {(task.stage, task.microbatch) for task in tasks if task.kind in (Kind.F, Kind.PAIR)}
        self._has_backward = {_backward(task)[:2] for task in tasks if task.kind in (Kind.B, Kind.I, Kind.PAIR)}
        self._frees: dict[int, int] = defaultdict(int)  # what is freed when the task with this index is issued
        self._find_leaving(needs)
        self._now = self._peak = 0
        self._handed: dict[tuple[int, int], int] = {}  # what each pass's next forward starts from
        self._flowing: dict[tuple[int, int], int] = {}  # the gradients that each pass's next backward starts from
        self._entered: dict[tuple[int, int, int], int] = {}  # what came to each part from other lanes
        self._waiting: dict[tuple[int, int], int] = defaultdict(int)  # weight gradients that wait for the next ones

    def _find_leaving(self, needs: Sequence[Sequence[int]]) -> None:
        """Note when what has left is freed: when the first task is issued that waits for it."""
        found: set[int] = set()
        for at, needed in enumerate(needs):
            for need in needed:
                if self._tasks[need].kind is Kind.OFFLOAD and need not in found:
                    found.add(need)
                    self._frees[at] += self._leaving[self._tasks[need].stage]

    def peak(self) -> int:
        """Return the most bytes that are held at a time."""
        for at, task in enumerate(self._tasks):
            self._take(-self._frees.pop(at, 0))
            if task.kind in (Kind.F, Kind.PAIR):
                self._run_forward(at, task.stage, task.microbatch, task.part)
            if task.kind in (Kind.B, Kind.I, Kind.PAIR):
                self._run_backward(at, *_backward(task))
            elif task.kind in WEIGHTS:
                self._run_weight(at, task)
            elif task.kind is Kind.ONLOAD:
                self._take(self._leaving[task.stage])
        return self._peak

    def _take(self, nbytes: int) -> None:
        self._now += nbytes
        self._peak = max(self._peak, self._now)

    def _free(self, nbytes: int, *, shared: int, at: int) -> None:
        """Free memory, of which some is other lanes' and stays until they have waited for this task."""
        shared = 0 if self._kept_until is None else min(shared, nbytes)
        self._now -= nbytes - shared
        if shared:
            assert self._kept_until is not None
            self._frees[self._kept_until[at]] += shared

    def _run_forward(self, at: int, stage: int, microbatch: int, number: int) -> None:
        parts, came = self._parts[stage], self._handed.pop((stage if number else stage - 1, microbatch), 0)
        handed, passed = parts[number].handed, min(came, parts[number].passed)
        if number == len(parts) - 1 and (stage + 1, microbatch) not in self._has_forward:
            handed = passed = 0  # it is sent, or no one's
        self._take(parts[number].saved + handed - passed)
        came -= passed
        self._handed[stage, microbatch] = handed
        self._free(came, shared=came if self._lane(stage, number - 1) != self._lane(stage, number) else 0, at=at)

    def _run_backward(self, at: int, stage: int, microbatch: int, step: int) -> None:
        number = self._anatomy.forward_steps[stage][step]
        part, lane = self._parts[stage][number], self._lane(stage, number)
        came = self._flowing.pop((stage, microbatch), 0)
        self._take(part.inputs + max(part.backward, part.loss))
        self._now += part.pending - max(part.backward, part.loss)
        others = came if self._lane(stage, number + 1) != lane else 0
        if self._lane(stage, number - 1) != lane and (stage, microbatch) not in self._offloaded:
            others += part.inputs  # they are as large as their gradients
        if part.pending:
            self._entered[stage, microbatch, number] = others
            others = 0
        self._free(came + part.saved, shared=others if lane == "compute" else part.saved, at=at)
        if number or (stage - 1, microbatch) in self._has_backward:
            self._flowing[stage if number else stage - 1, microbatch] = part.inputs
        else:
            self._now -= part.inputs
        self._take(0)

    def _run_weight(self, at: int, task: Task) -> None:
        number = self._anatomy.forward_steps[task.stage][self._anatomy.weight_steps[task.stage][task.part]]
        pending, key = self._parts[task.stage][number].pending, (task.stage, task.part)
        shared = self._entered.pop((task.stage, task.microbatch, number), 0)
        if task in self._joins:
            self._waiting[key] += pending
        else:
            self._free(pending + self._waiting.pop(key, 0), shared=shared, at=at)

    def _lane(self, stage: int, number: int) -> str:
        """Return the lane of a part; beyond the ends of a stage, compute."""
        parts = self._anatomy.forward[stage]
        return parts[number].phase.lane if 0 <= number < len(parts) else "compute"


def _backward(task: Task) -> tuple[int, int, int]:
    """Return the stage, the microbatch and the part of a task's backward."""
    if task.kind is Kind.PAIR:
        assert task.backward is not None
        return (*task.backward, 0)
    return task.stage, task.microbatch, task.part
