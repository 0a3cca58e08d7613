"""A measured timeline: of the same tasks, on one clock, and what it says."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

import stretto
from devices import DEVICE, device_ranks
from models import Case, recorded
from ranks import Ranks
from stretto.program.task import SENDS
from stretto.program.wgrads import joined_ends
from stretto.timeline import Span
from stretto.timeline.trace import parse_trace


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = device_ranks(4)
    yield made
    made.stop()


def _queues(spans: Sequence[Span], device: int) -> list[list[Span]]:
    """The phases of a device in the order of their queues: on a CPU both lanes are one thread."""
    queues = [("compute",), ("comm",)] if DEVICE.type == "cuda" else [("compute", "comm")]
    found = ([s for s in spans if s.task.device == device and s.task.lane.name in names] for names in queues)
    return [spans for spans in found if spans]


@pytest.mark.parametrize(("name", "phased"), [("one_f_one_b", False), ("dualpipe", False), ("interleaved", True)])
def test_a_step_is_recorded(ranks: Ranks, name: str, phased: bool) -> None:
    case = Case(name, 4, 8, layers=10, phased=phased)
    counted = name == "dualpipe"
    first, *others = ranks.run(recorded, 4, case, counted)
    assert others == [None] * 3
    timeline = parse_trace(first)
    assert timeline.unit == "s"
    program = timeline.program
    assert stretto.check(program) == []
    assert (timeline.end >= timeline.start).all()
    spans = list(timeline.spans())
    for device in range(4):
        for lane in _queues(spans, device):
            assert lane
            assert all(before.end <= after.start for before, after in pairwise(lane))  # it runs one thing at a time
    slack = 1e-3  # by which clocks may be off
    for task, need in zip(program.needing.tolist(), program.need.tolist(), strict=True):
        if program.task(need).lane.name in ("compute", "comm"):
            assert timeline.end[need] <= timeline.start[task] + slack
    for send, kind in enumerate(program.work.kind.tolist()):
        if kind in SENDS:
            receive = program.counterpart[send]
            assert timeline.end[receive] >= timeline.start[send] - slack
            # One that was asked for long before begins when it is sent.
            assert timeline.start[receive] >= min(timeline.start[send], timeline.end[receive])
    assert timeline.issued is not None
    assert (timeline.issued <= timeline.start + slack).all()
    busy = timeline.summary()
    assert all(0 <= device.host_late <= device.bubble for device in busy.devices)
    assert timeline.summary().makespan < 60
    assert (timeline.allocated is not None) == (counted or DEVICE.type == "cuda")
    for device, memory in enumerate(timeline.allocated_memory() or []):
        if counted:
            assert memory.bytes.tolist() == [1000 * device + at for at in range(len(memory.task))]
    fitted = stretto.simulate(program, stretto.fit(timeline))
    assert 0 < fitted.makespan < 60


@pytest.mark.parametrize(("name", "phased"), [("zb_v", False), ("dualpipe", True)])
def test_weight_gradients_that_are_computed_as_one_share_its_time(ranks: Ranks, name: str, phased: bool) -> None:
    case = Case(name, 4, 8, layers=10, phased=phased, wgrad_microbatches=4)
    timeline = parse_trace(ranks.run(recorded, 4, case)[0])
    spans = list(timeline.spans())
    for device in range(4):
        for lane in _queues(spans, device):
            assert all(before.end <= after.start for before, after in pairwise(lane))
        own = [span for span in spans if span.task.device == device]
        for at, last in joined_ends([span.task for span in own], 4).items():
            length, of_last = own[at].end - own[at].start, own[last].end - own[last].start
            assert length == pytest.approx(of_last, rel=1e-3, abs=1e-9)
