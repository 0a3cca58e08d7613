"""Device lanes on streams that only know what they wait for: no memory is given away while anybody may use it."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from fake_streams import Allocator, Memory, Stream, Streams
from strategies import plans
from stretto.costs import PhaseTimes
from stretto.execute.device_lanes import DeviceLanes
from stretto.execute.executor import Executor
from stretto.layers import EXPERT_PARALLEL_MOE, MOE
from stretto.program.task import Kind, Task

PHASES = ("attn", "counts", "sizes", "dispatch", "mlp", "combine")


class Watch:
    task: Callable[[], str] = staticmethod(lambda: "")

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def check(self) -> None: ...

    def wait(self, *_: Any) -> None: ...


class Run:
    """Runs a device's tasks. Each is handed what the task before it in its pass has made, and lets it go."""

    def __init__(self, program: stretto.Program, rank: int) -> None:
        self.streams, self.allocator = Streams(), Allocator()
        self.used: list[object] = []
        self.passes: dict[tuple[int, int], Memory] = {}
        with self.streams.patched():
            executor = Executor(program, Watch(rank))
            executor.bind(DeviceLanes(executor, {}, self.used), self._bound)
            executor.run()

    def _bound(self, task: Task) -> Callable[[], None]:
        def act() -> None:
            now = self.streams.now
            if task.kind is Kind.ONLOAD:
                self._make(task, self.streams.main)
            elif task.lane.name in ("compute", "comm", "host"):
                key = task.stage, task.microbatch
                if (given := self.passes.pop(key, None)) is not None:
                    given.users.add((task, now))
                    self.used.append(given)
                self.passes[key] = self._make(task, now)
                self.used.append(self.passes[key])
            now.passed.add(task)

        return act

    def _make(self, task: Task, owner: Stream) -> Memory:
        made = self.allocator.make(owner, task)
        made.users.add((task, owner))
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
        assert Run(program, rank).allocator.wrong == []


@pytest.mark.parametrize("offload", [1, 2])
@pytest.mark.parametrize("schedule", ["dualpipev", "interleaved"])
def test_so_it_is_where_passes_come_back_beside_communication(schedule: str, offload: int) -> None:
    more = {"overlap": True} if schedule == "interleaved" else {}
    plan = getattr(stretto.schedules, schedule)(devices=2, microbatches=8, **more)
    program = stretto.lower(plan, layers=[[MOE, MOE]] * plan.stages, offload=offload)
    assert [Run(program, rank).allocator.wrong for rank in range(2)] == [[], []]
