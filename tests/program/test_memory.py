"""Memory traffic: what leaves the device comes back, when and where the rule says, and costs what it should."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from places import places_of
from strategies import plans
from stretto import Costs, Phase
from stretto.costs import Link, PhaseTimes
from stretto.layers import DENSE, MOE, Layer
from stretto.program.needs import link_tasks
from stretto.program.task import BACKWARDS, COMPUTE, FORWARDS, Kind, Lane
from stretto.schedules import gpipe, interleaved, one_f_one_b
from stretto.timeline import memory_bound


def device_buffers(program: stretto.Program) -> int:
    """The most buffers of activations that a device has."""
    return int(program.work.slot[program.work.kind != Kind.OFFLOAD].max()) + 1


@given(plans(), st.integers(1, 3), st.booleans(), st.booleans())
def test_what_is_used_again_late_enough_leaves_and_comes_back(
    plan: stretto.Plan, room: int, phases: bool, recompute: bool
) -> None:
    layers = [[MOE]] * plan.stages if phases else None
    program = stretto.lower(plan, layers=layers, offload=room, recompute=recompute)
    assert stretto.check(program) == []
    places = places_of(plan)
    expected = {
        (stage, microbatch)
        for (op, stage, microbatch), (_, at) in places.items()
        if op == "F" and places["B", stage, microbatch][1] - at > 2 * room
    }
    for kind in (Kind.OFFLOAD, Kind.ONLOAD):
        moved = [(task.stage, task.microbatch) for task in program.tasks() if task.kind is kind]
        assert sorted(moved) == sorted(expected)


def test_kimi_k2s_rule() -> None:
    """In the steady state the previous microbatch's forward leaves while the next one's backward comes."""
    plan = interleaved(devices=4, stages_per_device=2, microbatches=8, overlap=True)
    program = stretto.lower(plan, offload=1)
    costs = Costs(activation_bytes=3, host=Link(bandwidth=1))  # a copy takes as long as a pair
    timeline = stretto.simulate(program, costs)
    spans = [span for span in timeline.spans() if span.task.device == 0]
    pairs = [span for span in spans if span.task.kind is Kind.PAIR]
    out, back = (
        {(span.task.stage, span.task.microbatch): span for span in spans if span.task.kind is kind}
        for kind in (Kind.OFFLOAD, Kind.ONLOAD)
    )
    assert len(pairs) > 3
    for before, now, after in zip(pairs, pairs[1:], pairs[2:], strict=False):
        leaving, coming = out[before.task.stage, before.task.microbatch], back[after.task.backward]
        assert (leaving.start, leaving.end) == (coming.start, coming.end) == (now.start, now.end)
    assert timeline.summary().devices[0].exposed_copy > 0  # warm-up forwards are shorter
    assert device_buffers(program) == 4  # being filled, leaving, being used, coming


def test_copies_that_fit_behind_compute_cost_no_time() -> None:
    plan = interleaved(devices=4, stages_per_device=2, microbatches=8, overlap=True)
    free = Costs(activation_bytes=10, host=Link(bandwidth=10))
    kept, moved = (stretto.simulate(stretto.lower(plan, offload=room), free) for room in (0, 1))
    assert moved.makespan == kept.makespan
    assert sum(device.exposed_copy for device in moved.summary().devices) == 0
    assert kept.summary(free).devices[0].peak_bytes == 120
    assert moved.summary(free).devices[0].peak_bytes == 40


def test_slow_copies_are_exposed_by_hand() -> None:
    """Four forwards of 1, four backwards of 1, and copies of 2 through three buffers."""
    plan = gpipe(devices=1, microbatches=4)
    costs = Costs(F=1, B=1, activation_bytes=2, host=Link(bandwidth=1))
    timeline = stretto.simulate(stretto.lower(plan, offload=1), costs)
    found = {str(span.task): (span.start, span.end) for span in timeline.spans()}
    # Buffers 0 and 1 hold the first two; the third forward waits for buffer 0, the fourth takes buffer 2, and what
    # the first saved comes back into buffer 1. The fourth waits for buffer 1, too: its memory is the compute lane's.
    assert [found[f"0F{k}"] for k in range(4)] == [(0, 1), (1, 2), (3, 4), (5, 6)]
    assert [found[f"0OFFLOAD{k}"] for k in range(4)] == [(1, 3), (3, 5), (5, 7), (7, 9)]
    assert [found[f"0ONLOAD{k}"] for k in range(4)] == [(5, 7), (7, 9), (9, 11), (11, 13)]
    assert [found[f"0B{k}"] for k in range(4)] == [(7, 8), (9, 10), (11, 12), (13, 14)]
    summary = timeline.summary(costs).devices[0]
    assert summary.exposed_copy == summary.bubble == 6


def test_memory_over_time_with_copies() -> None:
    plan = stretto.parse_plan("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3")
    costs = Costs(activation_bytes=10, offload_bytes=8, host=Link(bandwidth=8))
    timeline = stretto.simulate(stretto.lower(plan, offload=1), costs)
    (held,) = timeline.memory(costs)
    # A copy takes 1: each forward's 8 of 10 leave during the next action, and come back during the one before use.
    at = dict(zip(held.time.tolist(), held.bytes.tolist(), strict=True)) if held.bytes is not None else {}
    assert [at[time] for time in (0, 1, 2, 3, 4)] == [10, 20, 22, 32, 32]
    assert held.peak_activations == 3


def test_a_pass_of_which_nothing_leaves_counts_as_held() -> None:
    costs = Costs(activation_bytes=10, offload_bytes=(5, 0), host=Link(bandwidth=100))
    timeline = stretto.simulate(stretto.lower(gpipe(devices=2, microbatches=8), offload=1), costs)
    first, second = timeline.summary(costs).devices
    assert first.peak_activations < second.peak_activations == 8
    assert second.peak_bytes == 80


COMM_FIRST = Layer("odd", (Phase("early", "comm"), Phase("mlp")))


@given(plans(), st.integers(0, 2), st.sampled_from([None, MOE, COMM_FIRST]), st.booleans(), st.data())
def test_bytes_without_a_clock_bound_those_over_time(
    plan: stretto.Plan, room: int, layer: Layer | None, recompute: bool, data: st.DataObject
) -> None:
    layers = None if layer is None else [[layer if stage % 2 else MOE] for stage in range(plan.stages)]
    times = {name: PhaseTimes(1, 1, 1) for name in ("attn", "mlp")}
    times |= {name: PhaseTimes(*data.draw(st.tuples(*[st.integers(0, 9)] * 2))) for name in ("dispatch", "combine")}
    times["early"] = PhaseTimes(2, 2)
    sizes = data.draw(st.lists(st.integers(6, 20), min_size=plan.stages, max_size=plan.stages))
    costs = Costs(
        activation_bytes=tuple(sizes),
        recompute_bytes=4,
        pending_bytes=3,
        host=Link(bandwidth=data.draw(st.integers(1, 20))),
        link=Link(latency=data.draw(st.integers(0, 3))),
        phases={} if layers is None else times,
    )
    program = stretto.lower(plan, layers=layers, costs=costs, offload=room, recompute=recompute)
    assert stretto.check(program) == []
    bound = memory_bound(program, costs)
    for held, worst in zip(stretto.simulate(program, costs).memory(costs), bound, strict=True):
        assert held.bytes is not None
        assert held.bytes[-1] == pytest.approx(0)
        assert held.peak_bytes <= worst.peak_bytes + 1e-9  # type: ignore[operator]
        if program.work.among((Kind.OFFLOAD,)).any():
            assert held.peak_activations <= device_buffers(program)
    again = stretto.simulate(program, costs).summary(costs)
    limit = max(device.peak_bytes or 0 for device in again.devices)
    assert stretto.check(program, costs=costs, memory_limit=limit / 2)


def test_the_bound_is_tight_where_copies_keep_up() -> None:
    plan = interleaved(devices=4, stages_per_device=2, microbatches=8, overlap=True)
    costs = Costs(activation_bytes=10, host=Link(bandwidth=3.5))
    program = stretto.lower(plan, offload=1)
    assert [held.peak_bytes for held in memory_bound(program, costs)] == [40, 40, 40, 40]
    assert stretto.check(program, costs=costs, memory_limit=40) == []


def test_recomputing_takes_time_and_spares_memory() -> None:
    plan = one_f_one_b(devices=2, microbatches=4)
    costs = Costs(R=0.5, activation_bytes=10, recompute_bytes=6)
    program = stretto.lower(plan, recompute=True)
    summary = stretto.simulate(program, costs).summary(costs)
    computed = [str(task) for task in program.tasks() if task.lane.name == "compute" and task.device == 1]
    assert computed[:4] == ["1F0", "1RECOMPUTE0", "1B0", "1B0.wgrad"]
    assert summary.makespan == 1 + 4 * 3.5 + 2  # the first device's last recomputing hides in its wait
    assert [device.peak_bytes for device in summary.devices] == [14, 10]
    with pytest.raises(stretto.CostError, match="recompute_bytes"):
        stretto.simulate(program).summary(Costs(activation_bytes=10))


def test_phases_are_recomputed_one_by_one() -> None:
    plan = one_f_one_b(devices=1, microbatches=1)
    times = {"attn": PhaseTimes(1, 1, 1, R=0.25), "mlp": PhaseTimes(1, 1, 1), "dispatch": PhaseTimes(1, 1)}
    costs = Costs(phases={**times, "combine": PhaseTimes(1, 1)}, activation_bytes=10, recompute_bytes=6)
    program = stretto.lower(plan, layers=[[MOE]], costs=costs, recompute=True)
    timeline = stretto.simulate(program, costs)
    found = {str(span.task): (span.start, span.end) for span in timeline.spans()}
    # What is recomputed does not wait for the gradient: the MLP's is done beside the combine's backward.
    assert found["0RECOMPUTE0.mlp0"] == (4, 5)
    assert found["0B0.combine0"] == (4, 5)
    assert found["0B0.mlp0"] == (5, 6)
    assert found["0RECOMPUTE0.attn0"] == (6, 6.25)
    (held,) = timeline.memory(costs)
    assert held.bytes is not None
    assert held.bytes.tolist() == [10, 4, 7, 4, 7, 0, 0]


def test_a_pass_comes_back_when_the_one_has_left_for_which_its_forward_waits() -> None:
    """Pairs begin with the forward here. Its compute waits for an offload, so the onload beside it does too."""
    times = {"attn": PhaseTimes(4, 1, 1), "mlp": PhaseTimes(1, 1, 1)}
    costs = Costs(phases={**times, "dispatch": PhaseTimes(1, 1), "combine": PhaseTimes(1, 1)})
    plan = interleaved(devices=2, microbatches=8, overlap=True)
    program = stretto.lower(plan, layers=[[MOE]] * 4, costs=costs, offload=1)
    assert stretto.check(program) == []
    needs = {
        at: {program.task(need) for need in program.need[program.needing == at].tolist()} for at in range(len(program))
    }
    found = 0
    for at, task in enumerate(program.tasks()):
        beside = (n for n in range(at, len(program)) if program.task(n).lane == Lane(task.device))
        if task.kind is Kind.ONLOAD and (first := next(beside, None)) is not None:
            left = {need for need in needs[first] if need.kind is Kind.OFFLOAD and program.task(first).kind is Kind.F}
            assert left <= needs[at]
            found += any((need.stage, need.microbatch) != (task.stage, task.microbatch) for need in left)
    assert found


@given(plans(), st.integers(1, 3), st.booleans())
def test_all_lanes_that_compute_wait_for_a_pass_to_leave_when_one_does(
    plan: stretto.Plan, room: int, phases: bool
) -> None:
    """The first task that waits frees the memory of what has left, which any lane may then be given."""
    program = stretto.lower(plan, layers=[[MOE]] * plan.stages if phases else None, offload=room)
    for offload in np.flatnonzero(program.work.kind == Kind.OFFLOAD).tolist():
        device = program.task(offload).device
        waiting = set(program.needing[program.need == offload].tolist())
        for name in ("compute", "comm"):
            lane = (at for at in range(min(waiting), len(program)) if program.task(at).lane == Lane(device, name))
            after = next(lane, None)
            assert after is None or after in waiting, (program.task(offload), program.task(after))


@given(plans(), st.booleans(), st.data())
def test_check_finds_every_dropped_wait_of_a_copy(plan: stretto.Plan, phases: bool, data: st.DataObject) -> None:
    """Of all waits between lanes that memory traffic brought, each is missed when it is dropped."""
    layers = [[MOE]] * plan.stages if phases else None
    program = stretto.lower(plan, layers=layers, offload=1)
    kind = program.work.kind
    needing = program.needing
    copies = np.flatnonzero(program.work.among((Kind.OFFLOAD, Kind.ONLOAD)))
    entries = np.flatnonzero(np.isin(needing, copies) | np.isin(program.need, copies))
    # An onload also waits for the compute before it, and for what the forward beside it waits for; and when one task
    # waits for a pass to leave, other lanes do too. That is the rule's timing, not its soundness: sound is what fills
    # the buffer of the pass, or brings it back, and is the first on its lane that waits for it.
    work, need = program.work, program.need
    fills = np.where(work.among((*FORWARDS, Kind.ONLOAD)), work.slot, -1)[needing]
    filled = work.slot[program.tables.starts[work.stage, work.microbatch]]  # by the forward of each pass
    same = (work.stage[need] == work.stage[needing]) & (work.microbatch[need] == work.microbatch[needing])
    sound = (fills >= 0) & ((fills == filled[need]) | (same & (kind[needing] == Kind.ONLOAD)))
    first: dict[tuple[int, int], int] = {}
    for at in range(len(need)):
        first.setdefault((int(program.lane[needing[at]]), int(need[at])), at)
    sound &= np.isin(np.arange(len(need)), list(first.values()))
    timing = np.where(kind[need] == Kind.OFFLOAD, ~sound, (kind[needing] == Kind.ONLOAD) & work.among(COMPUTE)[need])
    entries = entries[~timing[entries]]
    if not len(entries):
        return
    drop = data.draw(st.sampled_from(entries.tolist()))
    task, need = int(needing[drop]), int(program.need[drop])
    kept = (needing != task) | (program.need != need)
    starts = np.concatenate(([0], np.cumsum(np.bincount(needing[kept], minlength=len(program)))))
    broken = replace(program, need=program.need[kept], need_start=starts)
    found = stretto.check(broken)
    assert any(set(violation.at) >= {task, need} for violation in found), (program.task(task), program.task(need))


@given(plans(), st.data())
def test_check_finds_a_buffer_taken_too_soon(plan: stretto.Plan, data: st.DataObject) -> None:
    """Put a forward's activations where others still are."""
    program = stretto.lower(plan, offload=1)
    work, device = program.work, program.device
    fills = np.flatnonzero(work.among(FORWARDS))
    for before, after in pairwise(fills[device[fills] == data.draw(st.integers(0, plan.devices - 1))].tolist()):
        uses = np.flatnonzero(work.among(BACKWARDS) & (work.backward[0] == work.stage[before]))
        if (work.backward[1][uses] == work.microbatch[before]).any() and work.slot[before] != work.slot[after]:
            between = np.flatnonzero((device == device[after]) & work.among((Kind.OFFLOAD, *BACKWARDS)))
            if ((between > before) & (between < after)).any():
                continue
            slot = work.slot.copy()
            slot[after] = work.slot[before]
            found = stretto.check(replace(program, work=replace(work, slot=slot)))
            assert "buffers" in {violation.rule for violation in found}
            return


