"""Lanes that share what they draw on, against cases worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import mesh_plans, plans
from stretto import Costs
from stretto.costs import BucketTimes, Link, SharedResource
from stretto.layers import MOE
from stretto.schedules import gpipe, interleaved


def spans(timeline: stretto.Timeline) -> dict[str, tuple[float, float]]:
    return {f"{span.task} {span.task.device}": (span.start, span.end) for span in timeline.spans()}


def test_four_ranks_on_two_cores_take_twice_as_long() -> None:
    plan = stretto.parse_plan("0F0\n1F1\n2F2\n3F3")  # nobody needs anybody
    cores = {"cores": SharedResource(capacity=2, lanes={"compute": 1}, devices=4)}
    timeline = stretto.simulate(plan, Costs(F=3, shared=cores))
    assert timeline.makespan == 6
    assert stretto.simulate(plan, Costs(F=3)).makespan == 3


def test_unequal_tasks_share_until_one_is_done() -> None:
    """Works of 2 and 6 on one core: both at half speed until 4, and the longer one alone until 8."""
    plan = stretto.parse_plan("0F0\n1F1")
    timeline = stretto.simulate(plan, Costs(F=(2, 6), shared={"core": SharedResource(1, {"compute": 1}, devices=2)}))
    assert spans(timeline) == {"0F0 0": (0, 4), "1F1 1": (0, 8)}


def test_who_wants_little_gets_it() -> None:
    """Capacity 10: one lane wants 2 and gets it; the other wants 16, gets 8, and takes twice as long."""
    costs = Costs(
        bucket=BucketTimes(h2d=0, broadcast=4, reload=4),
        shared={"bus": SharedResource(10, {"broadcast": 2, "reload": 16})},
    )
    timeline = stretto.simulate(stretto.weight_update(devices=2, buckets=2, mode="overlap_all"), costs)
    found = spans(timeline)
    assert found["BROADCAST0 0"] == (0, 4)
    assert found["BROADCAST1 0"] == (4, 8)  # at full speed beside the reload
    # RELOAD0 at 10/16 when alone would need 6.4; until 8 it has 8/16: 2 of its 4 are done, and 10/16 from then on.
    assert found["RELOAD0 0"] == (4, pytest.approx(8 + 2 / 0.625))


def test_both_ways_over_pcie_are_slower_than_one() -> None:
    """A link that gives 55 each way and 96 both ways at once."""
    plan = interleaved(devices=4, stages_per_device=2, microbatches=8, overlap=True)
    program = stretto.lower(plan, offload=1)
    pcie = {"pcie": SharedResource(96.0, {"d2h": 55.0, "h2d": 55.0})}
    base = Costs(F=100, I=100, W=100, activation_bytes=55, host=Link(bandwidth=55))
    shared = Costs(F=100, I=100, W=100, activation_bytes=55, host=Link(bandwidth=55), shared=pcie)
    lengths = {
        name: sorted(
            {
                round(end - start, 9)
                for task, (start, end) in spans(stretto.simulate(program, costs)).items()
                if "LOAD" in task
            }
        )
        for name, costs in (("alone", base), ("shared", shared))
    }
    assert lengths["alone"] == [1.0]
    assert lengths["shared"] == [1.0, round(110 / 96, 9)]  # alone, or beside a copy the other way


def test_what_gets_nothing_never_ends() -> None:
    hopeless = {"x": SharedResource(1e-200, {"compute": 1e200})}
    with pytest.raises(stretto.CostError, match="longer than a number can say"):
        stretto.simulate(gpipe(devices=1, microbatches=1), Costs(shared=hopeless))


def test_a_transfer_goes_at_the_speed_of_its_slower_side() -> None:
    """Device 0 sends while it also copies out; device 1 does nothing else."""
    costs = Costs(
        F=1,
        link=Link(latency=4),
        host=Link(latency=4),
        shared={"nic": SharedResource(1, {"send": 1, "recv": 1, "d2h": 1})},
    )
    plan = stretto.parse_plan("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3")
    found = spans(stretto.simulate(stretto.lower(plan, offload=1), costs))
    assert found["0SEND_F0 0"] == found["1RECV_F0 1"] == (1, 9)  # halved beside the offload
    assert found["0OFFLOAD0 0"] == (1, 9)


def test_every_end_of_what_ranks_do_together_gets_a_share() -> None:
    """Two cores for four devices: a pass that two ranks run together, beside one on each of the other two."""
    plan = gpipe(devices=2, microbatches=2).on_mesh({"pp": 2, "ep": 2})
    costs = Costs(F=1, shared={"cores": SharedResource(2, {"compute": 1}, devices=4)})
    found = spans(stretto.simulate(stretto.lower(plan, experts=[0]), costs))
    assert found["0F0 0"] == found["0F2 1"] == (0, 1)
    assert found["0F1 0"] == found["0F3 1"] == found["1F0 2"] == found["1F2 3"] == (1, 3)


def test_both_ends_of_a_transfer_get_a_share() -> None:
    """A bus of 3 for a transfer (two ends that want 2) and a copy that wants 2: each of the three gets 1."""
    costs = Costs(
        F=1,
        link=Link(latency=4),
        host=Link(latency=4),
        shared={"bus": SharedResource(3, {"send": 2, "recv": 2, "d2h": 2}, devices=2)},
    )
    plan = stretto.parse_plan("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3")
    found = spans(stretto.simulate(stretto.lower(plan, offload=1), costs))
    assert found["0SEND_F0 0"] == found["1RECV_F0 1"] == found["0OFFLOAD0 0"] == (1, 9)


@given(mesh_plans(), st.integers(1, 4))
def test_rings_of_equal_ranks_share_as_tasks_of_their_own_do(plan: stretto.Plan, cores: int) -> None:
    costs = Costs(F=2, shared={"cores": SharedResource(cores, {"compute": 1}, devices=99)})
    together, apart = (
        stretto.simulate(stretto.lower(plan, experts=experts), costs) for experts in (range(plan.stages), [])
    )
    assert together.makespan == pytest.approx(apart.makespan)


@given(plans(), st.integers(0, 1), st.booleans())
def test_more_than_enough_changes_nothing(plan: stretto.Plan, room: int, phases: bool) -> None:
    program = stretto.lower(plan, layers=[[MOE]] * plan.stages if phases else None, offload=room)
    plenty = {"all": SharedResource(1e6, {"compute": 1, "send": 1, "recv": 1, "d2h": 1, "h2d": 1}, devices=99)}
    table = {"F": 1.5, "activation_bytes": 3, "host": Link(bandwidth=4), "link": Link(latency=0.25)}
    alone, beside = (stretto.simulate(program, Costs(**table, **more)) for more in ({}, {"shared": plenty}))  # type: ignore[arg-type]
    assert alone.start == pytest.approx(beside.start)
    assert alone.end == pytest.approx(beside.end)


@given(plans(), st.integers(1, 4))
def test_cores_are_never_overbooked(plan: stretto.Plan, cores: int) -> None:
    """Whatever the order, the work done cannot exceed what the cores give."""
    costs = Costs(shared={"cores": SharedResource(cores, {"compute": 1}, devices=99)})
    timeline = stretto.simulate(plan, costs)
    work = sum(device.busy for device in stretto.simulate(plan).summary().devices)
    assert timeline.makespan >= work / cores - 1e-9
    assert timeline.makespan >= stretto.simulate(plan).makespan - 1e-9
    if cores >= plan.devices:
        assert timeline.makespan == pytest.approx(stretto.simulate(plan).makespan)
    if cores == 1:
        assert timeline.makespan == pytest.approx(work)


@pytest.mark.parametrize(
    ("shared", "says"),
    [
        (SharedResource(0, {"h2d": 1}), "shared.x.capacity must be above 0"),
        (SharedResource(1, {"h2d": 0}), "shared.x.h2d must be above 0"),
        (SharedResource(1, {"pcie": 1}), "shared.x names lane 'pcie'; known are compute"),
        (SharedResource(1, {"h2d": 1}, devices=0), "shared.x.devices must be a whole number of at least 1 (got 0)"),
        (SharedResource(1, {"h2d": 1}, devices=True), "shared.x.devices must be a whole number"),
        (SharedResource(1, [1]), "shared.x.lanes says how much each lane draws, by its name (got [1])"),
        (3, "shared.x must be a SharedResource (got 3)"),
    ],
)
def test_senseless_sharing_is_refused(shared: SharedResource, says: str) -> None:
    with pytest.raises(stretto.CostError) as caught:
        Costs(shared={"x": shared})
    assert says in str(caught.value)
