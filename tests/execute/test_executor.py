"""The executor waits for what a program says its tasks need, and for nothing else."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import stretto
from stretto.execute.executor import Act, Executor, HostLanes
from stretto.execute.host_lanes import HostLane, Work
from stretto.execute.recorder import Recorder, bytes_counter
from stretto.execute.supervisor import Supervisor
from stretto.ir.errors import PeerError
from stretto.program.program import Program
from stretto.program.task import Kind, Task
from stretto.schedules import one_f_one_b

LONG = 0.2  # seconds, in which a thread that waits for nothing is done with all it has


class Run:
    """One rank's tasks, with what was done, in order."""

    def __init__(self, program: Program, bind: Callable[["Run", Task], Act], *, begins: bool = False) -> None:
        self.done: list[str] = []
        self.supervisor = Supervisor(0, timeout=5.0)
        self.executor = Executor(program, self.supervisor)
        threads = {lane: HostLane(str(lane)) for lane in program.lanes if lane.name != "compute"}
        self.lanes = HostLanes(self.executor, threads, begins=begins)
        self.executor.bind(self.lanes, lambda task: bind(self, task))
        self._threads = list(threads.values())

    def __call__(self, recorder: Recorder | None = None) -> list[str]:
        self.done.clear()
        self.executor.run(recorder)
        return list(self.done)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


@pytest.fixture
def made() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*given: object, **more: object) -> Run:
        runs.append(Run(*given, **more))  # type: ignore[arg-type]
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def slow_copies(run: Run, task: Task) -> Act:
    def act() -> None:
        if task.kind is Kind.H2D:
            time.sleep(LONG / 4)
        run.done.append(str(task))

    return act


def without(program: Program, task: int, need: int) -> Program:
    """A program that does not say that a task needs another."""
    places = [k for k in range(program.need_start[task], program.need_start[task + 1]) if program.need[k] != need]
    kept = [*range(program.need_start[task]), *places, *range(program.need_start[task + 1], len(program.need))]
    start = program.need_start.copy()
    start[task + 1 :] -= 1
    return replace(program, need=program.need[kept], need_start=start)


def place(program: Program, kind: Kind, bucket: int) -> int:
    return int(np.flatnonzero((program.work.kind == kind) & (program.work.microbatch == bucket))[0])


def test_a_need_is_waited_for_and_one_that_is_gone_is_not(made: Callable[..., Run]) -> None:
    """The same callables, on the same lanes: only the program's needs hold a task back."""
    reloaded, patience = threading.Event(), LONG / 4

    def bind(run: Run, task: Task) -> Act:
        def act() -> None:
            if task.kind is Kind.H2D:
                reloaded.wait(patience)
            run.done.append(str(task))
            if task.kind is Kind.RELOAD:
                reloaded.set()

        return act

    program = stretto.weight_update(devices=1, buckets=2)
    done = made(program, bind)()
    assert done.index("H2D0") < done.index("RELOAD0")
    assert done.index("H2D1") < done.index("RELOAD1")
    hasty = without(program, place(program, Kind.RELOAD, 0), place(program, Kind.H2D, 0))
    assert stretto.check(hasty) != []
    reloaded.clear()
    patience = 10.0
    assert made(hasty, bind)()[0] == "RELOAD0"


def test_lanes_run_side_by_side(made: Callable[..., Run]) -> None:
    meet = threading.Barrier(2, timeout=10.0)

    def bind(run: Run, task: Task) -> Act:
        def act() -> None:
            if str(task) in ("RELOAD0", "H2D1"):
                meet.wait()  # which only both at the same time come through; it raises if one waits alone
                run.done.append(str(task))

        return act

    assert sorted(made(stretto.weight_update(devices=1, buckets=2), bind)()) == ["H2D1", "RELOAD0"]


class Copy:
    """Something that was only started, and ends once something else was started."""

    def __init__(self, run: Run, name: str, then: threading.Event) -> None:
        self._run, self._name, self._then = run, name, then

    def wait(self) -> None:
        self._then.wait(10.0)
        self._run.done.append(f"{self._name} ended")


def test_what_is_only_started_ends_later_and_is_waited_for(made: Callable[..., Run]) -> None:
    """The next copy is started before the one before has ended; a reload still waits for its own."""
    second = threading.Event()

    def bind(run: Run, task: Task) -> Act:
        def act() -> Work | None:
            run.done.append(str(task))
            if str(task) == "H2D1":
                second.set()
            return Copy(run, str(task), second) if task.kind is Kind.H2D else None

        return act

    for begins in (False, True):
        second.clear()
        run = made(stretto.weight_update(devices=1, buckets=2), bind, begins=begins)
        done = run()
        assert done.index("H2D1") < done.index("H2D0 ended") < done.index("RELOAD0")
        assert done.index("H2D1 ended") < done.index("RELOAD1")
        assert sorted(run()) == sorted(done)


