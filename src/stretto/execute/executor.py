"""Runs a program: every task a callable, in issue order, on lanes that are threads of the host or streams of a device.

What a task waits for is what the program says it needs, and nothing else: the twin of `simulate`.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from stretto.execute.host_lanes import Awaited, HostLane, Ticket, Work
from stretto.program.program import Program
from stretto.program.task import Lane, Task

if TYPE_CHECKING:
    from stretto.execute.recorder import Recorder  # which needs PyTorch

Act = Callable[[], Work | None]
"""What a task does. It has ended when it returns; or, if it returns what it has started, when that has."""
Issue = Callable[[], object]


class Watch(Protocol):
    """Who knows whether there is still reason to go on: a supervisor of several ranks, or the run itself."""

    task: Callable[[], str]
    """What is being issued, in words."""

    @property
    def rank(self) -> int: ...

    def check(self) -> None:
        """Raise if there is none."""

    def wait(self, ticket: Awaited, what: Callable[[], str]) -> None:
        """Wait for something that was started; raise if it fails, or if there is no reason to go on."""


class Lanes(Protocol):
    """A device's lanes, of one kind."""

    @property
    def spans(self) -> Mapping[int, tuple[float, float]]:
        """When tasks that ended in other threads than the caller's began and ended, by the host's clock."""

    def compile(self, at: int, act: Act, recorder: "Recorder | None" = None) -> Issue:
        """A function that issues this task: the tasks of the device are issued one after the other."""

    def begin(self) -> None:
        """Nothing was issued yet."""

    def end(self, ended: Callable[[int], None]) -> None:
        """All was issued: wait for what must have ended, and tell of each task in turn."""

    def clear(self) -> None:
        """Let go of all that was held."""


class Executor:
    """One device's part of a program, or all of it."""

    def __init__(self, program: Program, supervisor: Watch, *, everywhere: bool = False) -> None:
        """The device is that of the supervisor's rank; `everywhere`, all devices are run here."""
        self.supervisor = supervisor
        tasks = {
            place: task for place, task in enumerate(program.tasks()) if everywhere or task.device == supervisor.rank
        }
        self.tasks = list(tasks.values())
        here = {place: at for at, place in enumerate(tasks)}
        self.needs = [[here[need] for need in program.needs(place) if need in here] for place in tasks]
        """What each of them needs, by number; what other devices do comes by transfers."""
        self._doing = _Doing(self.tasks)

    def bind(self, lanes: Lanes, bind: Callable[[Task], Act]) -> None:
        """How tasks are run: on these lanes, and what each one is."""
        self._lanes = lanes
        self._acts = [bind(task) for task in self.tasks]
        self._issues = [lanes.compile(at, act) for at, act in enumerate(self._acts)]

    def run(self, recorder: "Recorder | None" = None, ended: Callable[[Task], None] = lambda _: None) -> None:
        """All tasks. What one of them raises, or what ends a wait, is raised here."""
        doing = self.supervisor.task = self._doing
        issues = self._issues
        if recorder is not None:
            issues = [recorder.issuing(at, self._lanes.compile(at, act, recorder)) for at, act in enumerate(self._acts)]
        try:
            self._lanes.begin()
            for at, issue in enumerate(issues):
                doing.at = at
                issue()
            self.supervisor.task = lambda: "the end"
            self._lanes.end(lambda at: ended(self.tasks[at]))
            if recorder is not None:
                recorder.take(self._lanes.spans)
        finally:
            self._lanes.clear()

    def forget(self) -> None:
        """Let go of what tasks are, which may hold whoever has this."""
        self._acts, self._issues = [], []


class _Doing:
    """What is being issued, for a supervisor, which lives on after a failure and must hold nothing else."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks, self.at = tasks, 0

    def __call__(self) -> str:
        return str(self._tasks[self.at])


class HostLanes:
    """Threads of the host. The caller's own runs the tasks of some lanes; if it also begins those of the others, they
    only wait for what it has begun, as long as nothing is in the way.
    """

    def __init__(self, executor: Executor, lanes: Mapping[Lane, HostLane], *, begins: bool = False) -> None:
        """`lanes` are the threads of lanes that have one; the caller's thread runs all others."""
        self._supervisor, self._begins = executor.supervisor, begins
        self._tasks = executor.tasks
        self._lanes = [lanes.get(task.lane) for task in executor.tasks]
        self._needs = [
            [need for need in needs if self._lanes[need] is not None and self._lanes[need] is not self._lanes[at]]
            for at, needs in enumerate(executor.needs)
        ]
        self._tickets: list[Ticket | None] = [None] * len(self._tasks)
        self._late: dict[int, Ticket] = {}  # by lane, what its thread was told to do last
        self.spans: dict[int, tuple[float, float]] = {}

    def compile(self, at: int, act: Act, recorder: "Recorder | None" = None) -> Issue:
        lane, needs, tickets = self._lanes[at], self._needs[at], self._tickets
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
            waits = [it for need in needs if (it := tickets[need]) is not None and not (it.done and it.error is None)]
            late = self._late.get(id(lane))
            if not self._begins or waits or (late is not None and not late.done):
                tickets[at] = self._late[id(lane)] = lane.run(act, waits, check)
                return
            begun = time.perf_counter()
            work = act()
            if work is not None:
                tickets[at] = ticket = lane.follow(work)
                ticket.begin = begun

        return issue

    def _await(self, at: int) -> None:
        """Wait for a task of another thread."""
        ticket = self._tickets[at]
        if ticket is not None and not (ticket.done and ticket.error is None):
            self._supervisor.wait(ticket, lambda: self._tasks[at].awaited)

    def begin(self) -> None:
        self.spans = {}

    def end(self, ended: Callable[[int], None]) -> None:
        for at in range(len(self._tasks)):
            self._await(at)
            ended(at)
        self.spans = {at: (it.begin, it.end) for at, it in enumerate(self._tickets) if it is not None}

    def clear(self) -> None:
        self._tickets[:] = [None] * len(self._tickets)
        self._late.clear()
