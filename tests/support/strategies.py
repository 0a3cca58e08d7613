"""Hypothesis strategies: any of our plans, at any small legal size."""

from hypothesis import strategies as st

import stretto
from stretto.schedules import SCHEDULES


@st.composite
def plans(draw: st.DrawFn, *, devices: int = 5, microbatches: int = 10) -> stretto.Plan:
    schedule = draw(st.sampled_from(list(SCHEDULES.values())))
    extra = {}
    if schedule.variable:
        extra = {"stages_per_device": draw(st.integers(1, 3)), "overlap": draw(st.booleans())}
    p, m = draw(st.integers(1, devices)), draw(st.integers(1, microbatches))
    if schedule.rounds:  # the least number of microbatches grows with the devices
        p = max(1, p // 2)
        m = schedule.rounds * p + m // 2
    if schedule.even:
        p, m = 2 * p, 2 * max(schedule.rounds * p, m // 2)
    return schedule.make(devices=p, microbatches=m, **extra)


@st.composite
def mesh_plans(
    draw: st.DrawFn, *, devices: int = 3, microbatches: int = 5, ep: int = 3, dp: int = 2, least_ep: int = 2
) -> stretto.Plan:
    """A plan on a mesh with several expert-parallel ranks; its dimensions come in any order."""
    plan = draw(plans(devices=devices, microbatches=microbatches))
    sizes = {"pp": plan.devices, "ep": draw(st.integers(least_ep, ep)), "dp": draw(st.integers(1, dp))}
    return plan.on_mesh({name: sizes[name] for name in draw(st.permutations(list(sizes)))})


costs = st.integers(1, 9)


@st.composite
def own_calls(draw: st.DrawFn) -> list[stretto.Call]:
    """Sound ones: a call needs what stands before it on its device, and ends of one name stand together."""
    devices = draw(st.integers(1, 3))
    calls: list[stretto.Call] = []
    for number in range(draw(st.integers(1, 12))):
        for device in draw(st.lists(st.integers(0, devices - 1), min_size=1, max_size=devices, unique=True)):
            before = [call.name for call in calls if call.device == device and call.name != f"c{number}"]
            needs = draw(st.lists(st.sampled_from(before), max_size=2, unique=True)) if before else []
            calls.append(stretto.Call(f"c{number}", device, draw(st.sampled_from(["compute", "disk", "send"])), needs))
    return calls
