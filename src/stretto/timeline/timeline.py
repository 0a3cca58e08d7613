"""Timelines and their metrics."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from stretto.costs import Costs, Unit, costs_or_default
from stretto.ir.errors import StrettoError
from stretto.program.columns import grouped, queue_edges
from stretto.program.program import Program
from stretto.program.task import COPIES, Task
from stretto.timeline import idle
from stretto.timeline.allocated import AllocatedMemory, allocated_over_time
from stretto.timeline.hiding import Communication, communication
from stretto.timeline.memory import DeviceMemory, Floats, memory_over_time

_LARGEST = 1e150  # so that no sum or product of two times overflows


@dataclass(frozen=True, slots=True)
class Span:
    """A task with its start and end."""

    task: Task
    start: float
    end: float


class DeviceSummary(msgspec.Struct, frozen=True):
    """A device's part of a step, in the timeline's unit of time, and the most that it held at any time."""

    busy: float
    """Time spent computing."""
    span: float
    """From the first compute task's start to the last one's end."""
    bubble: float
    """The step's time minus `busy`; `span - busy` leaves out the staggered start and end."""
    exposed_transfer: float
    """Idle time during which a transfer that the next compute task needs was under way."""
    exposed_comm: float
    """The same for expert dispatch and combine, and for the host's wait for their sizes."""
    comm: float
    """Time in which expert dispatch or combine was under way, or the counts that precede them."""
    hidden_comm: float
    """The part of `comm` in which the device computed. (`exposed_comm` is only what compute waited for.)"""
    exposed_copy: float
    """Idle time during which a copy to or from host memory that the next compute task needs was under way."""
    host_late: float
    """Idle time in which the next compute task, or a task that it needs directly, could have run if its host had
    issued it; 0 if issue times were not recorded.
    """
    peak_activations: int
    peak_pending: int
    peak_live: int
    peak_bytes: float | None
    """By the costs; None if they name no bytes."""
    peak_allocated: float | None
    """The most bytes measured after any task; None if they were not recorded."""


