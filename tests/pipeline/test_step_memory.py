"""What a rank holds, task by task: by hand, and nothing is left in the end."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto.execute.release import kept_until
from stretto.layers import DENSE, EXPERT_PARALLEL_MOE, MOE
from stretto.pipeline.step_memory import PartMemory, StepMemory
from stretto.program.wgrads import joined_ends

PART = PartMemory(saved=100, leaves=60, backward=7, pending=30, inputs=5, handed=3, passed=0, loss=0)


def memory_of(
    program: stretto.Program, device: int, parts: list[list[PartMemory]], *, shares: bool = False
) -> StepMemory:
    """What a device of a program holds."""
    places = [place for place, task in enumerate(program.tasks()) if task.device == device]
    index = {place: at for at, place in enumerate(places)}
    tasks = [program.task(place) for place in places]
    needs = [[index[need] for need in program.needs(place) if need in index] for place in places]
    joins = {tasks[at] for at in joined_ends(tasks, program.anatomy.wgrad_microbatches)}
    until = kept_until(tasks, needs) if shares else None
    return StepMemory(tasks, needs, program.anatomy, parts, joins=joins, kept_until=until)


def test_by_hand() -> None:
    """Two passes are held. The first backward recomputes a site beside the gradient of its input."""
    program = stretto.lower(stretto.parse_plan("0F0,0F1,0I0,0W0,0I1,0W1"))
    assert memory_of(program, 0, [[PART._replace(handed=0)]]).peak() == 100 + 100 + 5 + 7
    assert memory_of(program, 0, [[PART._replace(loss=50)]]).peak() == 200 + 5 + 50
    # Without a W in between, what waits for it is held too.
    program = stretto.lower(stretto.parse_plan("0F0,0F1,0I0,0I1,0W0,0W1"))
    assert memory_of(program, 0, [[PART._replace(pending=110, inputs=0, backward=0, handed=0)]]).peak() == 220


def test_what_the_next_stage_of_the_device_is_given_is_held_until_that_has_run() -> None:
    both = PART._replace(saved=0, leaves=0, backward=0, pending=0, inputs=0, handed=50)
    turns = stretto.lower(stretto.parse_plan("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1"))
    assert memory_of(turns, 0, [[both], [both]]).peak() == 100
    at_once = stretto.lower(stretto.parse_plan("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1"))
    assert memory_of(at_once, 0, [[both], [both]]).peak() == 50
    sent = stretto.lower(stretto.parse_plan("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"))
    assert memory_of(sent, 0, [[both], [both]]).peak() == 0
    three = stretto.lower(stretto.parse_plan("0F0,1F0,2F0,2B0,1B0,0B0"))
    assert memory_of(three, 0, [[both]] * 3).peak() == 100  # beside what it is made of
    assert memory_of(three, 0, [[both], [both._replace(passed=50)], [both]]).peak() == 50


def test_what_leaves_is_held_until_a_task_waits_for_it() -> None:
    program = stretto.lower(stretto.parse_plan("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3"), offload=1)
    part = PartMemory(saved=100, leaves=100, backward=0, pending=0, inputs=0, handed=0, passed=0, loss=0)
    held = memory_of(program, 0, [[part]])
    assert held.peak() == 300  # one that leaves, one that runs, one that comes back
    kept = memory_of(stretto.lower(stretto.parse_plan("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3")), 0, [[part]])
    assert kept.peak() == 400


@given(
    plans(),
    st.sampled_from([None, MOE, DENSE, EXPERT_PARALLEL_MOE]),
    st.integers(0, 2),
    st.integers(1, 3),
    st.booleans(),
    st.data(),
)
def test_nothing_is_left(
    plan: stretto.Plan, layer: Any, offload: int, wgrad_microbatches: int, shares: bool, data: st.DataObject
) -> None:
    layers = None if layer is None else [[layer, layer]] * plan.stages
    program = stretto.lower(plan, layers=layers, offload=offload, wgrad_microbatches=wgrad_microbatches)
    sizes = st.integers(0, 9)

    def part() -> PartMemory:
        saved, back, pending, inputs, handed = (data.draw(sizes) for _ in range(5))
        leaves, passed = (data.draw(st.integers(0, most)) for most in (saved, handed))
        return PartMemory(saved, leaves, back, pending, inputs, handed, passed, loss=0)

    parts = [[part() for _ in steps] for steps in program.anatomy.forward]
    for stage, steps in enumerate(program.anatomy.forward):  # only what has a backward saves
        for at, step in enumerate(steps):
            if not step.phase.backward:
                parts[stage][at] = PartMemory(0, 0, 0, 0, 0, parts[stage][at].handed, parts[stage][at].passed, 0)
            elif step.phase.lane != "compute":
                parts[stage][at] = parts[stage][at]._replace(pending=0)  # and only compute has weights
    for device in range(plan.devices):
        held = memory_of(program, device, parts, shares=shares)
        peak = held.peak()
        assert peak >= max((part.saved for steps in parts for part in steps), default=0) * (plan.devices == 1)
        assert held._now == sum(held._frees.values())
        assert not any(held._handed.values())
        assert (held._flowing, held._entered) == ({}, {})
        assert not any(held._waiting.values())
