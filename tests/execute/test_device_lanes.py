"""Device lanes on streams that only know what they wait for: no memory is given away while anybody may use it."""

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto.costs import PhaseTimes
from stretto.execute.device_lanes import DeviceLanes
from stretto.execute.executor import Executor
from stretto.layers import EXPERT_PARALLEL_MOE, MOE
from stretto.program.task import Kind, Task

PHASES = ("attn", "counts", "sizes", "dispatch", "mlp", "combine")


class Event:
    def __init__(self) -> None:
        self.passed: set[Task] = set()

    def record(self, stream: "Stream") -> None:
        self.passed = set(stream.passed)


class Stream:
    """Knows the tasks that have ended when it gets to its end."""

    def __init__(self, priority: int = 0) -> None:  # noqa: ARG002
        self.passed: set[Task] = set()

    def wait_event(self, event: Event) -> None:
        self.passed |= event.passed

    def wait_stream(self, other: "Stream") -> None:
        self.passed |= other.passed


class Memory:
    """Made in a stream; `users` are the tasks that use it."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.users = stream, set[Task]()


class Watch:
    task: Callable[[], str] = staticmethod(lambda: "")

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def check(self) -> None: ...

    def wait(self, *_: Any) -> None: ...


class Run:
    """Runs a device's tasks. Each is handed what the task before it in its pass has made, and lets it go."""

    def __init__(self, program: stretto.Program, rank: int) -> None:
        self.now = self.main = Stream()
        self.used: list[object] = []
        self.freed: list[tuple[Stream, set[Task]]] = []
        self.passes: dict[tuple[int, int], Memory] = {}
        self.wrong: list[str] = []
        cuda = mock.patch.multiple(
            "torch.cuda", Event=Event, Stream=Stream, current_stream=lambda: self.now, set_stream=self._set
        )
        with cuda:
            executor = Executor(program, Watch(rank))
            executor.bind(DeviceLanes(executor, {}, self.used), self._bound)
            executor.run()

    def _set(self, stream: Stream) -> None:
        self.now = stream

    def _bound(self, task: Task) -> Callable[[], None]:
        def act() -> None:
            if task.kind is Kind.ONLOAD:
                self._make(task, self.main, user=self.main)
            elif task.lane.name in ("compute", "comm", "host"):
                key = task.stage, task.microbatch
                if (given := self.passes.pop(key, None)) is not None:
                    given.users.add(task)
                    self.used.append(given)
                self.passes[key] = self._make(task, self.now, user=self.now)
                self.passes[key].users.add(task)
                self.used.append(self.passes[key])
            self.now.passed.add(task)

        return act

    def _make(self, task: Task, owner: Stream, *, user: Stream) -> Memory:
        """Make memory; the allocator gives away whatever was freed in this stream."""
        for stream, users in self.freed:
            if stream is owner and not users <= user.passed:
                self.wrong.append(f"{task} is given memory of {', '.join(map(str, users - user.passed))}")
        self.freed[:] = [(stream, users) for stream, users in self.freed if stream is not owner]
        made = Memory(owner)
        weakref.finalize(made, self.freed.append, (owner, made.users))
        return made


@given(plans(), st.booleans(), st.integers(0, 2), st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_memory_is_given_away_only_after_all_that_used_it(
    plan: stretto.Plan, ep: bool, offload: int, times: list[int]
) -> None:
    phases = {name: PhaseTimes(time, time, time) for name, time in zip(PHASES, times, strict=True)}
    if ep:
        plan = plan.on_mesh({"pp": plan.devices, "ep": 2})
    layer = EXPERT_PARALLEL_MOE if ep else MOE
    program = stretto.lower(
        plan, layers=[[layer, layer]] * plan.stages, costs=stretto.Costs(phases=phases), offload=offload
    )
    for rank in range(program.devices):
        assert Run(program, rank).wrong == []


@pytest.mark.parametrize("offload", [1, 2])
@pytest.mark.parametrize("schedule", ["dualpipev", "interleaved"])
def test_so_it_is_where_passes_come_back_beside_communication(schedule: str, offload: int) -> None:
    more = {"overlap": True} if schedule == "interleaved" else {}
    plan = getattr(stretto.schedules, schedule)(devices=2, microbatches=8, **more)
    program = stretto.lower(plan, layers=[[MOE, MOE]] * plan.stages, offload=offload)
    assert [Run(program, rank).wrong for rank in range(2)] == [[], []]