def test_what_never_comes_back_is_named() -> None:
    program = stretto.lower(gpipe(devices=1, microbatches=4), offload=1)
    tasks = [task for task in program.tasks() if str(task) != "0ONLOAD0"]
    assert [str(violation) for violation in stretto.check(link_tasks(tasks, program.placement))] == [
        "coverage: what stage 0 saved for microbatch 0 leaves the device 1 times and comes back 0 times",
        "buffers: 0OFFLOAD3 fills host buffer 0 of device 0, but nothing has used what 0OFFLOAD0 put there",
    ]


@pytest.mark.parametrize("room", [-1, -5])
def test_a_negative_offload_is_refused(room: int) -> None:
    with pytest.raises(stretto.PlanError, match="offload is a number of actions of at least 0"):
        stretto.lower(gpipe(devices=1, microbatches=1), offload=room)


@given(plans(), st.booleans(), st.data())
def test_check_finds_what_is_recomputed_too_soon(plan: stretto.Plan, offload: bool, data: st.DataObject) -> None:
    """Move one recomputation before the forward whose results it starts from."""
    program = stretto.lower(plan, layers=[[MOE]] * plan.stages, offload=int(offload), recompute=True)
    tasks = list(program.tasks())
    at = data.draw(st.sampled_from([k for k, task in enumerate(tasks) if task.kind is Kind.RECOMPUTE]))
    who = (tasks[at].stage, tasks[at].microbatch)
    result = max(k for k, task in enumerate(tasks) if task.kind is Kind.F and (task.stage, task.microbatch) == who)
    tasks.insert(result, tasks.pop(at))
    found = stretto.check(link_tasks(tasks, program.placement, program.anatomy))
    assert any("RECOMPUTE" in violation.message for violation in found)


def test_layers_that_begin_with_communication_have_sound_buffers() -> None:
    plan = interleaved(devices=1, stages_per_device=2, microbatches=2)
    for room in (1, 2, 3):
        assert stretto.check(stretto.lower(plan, layers=[[COMM_FIRST], [DENSE]], offload=room)) == []