class Summary(msgspec.Struct, frozen=True):
    makespan: float
    bubble_ratio: float
    """The sum of the devices' bubbles, divided by the makespan times the number of devices."""
    devices: tuple[DeviceSummary, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The start and end of every task of a program, by task index."""

    program: Program
    start: Floats
    end: Floats
    unit: Unit = "s"
    """Measured times are seconds; simulated times are in the unit of the costs."""
    issued: Floats | None = None
    """When the host issued each task, if that was recorded."""
    allocated: Floats | None = None
    """The bytes allocated on each task's device when the host had issued the task, if that was recorded."""

    def __post_init__(self) -> None:
        _validate_column("start time", self.start, self.program)
        _validate_column("end time", self.end, self.program)
        if self.issued is not None:
            _validate_column("issue time", self.issued, self.program)
        if self.allocated is not None:
            _validate_column("allocated size", self.allocated, self.program, least=0, number="number of bytes")
        if self.unit not in ("s", None):
            raise StrettoError(f'the unit of a timeline is "s", or None if it has no name (got {self.unit!r:.40})')
        if (self.end < self.start).any():
            raise StrettoError("a task ends before it starts")

    def spans(self) -> Iterator[Span]:
        for task, start, end in zip(self.program.tasks(), self.start.tolist(), self.end.tolist(), strict=True):
            yield Span(task, start, end)

    def save(self, path: str | Path, *, costs: Costs | None = None, lanes: bool = False, memory: bool = False) -> None:
        """Write a figure (.svg, .png), or a trace for Perfetto (.trace.json) that `load_timeline` reads back.

        A figure has a row for each device or, with `lanes`, for each kind of lane of each device. With `memory`, curves
        under the rows of each device show its bytes: allocated, if that was recorded, and held, if the costs name any.
        A trace always has both.
        """
        from stretto.timeline.files import save_timeline  # here, because it imports this module

        save_timeline(self, path, costs=costs, lanes=lanes, memory=memory)

    @property
    def makespan(self) -> float:
        return float(self.end.max() - self.start.min())

    def memory(self, costs: Costs | None = None) -> list[DeviceMemory]:
        """Return what each device holds over time."""
        return memory_over_time(self.program, costs_or_default(costs), self.start, self.end)

    def allocated_memory(self) -> list[AllocatedMemory] | None:
        """Return what was allocated on each device over time; None if that was not recorded."""
        if self.allocated is None:
            return None
        return allocated_over_time(self.program, self.end, self.allocated)

    def summary(self, costs: Costs | None = None) -> Summary:
        """Return times, bubbles and peak memory per device; for `peak_bytes`, pass costs with bytes."""
        program, makespan = self.program, self.makespan
        if program.is_update:
            raise StrettoError(
                "a weight update computes nothing, so it has no bubbles; its report has each step's time"
            )
        task = np.flatnonzero(program.compute)
        if not len(task):
            raise StrettoError("no lane is called compute, so there are no bubbles to sum up")
        order, bounds = grouped(program.device[task], program.devices)
        task = task[order]
        transfer, comm, copy = (
            idle.exposed(program, self.start, self.end, awaited).total(len(program))[task]
            for awaited in (program.moving, program.exchange, program.work.among(COPIES))
        )
        late = self.late_gaps().total(len(program))[task]
        memory, allocated, exchanges = self.memory(costs), self.allocated_memory(), self.communication()
        devices = []
        for device, (a, b) in enumerate(pairwise(bounds.tolist())):
            start, end = self.start[task[a:b]], self.end[task[a:b]]
            busy = float((end - start).sum())
            devices.append(
                DeviceSummary(
                    busy=busy,
                    span=float(end.max() - start.min()) if b > a else 0.0,
                    bubble=makespan - busy,
                    exposed_transfer=float(transfer[a:b].sum()),
                    exposed_comm=float(comm[a:b].sum()),
                    comm=exchanges[device].total,
                    hidden_comm=exchanges[device].hidden,
                    exposed_copy=float(copy[a:b].sum()),
                    host_late=float(late[a:b].sum()),
                    peak_activations=memory[device].peak_activations,
                    peak_pending=memory[device].peak_pending,
                    peak_live=memory[device].peak_live,
                    peak_bytes=memory[device].peak_bytes,
                    peak_allocated=None if allocated is None else allocated[device].peak_bytes,
                )
            )
        total = makespan * len(devices)
        ratio = sum(device.bubble for device in devices) / total if total else 0.0
        return Summary(makespan, ratio, tuple(devices))

    def communication(self, *, steady: bool = False) -> list[Communication]:
        """Return how long each device's expert communication takes, and how much of it hides behind compute.

        If `steady`, only from the start of the device's first backward to the end of its last forward: before and
        after, there is no other pass to hide it. Without such a time, as in GPipe, the total is 0.

        >>> from stretto import Costs, lower, simulate
        >>> from stretto.costs import PhaseTimes
        >>> from stretto.layers import MOE
        >>> from stretto.schedules import interleaved
        >>> costs = Costs(phases={name: PhaseTimes(1, 1, 1) for name in ("attn", "dispatch", "mlp", "combine")})
        >>> for overlap in (False, True):
        ...     plan = interleaved(devices=2, microbatches=8, overlap=overlap)
        ...     timeline = simulate(lower(plan, layers=[[MOE]] * 4, costs=costs), costs)
        ...     print([f"{device.share:.0%}" for device in timeline.communication(steady=True)])
        ['0%', '0%']
        ['98%', '98%']
        """
        return communication(self.program, self.start, self.end, steady=steady)

    def host_late(self) -> Floats:
        """Return, for each task in the order of `spans`, how long its lane stood idle only because the host had not
        issued it yet: the lane was free, and all tasks that it needs had ended. Tasks that devices run together can
        start once all of them can.
        """
        if self.issued is None:
            return np.zeros(len(self.program))
        ready = idle.ready(self.program, self.start, self.end)
        return np.maximum(0.0, np.minimum(self.start, self.issued) - ready)

    def late_gaps(self) -> idle.Gaps:
        """Find where compute lanes stood idle because a host had not issued their next task, or one that it needs."""
        if self.issued is None:
            return idle.Gaps.none()
        return idle.late(self.program, self.start, self.end, self.issued)

    def critical_path(self) -> list[Span]:
        """Return the chain of tasks that set the makespan, first to last; a transfer appears as its receiving end."""
        program = self.program
        previous = np.full(len(program), -1, dtype=np.int64)
        before, after = queue_edges(program.lane)
        previous[after] = before
        first, current = float(self.start.min()), int(self.end.argmax())
        path = [current]
        while self.start.item(current) > first and len(path) <= len(program):  # measured times may form a cycle
            waited = [task for end in program.ends(current) for task in (*program.needs(end), previous.item(end))]
            if max(waited) < 0:
                break
            current = max((task for task in waited if task >= 0), key=self.end.item)
            path.append(current)
        return [Span(program.task(task), self.start.item(task), self.end.item(task)) for task in reversed(path)]


def _validate_column(
    name: str,
    column: Floats,
    program: Program,
    *,
    least: float = -_LARGEST,
    number: str = "number that a clock could show",
) -> None:
    if type(column) is not np.ndarray or column.dtype.kind not in "iuf":
        raise StrettoError(f"the {name}s of a timeline are an array of numbers (got {column!r:.60})")
    if column.shape != (len(program),):
        raise StrettoError(f"a timeline has one {name} for each of its {len(program)} tasks")
    if not ((least <= column) & (column <= _LARGEST)).all():
        raise StrettoError(f"the {name} of a task is not a {number}")
