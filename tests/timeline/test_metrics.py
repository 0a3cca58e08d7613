from itertools import pairwise
from math import isnan

import numpy as np
from hypothesis import given

import stretto
from strategies import plans
from stretto import Costs
from stretto.costs import Link, PhaseTimes
from stretto.schedules import dualpipe, forward_only, gpipe, one_f_one_b


def test_exposed_transfer_is_idle_time_with_the_awaited_transfer_under_way() -> None:
    timeline = stretto.simulate(one_f_one_b(devices=2, microbatches=1), Costs(link=Link(latency=3)))
    # 0F0 0–1, sent 1–4, 1F0 4–5, 1B0 5–7, sent 7–10, 0B0 10–12
    first, second = timeline.summary().devices
    assert (first.exposed_transfer, second.exposed_transfer) == (3, 3)
    assert (first.bubble, second.bubble) == (9, 9)
    assert (first.span, second.span) == (12, 3)


def test_a_transfer_behind_compute_is_not_exposed() -> None:
    timeline = stretto.simulate(gpipe(devices=2, microbatches=3), Costs(F=2, link=Link(latency=2)))
    # Device 1 waits for its first microbatch only; the next two arrive while it computes.
    assert timeline.summary().devices[1].exposed_transfer == 2


def test_two_transfers_a_pair_waits_for_count_where_either_is_under_way() -> None:
    timeline = stretto.simulate(dualpipe(devices=2, microbatches=8), Costs(link=Link(latency=1)))
    for device in range(2):
        spans = [found for found in timeline.spans() if found.task.device == device]
        compute = [found for found in spans if found.task.lane.name == "compute"]
        waits = 0.0
        for before, after in pairwise([None, *compute]):
            free = before.end if before else 0.0
            names = {
                name
                for stage, microbatch in [(after.task.stage, after.task.microbatch), after.task.backward or (-1, -1)]
                for name in (f"{stage}RECV_F{microbatch}", f"{stage}RECV_B{microbatch}")
            }
            moving = [found for found in spans if str(found.task) in names]
            # Quarter ticks are fine enough for whole-number times.
            for quarter in range(int(4 * free), int(4 * after.start)):
                now = quarter / 4
                waits += 0.25 * any(found.start <= now < found.end for found in moving)
        assert timeline.summary().devices[device].exposed_transfer == waits
    assert timeline.summary().devices[0].exposed_transfer == 7


def test_critical_path_is_a_chain_without_gaps() -> None:
    timeline = stretto.simulate(one_f_one_b(devices=3, microbatches=2), Costs(link=Link(latency=1)))
    path = timeline.critical_path()
    assert [str(found.task) for found in path][:5] == ["0F0", "1RECV_F0", "1F0", "2RECV_F0", "2F0"]
    assert str(path[-1].task) in ("0B1", "0B1.wgrad")
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    assert all(before.end == after.start for before, after in pairwise(path))


@given(plans())
def test_the_critical_path_explains_the_makespan_of_every_plan(plan: stretto.Plan) -> None:
    timeline = stretto.simulate(plan, Costs(F=1, I=1, W=1, BW=1, link=Link(latency=0.25)))
    path = timeline.critical_path()
    assert sum(found.end - found.start for found in path) == timeline.makespan


def test_memory_over_time() -> None:
    plan = stretto.parse_plan("0F0,0F1,0I0,0I1,0W0,0W1")
    table = Costs(activation_bytes=10, pending_bytes=4, parameter_bytes=100)
    (held,) = stretto.simulate(plan, table).memory(table)
    assert held.time.tolist() == [0, 1, 3, 4, 5, 6]
    assert held.activations.tolist() == [1, 2, 1, 0, 0, 0]
    assert held.pending.tolist() == [0, 0, 1, 2, 1, 0]
    assert held.bytes is not None
    assert held.bytes.tolist() == [110, 120, 114, 108, 104, 100]
    assert (held.peak_activations, held.peak_pending, held.peak_live, held.peak_bytes) == (2, 2, 2, 120)


def test_a_fused_backward_holds_nothing_for_its_weight_part() -> None:
    """Whether or not times are known, and even if what a weight part needs is larger than the activations."""
    plan = one_f_one_b(devices=2, microbatches=4)
    fused, split = (Costs(activation_bytes=1, pending_bytes=1.6, BW=late) for late in (0, 1))
    assert stretto.simulate(plan, fused).summary(fused).devices[0].peak_bytes == 2
    assert stretto.check(plan, costs=fused, memory_limit=2) == []
    assert stretto.simulate(plan, split).summary(split).devices[0].peak_bytes == 2.6
    assert stretto.check(plan, costs=split, memory_limit=2.6) == []
    assert len(stretto.check(plan, costs=split, memory_limit=2.5)) == 1


