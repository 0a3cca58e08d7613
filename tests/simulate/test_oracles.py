"""Simulated figures against closed forms, over random sizes and costs within each form's conditions.

p devices, m microbatches, v stages per device; F, I, W, B per stage; no communication.
"""

from math import ceil

from hypothesis import example, given
from hypothesis import strategies as st

import stretto
from strategies import costs
from stretto import Costs
from stretto.schedules import dualpipe, dualpipev, gpipe, interleaved, one_f_one_b, v_half, v_min, zb_h1, zb_h2, zb_v
from stretto.timeline import DeviceSummary

devices = st.integers(1, 6)


def summary(plan: stretto.Plan, table: Costs | None = None) -> tuple[DeviceSummary, ...]:
    return stretto.simulate(plan, table).summary(table).devices


def bubbles(found: tuple[DeviceSummary, ...]) -> set[float]:
    return {device.bubble for device in found}


def span_bubbles(found: tuple[DeviceSummary, ...]) -> set[float]:
    return {device.span - device.busy for device in found}


def activations(found: tuple[DeviceSummary, ...]) -> list[int]:
    return [device.peak_activations for device in found]


@given(devices, st.integers(1, 12), costs, costs)
def test_gpipe(p: int, m: int, f: int, b: int) -> None:
    found = summary(gpipe(devices=p, microbatches=m), Costs(F=f, B=b))
    assert bubbles(found) == {(p - 1) * (f + b)}
    assert activations(found) == [m] * p


@given(devices, st.integers(1, 12), costs, costs)
def test_1f1b(p: int, m: int, f: int, b: int) -> None:
    found = summary(one_f_one_b(devices=p, microbatches=m), Costs(F=f, B=b))
    assert bubbles(found) == {(p - 1) * (f + b)}
    assert activations(found) == [min(p - r, m) for r in range(p)]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 12), costs, costs)
def test_interleaved_bubble_whether_or_not_devices_divide_microbatches(
    p: int, v: int, more: int, f: int, b: int
) -> None:
    found = summary(interleaved(devices=p, microbatches=p + more, stages_per_device=v), Costs(F=f, B=b))
    assert bubbles(found) == {(p - 1) * (f + b)}


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_memory_where_devices_divide_microbatches(p: int, v: int, rounds: int) -> None:
    m = p * rounds
    found = summary(interleaved(devices=p, microbatches=m, stages_per_device=v))
    assert activations(found) == [min(p * v + p - 1 - 2 * r, m * v) for r in range(p)]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.data())
def test_woven_interleaved(p: int, v: int, rounds: int, data: st.DataObject) -> None:
    """Kimi K2's closed form; devices divide microbatches, f ≤ b ≤ fb ≤ f + b. One round is enough."""
    m = p * rounds
    f = data.draw(costs)
    b = data.draw(st.integers(f, 9))
    fb = data.draw(st.integers(b, f + b))
    table = Costs(F=f, B=b, FB=fb)
    timeline = stretto.simulate(interleaved(devices=p, microbatches=m, stages_per_device=v, overlap=True), table)
    assert timeline.makespan == p * v * (f + b) + (m * v - p * v + p - 1) * fb
    found = timeline.summary(table).devices
    assert activations(found) == [min((v + 1) * p - 2 * r, m * v) for r in range(p)]
    if rounds > 1:
        assert [device.bubble for device in found] == [
            2 * (p - r - 1) * fb - (p - 2 * r - 1) * (f + b) for r in range(p)
        ]


@st.composite
def light_weights(draw: st.DrawFn) -> tuple[int, int, int]:
    """F, I and W with W ≤ min(F, I)."""
    f, i = draw(costs), draw(costs)
    return f, i, draw(st.integers(1, min(f, i)))


@given(devices, st.integers(0, 8), light_weights())
def test_zb_h1(p: int, more: int, times: tuple[int, int, int]) -> None:
    """W ≤ min(F, I) and m ≥ p; the bytes also need pending ≤ activation bytes."""
    f, i, w = times
    table = Costs(F=f, I=i, W=w, activation_bytes=7, pending_bytes=5)
    found = summary(zb_h1(devices=p, microbatches=p + more), table)
    assert bubbles(found) == {(p - 1) * (f + i - w)}
    assert activations(found) == [p - r for r in range(p)]
    assert [device.peak_bytes for device in found] == [(p - r) * 7 + r * 5 for r in range(p)]


