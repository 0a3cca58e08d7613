"""The weight update against the closed forms of its three modes, and what `check` finds in broken ones."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto import Costs
from stretto.costs import BucketTimes, SharedResource
from stretto.program.task import Kind
from stretto.program.update import MODES, Mode

times = st.integers(0, 12)


def makespan(devices: int, buckets: int, mode: Mode, h2d: float, broadcast: float, reload: float) -> float:
    costs = Costs(bucket=BucketTimes(h2d=h2d, broadcast=broadcast, reload=reload))
    return stretto.simulate(stretto.weight_update(devices=devices, buckets=buckets, mode=mode), costs).makespan


@given(st.integers(2, 6), st.integers(1, 6), times, times, times)
def test_serial(devices: int, rounds: int, h2d: int, broadcast: int, reload: int) -> None:
    expected = rounds * h2d + rounds * devices * (broadcast + reload)
    assert makespan(devices, rounds * devices, "serial", h2d, broadcast, reload) == expected


@given(st.integers(2, 6), st.integers(1, 6), times, times, times)
def test_two_stages(devices: int, rounds: int, h2d: int, broadcast: int, reload: int) -> None:
    """Exact where a reload is no longer than a broadcast; otherwise a bound, as copies need not wait for reloads."""
    turn = max(broadcast, reload)
    first = h2d + broadcast + (devices - 1) * turn
    others = (rounds - 1) * (max(h2d + broadcast, reload) + (devices - 1) * turn)
    found = makespan(devices, rounds * devices, "overlap_reload", h2d, broadcast, reload)
    assert found <= first + others + reload
    if reload <= broadcast:
        assert found == first + others + reload


@given(st.integers(2, 6), st.integers(1, 40), times, times, times)
def test_three_stages(devices: int, buckets: int, h2d: int, broadcast: int, reload: int) -> None:
    """While copies keep up: a round's take no longer than its broadcasts or reloads."""
    turn = max(broadcast, reload)
    found = makespan(devices, buckets, "overlap_all", h2d, broadcast, reload)
    if h2d <= devices * turn:
        assert found == h2d + broadcast + reload + (buckets - 1) * turn
    else:
        assert found > h2d + broadcast + reload + (buckets - 1) * turn or buckets <= devices


@given(st.integers(1, 40), times, times)
def test_one_device_copies_straight_into_what_is_reloaded(buckets: int, h2d: int, reload: int) -> None:
    for mode in ("overlap_reload", "overlap_all"):
        assert makespan(1, buckets, mode, h2d, 99, reload) == h2d + reload + (buckets - 1) * max(h2d, reload)
    assert makespan(1, buckets, "serial", h2d, 99, reload) == buckets * (h2d + reload)


@given(st.integers(1, 6), st.integers(1, 20), times, times, times)
def test_more_overlap_is_never_slower(devices: int, buckets: int, h2d: int, broadcast: int, reload: int) -> None:
    found = [makespan(devices, buckets, mode, h2d, broadcast, reload) for mode in MODES]
    assert found == sorted(found, reverse=True)


@given(st.integers(1, 6), st.integers(1, 20), st.sampled_from(MODES))
def test_every_bucket_reaches_every_device(devices: int, buckets: int, mode: Mode) -> None:
    program = stretto.weight_update(devices=devices, buckets=buckets, mode=mode)
    assert stretto.check(program) == []
    for device in range(devices):
        tasks = [task for task in program.tasks() if task.device == device]
        assert [task.microbatch for task in tasks if task.kind is Kind.RELOAD] == list(range(buckets))
        assert [task.microbatch for task in tasks if task.kind is Kind.H2D] == list(range(device, buckets, devices))


@given(st.integers(1, 4), st.integers(1, 12), st.sampled_from(MODES), times, times, times)
def test_no_buffer_is_overwritten_while_it_is_read(
    devices: int, buckets: int, mode: Mode, h2d: int, broadcast: int, reload: int
) -> None:
    """Seen on the clock: a buffer's next filling begins when its last reading has ended."""
    costs = Costs(bucket=BucketTimes(h2d=h2d, broadcast=broadcast, reload=reload))
    timeline = stretto.simulate(stretto.weight_update(devices=devices, buckets=buckets, mode=mode), costs)
    spans = {(span.task.kind, span.task.device, span.task.microbatch): span for span in timeline.spans()}
    readers = {Kind.H2D: Kind.BROADCAST if devices > 1 else Kind.RELOAD, Kind.BROADCAST: Kind.RELOAD}
    for kind, reader in readers.items():
        for device in range(devices):
            fills = [span for span in spans.values() if span.task.kind is kind and span.task.device == device]
            for slot in (0, 1):
                for before, after in pairwise(span for span in fills if span.task.slot == slot):
                    assert after.start >= spans[reader, device, before.task.microbatch].end
            assert {span.task.slot for span in fills} <= {0, 1}


