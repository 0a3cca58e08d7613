"""Hypothesis strategies: any of our plans, at any small legal size."""

from collections.abc import Callable

from hypothesis import strategies as st

import stretto

SCHEDULES: dict[str, Callable[..., stretto.Plan]] = {
    "gpipe": stretto.gpipe,
    "one_f_one_b": stretto.one_f_one_b,
    "interleaved": stretto.interleaved,
    "zb_h1": stretto.zb_h1,
    "zb_h2": stretto.zb_h2,
    "zb_v": stretto.zb_v,
    "v_half": stretto.v_half,
    "v_min": stretto.v_min,
    "dualpipe": stretto.dualpipe,
    "dualpipev": stretto.dualpipev,
}


@st.composite
def plans(draw: st.DrawFn, *, devices: int = 5, microbatches: int = 10) -> stretto.Plan:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p = draw(st.integers(1, devices))
    extra = {}
    if name == "interleaved":
        extra = {"virtual": draw(st.integers(1, 3)), "overlap": draw(st.booleans())}
    if name == "dualpipe":
        p = 2 * max(1, p // 2)
        m = 2 * p + 2 * draw(st.integers(0, 3))
    elif name == "dualpipev":
        p = max(1, p // 2)
        m = 2 * p + draw(st.integers(0, 5))
    else:
        m = draw(st.integers(1, microbatches))
    return SCHEDULES[name](devices=p, microbatches=m, **extra)


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
