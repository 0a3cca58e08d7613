"""A program run in this process, with plain functions: all devices, a thread for each lane."""

import threading
import time
from collections.abc import Callable
from inspect import iscoroutine, isgenerator

import numpy as np

from stretto.check import demand_sound
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
    """Run every task of a program, and say when each began and ended: the twin of `simulate`.

    `bind` gives the function that a task is; it is asked for all of them before anything runs. A lane runs its tasks in
    order, each once what it needs has ended. The ends of what several devices do together begin when all of them can.

    Nothing is run that `check` has not proved sound. If a function raises, what has not begun is not begun any more,
    and the error says which task it was; functions that are under way on other lanes run to their end in the
    background.

    >>> from stretto import Call, program_of
    >>> said = []
    >>> program = program_of([Call("read", lane="disk"), Call("work", needs=["read"])])
    >>> timeline = execute(program, lambda task: lambda: said.append(str(task)))
    >>> said, timeline.makespan < 5
    (['read', 'work'], True)
    """
    program = lowered(program)
    demand_sound(program)
    if not callable(bind):
        raise ProgramError(f"bind is a function of a task that gives the function to run (got {bind!r:.60})")
    run = _Run(program)
    for at, task in enumerate(program.tasks()):
        try:
            function = bind(task)
        except Exception as wrong:
            raise ProgramError(f"bind failed for {task} on device {task.device}: {named(wrong)}") from wrong
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
        task, error = run.failure
        raise ProgramError(f"{task} on device {task.device} failed: {named(error)}") from error
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
    """Something else has failed, or the caller has given up."""


class _Run:
    """One run: when tasks began and ended, and what went wrong first."""

    rank = 0

    def __init__(self, program: Program) -> None:
        self.task: Callable[[], str] = lambda: ""
        self.acts: dict[Task, Callable[[], None]] = {}
        self.start, self.end = np.zeros(len(program)), np.zeros(len(program))
        self.failure: tuple[Task, BaseException] | None = None
        self._is_stopped, self._lock = False, threading.Lock()
        self._meetings: dict[int, threading.Barrier] = {}
        for at in np.flatnonzero(program.counterpart >= 0).tolist():
            ends = program.ends(at)
            if at == min(ends):
                self._meetings.update(dict.fromkeys(ends, threading.Barrier(len(ends))))

    def act(self, at: int, task: Task, function: Callable[[], object]) -> Callable[[], None]:
        """A task, timed, once all its ends are ready."""
        rendezvous = self._meetings.get(at)

        def act() -> None:
            self.check()
            if rendezvous is not None:
                try:
                    rendezvous.wait()
                except threading.BrokenBarrierError:
                    raise _StoppedError from None
            self.start[at] = time.perf_counter()
            try:
                found = function()
                if iscoroutine(found) or isgenerator(found):
                    found.close()
                    raise TypeError(f"it gave a {type(found).__name__}, which nobody runs; give a plain function")
            except BaseException as error:
                with self._lock:
                    self.failure = self.failure or (task, error)
                self.stop()
                raise
            self.end[at] = time.perf_counter()

        return act

    def stop(self) -> None:
        """Begin nothing more."""
        self._is_stopped = True
        for rendezvous in self._meetings.values():
            rendezvous.abort()

    def check(self) -> None:
        if self._is_stopped:
            raise _StoppedError

    def wait(self, ticket: Awaited, what: Callable[[], str]) -> None:  # noqa: ARG002
        """Until a task has ended; the caller can be interrupted meanwhile."""
        while not ticket.wait(_POLL):
            self.check()
        if ticket.error is not None:
            raise ticket.error
