"""Runs a program: issues its tasks in order, on lanes that are host threads or device streams."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from stretto.execute.host_lanes import Awaited, HostLane, LaneFuture, Work
from stretto.program.program import Program
from stretto.program.task import Lane, Task

if TYPE_CHECKING:
    from stretto.execute.recorder import Recorder  # needs PyTorch

Act = Callable[[], Work | None]
"""The function of a task. The task has ended when it returns None, or when the work that it returns has ended."""
Issue = Callable[[], object]


class Watch(Protocol):
    """Knows whether the run can go on: a supervisor of several ranks, or the run itself."""

    task: Callable[[], str]
    """Returns the task being issued, in words."""

    @property
    def rank(self) -> int: ...

    def check(self) -> None:
        """Raise if the run cannot go on."""

    def wait(self, future: Awaited, what: Callable[[], str]) -> None:
        """Wait for started work; raise if it fails, or if the run cannot go on."""


class Lanes(Protocol):
    """All lanes of a device, as host threads or as streams."""

    @property
    def spans(self) -> Mapping[int, tuple[float, float]]:
        """When tasks in other threads than the caller's began and ended, by the host's clock."""

    def compile(self, at: int, act: Act, recorder: "Recorder | None" = None) -> Issue:
        """Return a function that issues this task; the caller issues the device's tasks one after the other."""

    def begin(self) -> None:
        """Prepare to issue the first task."""

    def end(self, ended: Callable[[int], None]) -> None:
        """Wait, after the last task was issued, for tasks that must have ended; call `ended` for each task in order."""

    def clear(self) -> None:
        """Release everything that was held."""


class Executor:
    """Runs one device's part of a program, or all of it.

    A task waits only for the needs that the program states: the twin of `simulate`.
    """

    def __init__(self, program: Program, supervisor: Watch, *, everywhere: bool = False) -> None:
        """Run the device of the supervisor's rank; with `everywhere`, run all devices."""
        self.supervisor = supervisor
        tasks = {
            place: task for place, task in enumerate(program.tasks()) if everywhere or task.device == supervisor.rank
        }
        self.tasks = list(tasks.values())
        index = {place: at for at, place in enumerate(tasks)}
        self.needs = [[index[need] for need in program.needs(place) if need in index] for place in tasks]
        """The needs of each task, by index; the results of other devices come by transfers."""
        self._current = _CurrentTask(self.tasks)

    def bind(self, lanes: Lanes, bind: Callable[[Task], Act]) -> None:
        """Set the lanes, and the function of each task."""
        self._lanes = lanes
        self._acts = [bind(task) for task in self.tasks]
        self._issues = [lanes.compile(at, act) for at, act in enumerate(self._acts)]

    def run(self, recorder: "Recorder | None" = None, ended: Callable[[Task], None] = lambda _: None) -> None:
        """Run all tasks; raise the error of a task that fails, or of a wait that ends early."""
        current = self.supervisor.task = self._current
        issues = self._issues
        if recorder is not None:
            issues = [recorder.issuing(at, self._lanes.compile(at, act, recorder)) for at, act in enumerate(self._acts)]
        try:
            self._lanes.begin()
            for at, issue in enumerate(issues):
                current.at = at
                issue()
            self.supervisor.task = lambda: "the end"
            self._lanes.end(lambda at: ended(self.tasks[at]))
            if recorder is not None:
                recorder.take(self._lanes.spans)
        finally:
            self._lanes.clear()

    def forget(self) -> None:
        """Release the tasks' functions, which may refer to the owner of this executor."""
        self._acts, self._issues = [], []


class _CurrentTask:
    """The task being issued. A supervisor holds it after a failure, so it must refer to nothing else."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks, self.at = tasks, 0

    def __call__(self) -> str:
        return str(self._tasks[self.at])


class HostLanes:
    """Lanes on the host. The caller's thread runs the tasks of lanes without a thread.

    With `begins`, it also begins the tasks of the other lanes while nothing holds them up; the lanes' threads then only
    wait for that work.
    """

    def __init__(self, executor: Executor, lanes: Mapping[Lane, HostLane], *, begins: bool = False) -> None:
        """`lanes` are the threads of the lanes that have one."""
        self._supervisor, self._begins = executor.supervisor, begins
        self._tasks = executor.tasks
        self._lanes = [lanes.get(task.lane) for task in executor.tasks]
        self._needs = [
            [need for need in needs if self._lanes[need] is not None and self._lanes[need] is not self._lanes[at]]
            for at, needs in enumerate(executor.needs)
        ]
        self._futures: list[LaneFuture | None] = [None] * len(self._tasks)
        self._last_run: dict[int, LaneFuture] = {}  # by lane, the last task that its thread was given to run
        self.spans: dict[int, tuple[float, float]] = {}

    def compile(self, at: int, act: Act, recorder: "Recorder | None" = None) -> Issue:
        lane, needs, futures = self._lanes[at], self._needs[at], self._futures
        if recorder is not None:
            act = recorder.timing(at, act)
        if lane is None:

            def run() -> None:
                for need in needs:
                    self._await(need)
                if (work := act()) is not None:
                    work.wait()

            return run
        check = self._supervisor.check

        def issue() -> None:
            waits = [
                future
                for need in needs
                if (future := futures[need]) is not None and not (future.done and future.error is None)
            ]
            last = self._last_run.get(id(lane))
            if not self._begins or waits or (last is not None and not last.done):
                futures[at] = self._last_run[id(lane)] = lane.run(act, waits, check)
                return
            begin = time.perf_counter()
            work = act()
            if work is not None:
                futures[at] = future = lane.follow(work)
                future.begin = begin

        return issue

    def _await(self, at: int) -> None:
        """Wait for a task of another thread."""
        future = self._futures[at]
        if future is not None and not (future.done and future.error is None):
            self._supervisor.wait(future, lambda: self._tasks[at].awaited)

    def begin(self) -> None:
        self.spans = {}

    def end(self, ended: Callable[[int], None]) -> None:
        for at in range(len(self._tasks)):
            self._await(at)
            ended(at)
        self.spans = {at: (future.begin, future.end) for at, future in enumerate(self._futures) if future is not None}

    def clear(self) -> None:
        self._futures[:] = [None] * len(self._futures)
        self._last_run.clear()