@given(st.integers(1, 4), st.integers(2, 12), st.sampled_from(MODES), st.data())
def test_check_finds_every_dropped_wait(devices: int, buckets: int, mode: Mode, data: st.DataObject) -> None:
    """Those for data and for buffers; what a mode waits for beyond them is its timing, not its soundness."""
    program = stretto.weight_update(devices=devices, buckets=buckets, mode=mode)
    readers = {Kind.H2D: Kind.BROADCAST if devices > 1 else Kind.RELOAD, Kind.BROADCAST: Kind.RELOAD}
    filled: dict[tuple[int, Kind, int], int] = {}  # what was last put into a buffer
    waits = []
    for at, task in enumerate(program.tasks()):
        held = filled.get((task.device, task.kind, task.slot), -1)
        for need in program.needs(at):
            other = program.task(need)
            if other.microbatch == task.microbatch or (
                other.microbatch == held and other.kind is readers.get(task.kind)
            ):
                waits.append((at, need))
        if task.slot >= 0:
            filled[task.device, task.kind, task.slot] = task.microbatch
    at, need = data.draw(st.sampled_from(waits))
    needing = program.needing
    kept = (needing != at) | (program.need != need)
    starts = np.concatenate(([0], np.cumsum(np.bincount(needing[kept], minlength=len(program)))))
    found = stretto.check(replace(program, need=program.need[kept], need_start=starts))
    assert any({at, need} <= set(violation.at) for violation in found)


def test_a_buffer_overwritten_before_it_was_read_is_named() -> None:
    program = stretto.weight_update(devices=2, buckets=4)
    slot = program.work.slot.copy()
    slot[program.work.kind == Kind.BROADCAST] = 0
    found = stretto.check(replace(program, work=replace(program.work, slot=slot)))
    assert str(found[0]) == (
        "buffers: BROADCAST1 fills buffer 0 of device 0 without waiting until RELOAD0 is done with "
        "what BROADCAST0 put there"
    )


def test_a_broadcast_that_misses_a_device_is_named() -> None:
    program = stretto.weight_update(devices=3, buckets=3)
    ends = [k for k, task in enumerate(program.tasks()) if str(task) == "BROADCAST1"]
    counterpart = program.counterpart.copy()
    counterpart[ends] = ends[1], ends[0], -1
    assert [str(found) for found in stretto.check(replace(program, counterpart=counterpart))] == [
        "transfers: the ends of BROADCAST1 do not meet, one on every device"
    ]


def test_a_bucket_from_elsewhere_is_named() -> None:
    program = stretto.weight_update(devices=2, buckets=2)
    flipped = replace(program, work=replace(program.work, stage=1 - program.work.stage))
    assert str(stretto.check(flipped)[0]) == (
        "placement: H2D0 on device 0 is to come from device 1, but its bucket is not there"
    )


def test_broadcasts_in_different_orders_deadlock() -> None:
    program = stretto.weight_update(devices=2, buckets=4, mode="overlap_all")
    first, second = (
        next(k for k, task in enumerate(program.tasks()) if task.device == 1 and str(task) == f"BROADCAST{bucket}")
        for bucket in (0, 1)
    )
    order = np.arange(len(program))
    order[[first, second]] = second, first  # device 1 comes to bucket 1 before bucket 0
    place = np.argsort(order)
    counterpart = np.where(program.counterpart >= 0, place[program.counterpart], -1)[order]
    work = stretto.program.columns.TaskColumns.joined((program.work,), order)  # type: ignore[attr-defined]
    needing, need = place[program.needing], place[program.need]
    by = np.argsort(needing, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(needing, minlength=len(program)))))
    swapped = replace(
        program, work=work, lane=program.lane[order], counterpart=counterpart, need=need[by], need_start=starts
    )
    found = stretto.check(swapped)
    assert found
    assert {violation.rule for violation in found} <= {"deadlock", "buffers", "dependencies"}


def test_a_shared_pcie_stalls_three_stages() -> None:
    """Copies that run ahead of need take bandwidth from the broadcasts beside them."""
    bucket = BucketTimes(h2d=2, broadcast=1, reload=0.5)
    program = stretto.weight_update(devices=4, buckets=32, mode="overlap_all")
    alone = stretto.simulate(program, Costs(bucket=bucket)).makespan
    shared = Costs(bucket=bucket, shared={"pcie": SharedResource(capacity=1, lanes={"h2d": 1, "broadcast": 1})})
    assert alone == 2 + 1 + 0.5 + 31
    assert stretto.simulate(program, shared).makespan > 1.3 * alone


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ({"devices": 0, "buckets": 1}, "a weight update needs at least 1 of devices (got 0)"),
        ({"devices": 2, "buckets": 0}, "a weight update needs at least 1 of buckets (got 0)"),
        ({"devices": 2, "buckets": 2, "mode": "four"}, "'four' is no mode of a weight update"),
    ],
)
def test_senseless_sizes_are_refused(size: dict[str, object], says: str) -> None:
    with pytest.raises(stretto.PlanError) as caught:
        stretto.weight_update(**size)  # type: ignore[arg-type]
    assert says in str(caught.value)