def test_memory_is_counted_even_if_nothing_takes_time() -> None:
    found = stretto.simulate(one_f_one_b(devices=2, microbatches=4), Costs(F=0, I=0, W=0)).summary()
    assert [device.peak_activations for device in found.devices] == [2, 1]


def test_parameters_are_counted_for_every_stage_a_device_holds() -> None:
    table = Costs(parameter_bytes=1, activation_bytes=0)
    held = stretto.simulate(dualpipe(devices=4, microbatches=8), table).memory(table)
    assert [device.peak_bytes for device in held] == [2, 2, 2, 2]


def test_evaluation_keeps_nothing() -> None:
    plan = forward_only(gpipe(devices=2, microbatches=5))
    assert [device.peak_activations for device in stretto.simulate(plan).summary().devices] == [1, 1]


@given(plans())
def test_all_memory_is_given_back(plan: stretto.Plan) -> None:
    table = Costs(activation_bytes=3, pending_bytes=2)
    for held in stretto.simulate(plan, table).memory(table):
        assert held.bytes is not None
        assert (held.activations[-1], held.pending[-1], held.bytes[-1]) == (0, 0, 0)
        assert np.all(np.diff(held.time) >= 0)


@given(plans())
def test_bubbles_and_busy_add_up(plan: stretto.Plan) -> None:
    found = stretto.simulate(plan).summary()
    for device in found.devices:
        assert device.busy + device.bubble == found.makespan
        assert device.busy <= device.span <= found.makespan
    assert 0 <= found.bubble_ratio < 1


def test_a_chain_of_communication_is_exposed_as_a_whole() -> None:
    """The last stage waits for its combine, and then for the backward's."""
    layers = stretto.layers.cut_layers([stretto.layers.MOE], stages=1)
    phases = {"attn": PhaseTimes(1, 1, 1), "mlp": PhaseTimes(1, 1, 1)}
    phases |= {"dispatch": PhaseTimes(1, 1), "combine": PhaseTimes(1, 1)}
    costs = Costs(phases=phases)
    plan = stretto.schedules.gpipe(devices=1, microbatches=1)
    summary = stretto.simulate(stretto.lower(plan, layers=layers, costs=costs), costs).summary()
    assert (summary.makespan, summary.devices[0].busy, summary.devices[0].exposed_comm) == (10, 6, 4)


def woven(*, overlap: bool, comm: float = 1.0) -> stretto.Timeline:
    phases = {"attn": PhaseTimes(1, 1, 1), "mlp": PhaseTimes(1, 1, 1)}
    phases |= {"dispatch": PhaseTimes(comm, comm), "combine": PhaseTimes(comm, comm)}
    plan = stretto.schedules.interleaved(devices=2, microbatches=8, overlap=overlap)
    program = stretto.lower(plan, layers=[[stretto.layers.MOE]] * 4, costs=(costs := Costs(phases=phases)))
    return stretto.simulate(program, costs)


def test_communication_hides_behind_compute_in_the_steady_state() -> None:
    for device in woven(overlap=True).communication(steady=True):
        # all but the first backward's first combine, and on device 0 the last forward's last one
        assert device.total - device.hidden in (1.0, 2.0)
        assert device.share == device.hidden / device.total
    for device in woven(overlap=False).communication(steady=True):
        assert (device.hidden, device.share) == (0.0, 0.0)
    for found, device in zip(woven(overlap=True).communication(), woven(overlap=True).summary().devices, strict=True):
        assert (device.comm, device.hidden_comm) == found
        assert found.total == 2 * 16 * 2  # two for each pass
        assert 0 < device.exposed_comm <= found.total - found.hidden  # in warm-up and cool-down
    assert all(isnan(found.share) for found in stretto.simulate(gpipe(devices=2, microbatches=2)).communication())


@given(plans())
def test_hidden_communication_is_a_part(plan: stretto.Plan) -> None:
    phases = {name: PhaseTimes(1, 2, 1) for name in ("attn", "mlp", "dispatch", "combine")}
    costs = Costs(phases=phases)
    timeline = stretto.simulate(stretto.lower(plan, layers=[[stretto.layers.MOE]] * plan.stages, costs=costs), costs)
    for whole, steady in zip(timeline.communication(), timeline.communication(steady=True), strict=True):
        assert 0 <= steady.total <= whole.total + 1e-9
        assert 0 <= steady.hidden <= min(steady.total, whole.hidden + 1e-9)