def test_the_callers_thread_runs_compute_in_order(made: Callable[..., Run]) -> None:
    program = stretto.lower(one_f_one_b(devices=2, microbatches=4))
    threads: set[int] = set()

    def bind(run: Run, task: Task) -> Act:
        def act() -> None:
            run.done.append(str(task))
            if task.lane.name == "compute":
                threads.add(threading.get_ident())

        return act

    run = made(program, bind, begins=True)
    assert run() == [str(task) for task in run.executor.tasks]
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("begins", [False, True])
def test_a_task_that_fails_ends_it(made: Callable[..., Run], begins: bool) -> None:
    def bind(run: Run, task: Task) -> Act:
        def act() -> None:
            run.done.append(str(task))
            if str(task) == "H2D1":
                raise PeerError("no copy")

        return act

    run = made(stretto.weight_update(devices=1, buckets=8), bind, begins=begins)
    with pytest.raises(PeerError, match="no copy"):
        run()
    assert "RELOAD1" not in run.done
    assert "RELOAD7" not in run.done


def test_what_needs_a_task_that_has_failed_is_never_run(made: Callable[..., Run]) -> None:
    """Also if it is issued long after that."""

    def bind(run: Run, task: Task) -> Act:
        def act() -> None:
            run.done.append(str(task))
            if task.kind is Kind.H2D:
                raise PeerError("no copy")

        return act

    run = made(stretto.weight_update(devices=1, buckets=1), bind)
    issue = run.executor._issues[1]
    run.executor._issues[1] = lambda: (time.sleep(LONG), issue())[1]
    with pytest.raises(PeerError, match="no copy"):
        run()
    time.sleep(LONG)
    assert run.done == ["H2D0"]


def test_what_is_known_to_have_failed_ends_a_wait(made: Callable[..., Run]) -> None:
    stuck = threading.Event()

    def bind(run: Run, task: Task) -> Act:
        def act() -> None:
            if task.kind is Kind.H2D:
                run.supervisor.fail("rank 1 died")
                stuck.wait(10.0)

        return act

    run = made(stretto.weight_update(devices=1, buckets=2), bind)
    began = time.monotonic()
    try:
        with pytest.raises(PeerError, match="rank 1 died"):
            run()
        assert time.monotonic() - began < 5
    finally:
        stuck.set()


def test_times_are_of_the_tasks_and_not_of_what_they_wait_for(made: Callable[..., Run]) -> None:
    program = stretto.weight_update(devices=1, buckets=3)
    run = made(program, slow_copies)
    recorder = Recorder(len(run.executor.tasks))
    run(recorder)
    timeline = recorder.gathered(program, None, lambda *_: None)
    assert timeline is not None
    assert timeline.allocated is None
    length = timeline.end - timeline.start
    copies = program.work.kind == Kind.H2D
    assert (length[copies] > 0.9 * LONG / 4).all()
    for task, need in zip(program.needing.tolist(), program.need.tolist(), strict=True):
        assert timeline.start[task] >= timeline.end[need] - 1e-6


def test_bytes_are_counted_after_each_task_is_issued(made: Callable[..., Run]) -> None:
    program = stretto.lower(one_f_one_b(devices=1, microbatches=4))

    def bind(run: Run, task: Task) -> Act:
        return lambda: run.done.append(str(task))

    run = made(program, bind)
    recorder = Recorder(len(run.executor.tasks), lambda: 100 * len(run.done))
    run(recorder)
    timeline = recorder.gathered(program, None, lambda *_: None)
    assert timeline is not None
    assert timeline.allocated is not None
    assert timeline.allocated.tolist() == [100 * (task + 1) for task in range(len(program))]


def test_bytes_are_counted_where_an_allocator_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_counter(torch.device("cpu")) is None
    backend = "native"
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    stats = {"allocated_bytes": {"all": {"current": 7, "peak": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats if device.index == 1 else {})
    count = bytes_counter(torch.device("cuda:1"))
    assert count is not None
    assert count() == 7
    backend = "pluggable"  # PyTorch raises if it is asked for the statistics of such an allocator
    assert bytes_counter(torch.device("cuda:1")) is None


def test_nothing_is_held_when_all_has_ended(made: Callable[..., Run]) -> None:
    run = made(stretto.weight_update(devices=1, buckets=2), slow_copies)
    run()
    assert run.lanes._futures == [None] * len(run.executor.tasks)
    run.executor.forget()
    run.executor.run()
    assert len(run.done) == 4, "without callables nothing is done"
