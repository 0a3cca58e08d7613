"""Runs a program in this process with plain functions: all devices, a thread for each lane."""

import threading
import time
from collections.abc import Callable
from inspect import iscoroutine, isgenerator

import numpy as np

from stretto.check import validate_sound
from stretto.execute.executor import Executor, HostLanes
from stretto.execute.host_lanes import Awaited, HostLane
from stretto.ir.errors import ProgramError, named
from stretto.ir.plan import Plan
from stretto.program.lower import lowered
from stretto.program.program import Program
from stretto.program.task import Task
from stretto.timeline import Timeline

_POLL = 0.1


def execute(program: Plan | Program, bind: Callable[[Task], Callable[[], object]]) -> Timeline:
    """Run every task of a program, and return when each began and ended: the twin of `simulate`.

    `bind` returns the function of a task; it is called for all tasks before anything runs. A lane runs its tasks in
    order, each once its needs have ended. Where several devices act together, their tasks begin when all are ready.

    `execute` runs only programs that `check` has proved sound. If a function raises, no further task begins, and the
    error names the task; functions already running on other lanes run to their end in the background.

    >>> from stretto import Call, program_of
    >>> said = []
    >>> program = program_of([Call("read", lane="disk"), Call("work", needs=["read"])])
    >>> timeline = execute(program, lambda task: lambda: said.append(str(task)))
    >>> said, timeline.makespan < 5
    (['read', 'work'], True)
    """
    program = lowered(program)
    validate_sound(program)
    if not callable(bind):
        raise ProgramError(f"bind is a function of a task that gives the function to run (got {bind!r:.60})")
    run = _Run(program)
    for at, task in enumerate(program.tasks()):
        try:
            function = bind(task)
        except Exception as error:
            raise ProgramError(f"bind failed for {task} on device {task.device}: {named(error)}") from error
        if not callable(function):
            raise ProgramError(f"bind gives no function for {task} on device {task.device} (got {function!r:.60})")
        run.acts[task] = run.act(at, task, function)
    executor = Executor(program, run, everywhere=True)
    lanes = {lane: HostLane(f"device {lane.device} {lane}") for lane in program.lanes}
    try:
        executor.bind(HostLanes(executor, lanes), run.acts.__getitem__)
        executor.run()
    except BaseException:
        if run.failure is None:
            raise
        task, failure = run.failure
        raise ProgramError(f"{task} on device {task.device} failed: {named(failure)}") from failure
    finally:
        run.stop()
        run.acts.clear()
        executor.forget()
        for thread in lanes.values():
            thread.close()
    for thread in lanes.values():
        thread.join(_POLL)
    begin = run.start.min()
    return Timeline(program, run.start - begin, run.end - begin)


class _StoppedError(Exception):
    """Another task has failed, or the caller was interrupted."""


class _Run:
    """One run: when tasks began and ended, and the first failure."""

    rank = 0

    def __init__(self, program: Program) -> None:
        self.task: Callable[[], str] = lambda: ""
        self.acts: dict[Task, Callable[[], None]] = {}
        self.start, self.end = np.zeros(len(program)), np.zeros(len(program))
        self.failure: tuple[Task, BaseException] | None = None
        self._is_stopped, self._lock = False, threading.Lock()
        self._barriers: dict[int, threading.Barrier] = {}  # of tasks that several devices do together
        for at in np.flatnonzero(program.counterpart >= 0).tolist():
            ends = program.ends(at)
            if at == min(ends):
                self._barriers.update(dict.fromkeys(ends, threading.Barrier(len(ends))))

    def act(self, at: int, task: Task, function: Callable[[], object]) -> Callable[[], None]:
        """Return a function that runs a task once all its ends are ready, and times it."""
        barrier = self._barriers.get(at)

        def act() -> None:
            self.check()
            if barrier is not None:
                try:
                    barrier.wait()
                except threading.BrokenBarrierError:
                    raise _StoppedError from None
            self.start[at] = time.perf_counter()
            try:
                result = function()
                if iscoroutine(result) or isgenerator(result):
                    result.close()
                    raise TypeError(f"it gave a {type(result).__name__}, which nobody runs; give a plain function")
            except BaseException as error:
                with self._lock:
                    self.failure = self.failure or (task, error)
                self.stop()
                raise
            self.end[at] = time.perf_counter()

        return act

    def stop(self) -> None:
        """Begin no further task."""
        self._is_stopped = True
        for barrier in self._barriers.values():
            barrier.abort()

    def check(self) -> None:
        if self._is_stopped:
            raise _StoppedError

    def wait(self, future: Awaited, what: Callable[[], str]) -> None:  # noqa: ARG002
        """Wait until a task has ended; the caller can be interrupted meanwhile."""
        while not future.wait(_POLL):
            self.check()
        if future.error is not None:
            raise future.error