@given(devices, st.integers(0, 8), light_weights())
def test_zb_h2(p: int, more: int, times: tuple[int, int, int]) -> None:
    """W ≤ min(F, I) and m ≥ 2p − 1; the bubble is the worst device's within its span."""
    f, i, w = times
    table = Costs(F=f, I=i, W=w, activation_bytes=7, pending_bytes=5)
    found = summary(zb_h2(devices=p, microbatches=2 * p - 1 + more), table)
    assert max(span_bubbles(found)) == (p - 1) * (f + i - 2 * w)
    assert activations(found) == [2 * p - 2 * r - 1 for r in range(p)]
    assert [device.peak_bytes for device in found] == [(2 * p - 2 * r - 1) * 7 + 2 * r * 5 for r in range(p)]


@given(devices, st.integers(0, 8), costs)
def test_zb_v(p: int, more: int, unit: int) -> None:
    """F = I = W and m ≥ 2p − 1."""
    table = Costs(F=unit, I=unit, W=unit)
    found = summary(zb_v(devices=p, microbatches=2 * p - 1 + more), table)
    assert span_bubbles(found) == {0}
    assert activations(found) == [2 * p] * p
    assert [device.peak_live for device in found] == [2 * p] * p


@given(st.integers(1, 5), st.integers(0, 6), costs)
def test_dualpipe(half: int, more: int, unit: int) -> None:
    """F = I = W and F&B = 3F."""
    p = 2 * half
    table = Costs(F=unit, I=unit, W=unit)
    found = summary(dualpipe(devices=p, microbatches=2 * p + 2 * more), table)
    assert bubbles(found) == {(p // 2 - 1) * (3 * unit + 2 * unit - 3 * unit)}
    assert activations(found) == [p + 1] * p


@given(st.integers(1, 6), st.integers(0, 8), costs)
def test_dualpipev(half: int, more: int, unit: int) -> None:
    p = 2 * half
    table = Costs(F=unit, I=unit, W=unit)
    found = summary(dualpipev(devices=half, microbatches=p + more), table)
    assert bubbles(found) == {(p // 2 - 1) * (3 * unit + 2 * unit - 3 * unit)}
    assert activations(found) == [p + 1] * half


@given(st.integers(3, 24), st.integers(0, 10), costs)
@example(p=32, more=5, unit=1)
@example(p=33, more=0, unit=1)
def test_v_half(p: int, more: int, unit: int) -> None:
    """F = I = W, p ≥ 3, m ≥ p. An odd p trades one stage pass of memory for three passes of bubble."""
    table = Costs(F=unit, I=unit, W=unit)
    found = summary(v_half(devices=p, microbatches=p + more), table)
    assert bubbles(found) == {unit * (3 * p - (4 if p % 2 else 7))}
    assert max(device.peak_live for device in found) == p + (1 if p % 2 else 2)


@given(st.integers(3, 24), st.integers(0, 10), costs)
@example(p=32, more=5, unit=1)
def test_v_min(p: int, more: int, unit: int) -> None:
    """F = I = W, p ≥ 3, m ≥ p. The peak is ⌈(2p + 4) / 3⌉ rounded up to an even number."""
    table = Costs(F=unit, I=unit, W=unit)
    peak = 2 * ceil((p + 2) / 3)
    found = summary(v_min(devices=p, microbatches=p + more), table)
    assert max(device.peak_live for device in found) == peak
    assert bubbles(found) == {unit * (6 * p - 1 - 3 * peak)}


@given(st.sampled_from([v_half, v_min]), st.integers(1, 2), st.integers(0, 9))
def test_small_vs_lie_outside_the_formulas(schedule: object, p: int, more: int) -> None:
    found = summary(schedule(devices=p, microbatches=p + more))  # type: ignore[operator]
    assert bubbles(found) == {p - 1}
    assert max(device.peak_live for device in found) == 2 * p


@given(st.integers(2, 6), st.integers(1, 10), costs, costs, costs)
def test_decoupled_weight_gradients_shorten_1f1b(p: int, more: int, f: int, i: int, w: int) -> None:
    """With BW = W the gradient leaves after I: the bubble falls from (p−1)(F+B) to (p−1)(F+I)."""
    plan = one_f_one_b(devices=p, microbatches=p + more)
    found = summary(plan, Costs(F=f, I=i, W=w, BW=w))
    assert max(bubbles(found)) == (p - 1) * (f + i)
