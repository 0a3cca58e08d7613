"""Host buffers of offloaded activations: each has one pass at a time, and there are no more than that takes."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from places import places_of
from strategies import plans
from stretto import Costs
from stretto.costs import Link, PhaseTimes
from stretto.layers import MOE
from stretto.program.needs import link_tasks
from stretto.program.task import Kind
from stretto.schedules import gpipe, v_min


def reordered(program: stretto.Program, name: str, *, after: str) -> stretto.Program:
    tasks = list(program.tasks())
    moved = tasks.pop([str(task) for task in tasks].index(name))
    tasks.insert([str(task) for task in tasks].index(after) + 1, moved)
    return link_tasks(tasks, program.placement)


def with_host_slots(program: stretto.Program, slots: Mapping[str, int]) -> stretto.Program:
    """Return the program with the named offloads into these host buffers."""
    tasks = (replace(task, slot=slots.get(str(task), task.slot)) for task in program.tasks())
    return link_tasks(tasks, program.placement)


def without_reuse(program: stretto.Program) -> stretto.Program:
    """Return the program with a host buffer of its own for each offload."""
    return with_host_slots(program, {str(task): -1 for task in program.tasks() if task.kind is Kind.OFFLOAD})


@given(plans(), st.integers(1, 3), st.booleans(), st.integers(1, 9))
def test_a_host_buffer_has_one_pass_at_a_time(plan: stretto.Plan, room: int, phases: bool, time: int) -> None:
    program = stretto.lower(plan, layers=[[MOE]] * plan.stages if phases else None, offload=room)
    assert stretto.check(program) == []
    times = dict.fromkeys(("attn", "dispatch", "mlp", "combine"), PhaseTimes(1, 1))
    costs = Costs(activation_bytes=time, host=Link(bandwidth=1), phases=times if phases else {})
    spans = list(stretto.simulate(program, costs).spans())
    back = {(span.task.stage, span.task.microbatch): span for span in spans if span.task.kind is Kind.ONLOAD}
    for device in range(plan.devices):
        buffers = program.host_buffers(device)
        assert list(buffers) == list(range(len(buffers)))
        out = [span for span in spans if span.task.kind is Kind.OFFLOAD and span.task.device == device]
        assert {(span.task.slot, span.task.stage) for span in out} == set(buffers.items())
        for buffer in buffers:
            fills = sorted((span for span in out if span.task.slot == buffer), key=lambda span: span.start)
            for before, after in pairwise(fills):
                assert back[before.task.stage, before.task.microbatch].end <= after.start


@given(plans(), st.integers(1, 3))
def test_host_buffers_are_as_few_as_passes_that_are_away_at_once(plan: stretto.Plan, room: int) -> None:
    """A pass is away from the action after its forward to the end of the action before its backward: as long as its
    copies may take. A buffer that is filled again within that time would make one copy wait for the other.
    """
    program = stretto.lower(plan, offload=room)
    places = places_of(plan)
    away = {(device, stage): [0] * len(plan.rows[device]) for device, stage in plan.placement.homes}
    for task in program.tasks():
        if task.kind is Kind.OFFLOAD:
            forward, backward = (places[op, task.stage, task.microbatch][1] for op in "FB")
            for action in range(forward + 1, backward):
                away[task.device, task.stage][action] += 1
    for device in range(plan.devices):
        stages = list(program.host_buffers(device).values())
        assert {stage: stages.count(stage) for stage in stages} == {
            stage: max(counts) for (home, stage), counts in away.items() if home == device and max(counts)
        }


@given(plans(), st.integers(1, 3), st.integers(0, 4))
def test_copies_as_short_as_an_action_do_not_wait_for_host_buffers(plan: stretto.Plan, room: int, time: int) -> None:
    program = stretto.lower(plan, offload=room)
    costs = Costs(activation_bytes=time / 4, host=Link(bandwidth=1))
    timeline, free = (stretto.simulate(each, costs) for each in (program, without_reuse(program)))
    assert np.array_equal(timeline.start, free.start)


def test_copies_that_take_their_time_do_not_wait_for_host_buffers() -> None:
    program = stretto.lower(v_min(devices=2, microbatches=16), offload=3)
    costs = Costs(activation_bytes=2, host=Link(bandwidth=1))
    timeline, free = (stretto.simulate(each, costs) for each in (program, without_reuse(program)))
    assert np.array_equal(timeline.start, free.start)


def test_slow_copies_wait_for_a_host_buffer_by_hand() -> None:
    plan = stretto.parse_plan("0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3")
    program = stretto.lower(plan, offload=1)
    timeline = stretto.simulate(program, Costs(F=1, B=1, activation_bytes=3, host=Link(bandwidth=1)))
    found = {str(span.task): (span.start, span.end) for span in timeline.spans()}
    assert program.host_buffers(0) == {0: 0}
    assert [found[name] for name in ("0F1", "0OFFLOAD1", "0ONLOAD1")] == [(1, 2), (2, 5), (5, 8)]
    assert [found[name] for name in ("0F2", "0OFFLOAD2")] == [(5, 6), (8, 11)]


def test_without_offload_there_are_no_host_buffers() -> None:
    assert stretto.lower(gpipe(devices=1, microbatches=4)).host_buffers(0) == {}


@given(plans(), st.integers(1, 3), st.data())
def test_check_finds_an_offload_that_does_not_wait_for_its_host_buffer(
    plan: stretto.Plan, room: int, data: st.DataObject
) -> None:
    program = stretto.lower(plan, offload=room)
    kind, needing = program.work.kind, program.needing
    waits = np.flatnonzero((kind[needing] == Kind.OFFLOAD) & (kind[program.need] == Kind.ONLOAD))
    if not len(waits):
        return
    drop = data.draw(st.sampled_from(waits.tolist()))
    task, need = int(needing[drop]), int(program.need[drop])
    starts = np.concatenate(([0], np.cumsum(np.bincount(np.delete(needing, drop), minlength=len(program)))))
    (found,) = stretto.check(replace(program, need=np.delete(program.need, drop), need_start=starts))
    assert (found.rule, found.at[0], found.at[2]) == ("buffers", task, need)
    offload = program.task(task)
    assert found.message.startswith(
        f"{offload} fills host buffer {offload.slot} of device {offload.device} "
        f"without waiting until {program.task(need)} is done with what "
    )


@pytest.mark.parametrize(
    ("late", "fill", "says"),
    [
        (
            "0ONLOAD0",
            "0OFFLOAD3",
            "0OFFLOAD3 fills host buffer 0 of device 0 and comes before 0ONLOAD0, which uses what 0OFFLOAD0 put there",
        ),
        (
            "0OFFLOAD1",
            "0ONLOAD0",
            "0ONLOAD0 fills buffer 1 of device 0 and comes before 0OFFLOAD1, which uses what 0F1 put there",
        ),
    ],
)
def test_check_finds_what_refills_a_buffer_before_it_is_emptied(late: str, fill: str, says: str) -> None:
    program = stretto.lower(gpipe(devices=1, microbatches=4), offload=1)
    (found,) = stretto.check(reordered(program, late, after=fill))
    assert str(found) == f"buffers: {says}"


def test_check_finds_stages_that_share_a_host_buffer() -> None:
    plan = stretto.parse_plan("0F0,0F1,1F0,1B0,0B0,1F1,0F2,1F2,1B1,0B1,1B2,0B2")
    program = with_host_slots(stretto.lower(plan, offload=1), {"0OFFLOAD0": 9, "1OFFLOAD1": 9})
    (found,) = stretto.check(program)
    assert str(found) == (
        "buffers: 1OFFLOAD1 fills host buffer 9 of device 0, but 0OFFLOAD0 of another stage fills it, too"
    )
