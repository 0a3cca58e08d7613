"""What a push promises besides the bits: who waits for whom, what is not moved, and what is told of it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pushes
from pushes import same, tensors_of, until
from ranks import Ranks
from stretto.ir.errors import WeightsError
from stretto.weights.connection import Connection
from stretto.weights.messages import Filled, Message
from stretto.weights.receive.receiver import Receiver
from stretto.weights.receive.session import Session
from stretto.weights.receive.state import Hooks
from stretto.weights.send.choose import busy
from stretto.weights.send.push import Lanes
from stretto.weights.send.remotes import status
from stretto.weights.send.report import Report
from stretto.weights.send.sender import Sender

SECONDS = 60.0
SPEC = [("float32", (64, 33)), ("bfloat16", (7,)), ("int64", ())]


def empty(spec: pushes.Spec) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors_of(spec, 0).items()}


class Stays:
    """An engine that stays in one of its hooks, or in its loader, until it is let go."""

    def __init__(self, where: str) -> None:
        self._where, self.there, self.go_on = where, threading.Event(), threading.Event()

    def _come(self, where: str) -> None:
        if where == self._where:
            self.there.set()
            assert self.go_on.wait(SECONDS)

    def load(self, tensors: Any) -> list[str]:
        self._come("load")
        return [name for name, _ in tensors]

    @property
    def hooks(self) -> Hooks:
        return Hooks(
            pause=lambda _: self._come("pause"),
            begin=lambda: self._come("begin"),
            finish=lambda: self._come("finish"),
            flush_cache=lambda: self._come("flush_cache"),
        )


# Who waits for whom.


@pytest.mark.parametrize("senders", [1, 2])
def test_nobody_resumes_before_all_have_loaded(ranks: Ranks, folder: Path, senders: int) -> None:
    slow, resumed = Stays("finish"), list[bool]()
    hooks = Hooks(resume=lambda: resumed.append(slow.go_on.is_set()))
    with (
        Receiver(f"unix://{folder}/slow", slow.load, hooks=slow.hooks, device="cpu") as first,
        Receiver(f"unix://{folder}/quick", into=empty(SPEC), hooks=hooks) as second,
        ThreadPoolExecutor(1) as thread,
    ):
        first.start(), second.start()
        addresses = [str(first.address), str(second.address)]
        pushed = thread.submit(ranks.run, pushes.push, senders, SPEC, [1], addresses, {})
        try:
            assert slow.there.wait(SECONDS)
            until(lambda: second.status.state not in ("paused", "loading"), SECONDS)
            threading.Event().wait(0.3)  # in which it would resume if it did not wait
            assert (first.status.state, second.status.state) == ("loading", "loaded")
        finally:
            slow.go_on.set()
        for rank in pushed.result(SECONDS):
            assert rank[0].receivers == dict(zip(addresses, ("delivered", "verified"), strict=True))
        assert resumed == [True]
        assert first.ensure_serving() == second.ensure_serving() == "v1"


@pytest.mark.parametrize(
    ("where", "state"),
    [("pause", "paused"), ("begin", "loading"), ("load", "loading"), ("finish", "loading"), ("flush_cache", "loaded")],
)
def test_a_receiver_tells_how_it_is_in_the_middle_of_an_update(
    ranks: Ranks, folder: Path, where: str, state: str
) -> None:
    held, address = Stays(where), f"unix://{folder}/r"
    with (
        Receiver(address, held.load, hooks=held.hooks, version="old", device="cpu") as receiver,
        ThreadPoolExecutor(1) as thread,
    ):
        receiver.start()
        pushed = thread.submit(ranks.run, pushes.push, 1, SPEC, [1], [address], {})
        try:
            assert held.there.wait(SECONDS)
            for _ in range(2):
                told = status(address)
                assert (told.state, told.version, told.error) == (state, "old", "")
        finally:
            held.go_on.set()
        assert not isinstance(pushed.result(SECONDS)[0][0], str)
        told = status(address)
        assert (told.state, told.version, told.assurance) == ("serving", "v1", "delivered")


# What is not moved.


@pytest.mark.parametrize(
    ("wants", "slices", "buckets"),
    [
        (["t1", "t4"], {}, [1, 4]),
        (["t5"], {}, [5, 6, 7, 8]),
        (["t0", "t5"], {"t5": (slice(300, 700),)}, [0, 6, 7]),
    ],
)
def test_a_receiver_is_told_only_of_buckets_of_which_it_needs_something(
    folder: Path, monkeypatch: Any, wants: list[str], slices: dict[str, tuple[slice, ...]], buckets: list[int]
) -> None:
    spec = [*[("uint8", (256,))] * 5, ("uint8", (1024,))]
    tensors = tensors_of(spec, 1)
    whole, part = empty(spec), {name: torch.zeros_like(tensors[name][slices.get(name, ...)]) for name in wants}
    told: dict[str, list[int]] = {}
    send = Connection.send

    def telling(self: Connection, message: Message, *given: Any, **options: Any) -> None:
        if isinstance(message, Filled):
            told.setdefault(self._stream.getpeername(), []).append(message.bucket)
        send(self, message, *given, **options)

    with (
        Receiver(f"unix://{folder}/whole", into=whole) as first,
        Receiver(f"unix://{folder}/part", into=part, slices=slices) as second,
        Sender(device="cpu", bucket_bytes=256, split=True) as sender,
    ):
        first.start(), second.start()
        sender.register("v", tensors)
        monkeypatch.setattr(Connection, "send", telling)
        report = sender.push("v", [str(first.address), str(second.address)])
    assert report.buckets == 9
    assert told == {f"{folder}/whole": list(range(9)), f"{folder}/part": buckets}
    assert all(same(whole[name], tensor) for name, tensor in tensors.items())
    assert all(same(part[name], tensors[name][slices.get(name, ...)]) for name in wants)


def test_a_bucket_goes_only_to_senders_whose_receivers_want_it(ranks: Ranks, folder: Path) -> None:
    sizes = [256 * count for count in range(12, 5, -1)]  # no two fit a bucket, and bucket k comes from sender k mod 3
    spec = [("uint8", (size,)) for size in sizes]
    tensors = tensors_of(spec, 1)
    wants = [(0, 4, 5), (0, 3), (0, 1, 2, 4, 5)]
    live = [{f"t{k}": torch.zeros_like(tensors[f"t{k}"]) for k in wanted} for wanted in wants]
    receivers = [Receiver(f"unix://{folder}/{k}", into=into).start() for k, into in enumerate(live)]
    try:
        moved = ranks.run(pushes.moves, 3, spec, [str(it.address) for it in receivers], sizes[0])
    finally:
        for receiver in receivers:
            receiver.close()
    assert [[(how, sizes.index(size)) for how, size in rank] for rank in moved] == [
        [("broadcast", 0), ("send", 3), ("broadcast", 4), ("recv", 5)],
        [("broadcast", 0), ("send", 1), ("recv", 3), ("broadcast", 4)],
        [("broadcast", 0), ("recv", 1), ("broadcast", 4), ("send", 5)],
    ]
    assert all(same(tensor, tensors[name]) for into in live for name, tensor in into.items())


# What is told of it.


@pytest.mark.parametrize("senders", [1, 2])
def test_a_report_says_how_long_each_step_was_foreseen_to_take_and_took(
    ranks: Ranks, folder: Path, senders: int
) -> None:
    spec = [("uint8", (4 << 20,))] * 8  # enough to tell how fast it is moved
    receivers = [Receiver(f"unix://{folder}/{k}", into=empty(spec)).start() for k in range(senders)]
    try:
        options = {"sender": {"bucket_bytes": 4 << 20}, "push": {"record": True}}
        told = ranks.run(pushes.push, senders, spec, [1, 2], [str(it.address) for it in receivers], options)
    finally:
        for receiver in receivers:
            receiver.close()
    first: Report
    second: Report
    first, second = told[0]
    names = {"h2d", "reload"} if senders == 1 else {"h2d", "broadcast", "reload"}
    for report in (first, second):
        assert report.steps.keys() == names
        assert report.timeline is not None
        assert {name: step.actual for name, step in report.steps.items()} == pytest.approx(
            busy(report.timeline), rel=1e-3
        )
        for step in report.steps.values():
            assert 0 < step.predicted <= report.moving.predicted
            assert 0 < step.actual <= report.moving.actual <= report.seconds
    for name in names:  # from the speeds that the push before has measured, unless they were like those known
        assert second.steps[name].predicted == pytest.approx(first.steps[name].actual, rel=0.12)


class Stream:
    """Of a device: what is queued on it has ended a little later, and somebody waits for that."""

    def __init__(self) -> None:
        self.awaited = self.queued = 0

    def record_event(self, _: Any = None) -> Any:
        self.queued += 1
        reached = threading.Event()
        threading.Timer(0.01, reached.set).start()

        def synchronize() -> None:
            assert reached.wait(SECONDS)
            self.awaited += 1

        return SimpleNamespace(synchronize=synchronize)


class TimedEvent(SimpleNamespace):
    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: Any) -> float:
        return 1000.0


@pytest.mark.parametrize("wrong", [False, True])
def test_a_device_copies_the_first_buckets_while_receivers_are_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    spec = [("float32", (60,))] * 7
    live, stream = empty([("float32", (60 + wrong,))] * 7), Stream()
    begun, opens = [], Session._open

    def opened(session: Session, *given: Any) -> Message:
        begun.append(stream.queued)
        return opens(session, *given)

    monkeypatch.setattr(Session, "_open", opened)
    with Receiver(f"unix://{folder}/r", into=live) as receiver, Sender(device="cpu", bucket_bytes=256) as sender:
        receiver.start()
        sender._lanes.close()
        sender._lanes = Lanes(sender.device, streams={"h2d": stream})
        sender.register("v", tensors_of(spec, 1))
        with pytest.raises(WeightsError, match="does not fit") if wrong else nullcontext():
            report = sender.push("v", [str(receiver.address)])
        assert begun == [6]  # two copies, each between two events and followed by one
        if wrong:  # they are not left to themselves
            assert stream.awaited == 2
            return
    assert all(same(live[name], it) for name, it in tensors_of(spec, 1).items())
    assert stream.queued == 6 + 5  # none is made twice
    assert report.steps["h2d"].actual > 2  # those ahead count


def test_copies_that_a_device_has_yet_to_make_are_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    spec = [("float32", (60,))] * 7
    live, stream = empty(spec), Stream()
    with Receiver(f"unix://{folder}/r", into=live) as receiver, Sender(device="cpu", bucket_bytes=256) as sender:
        receiver.start()
        sender._lanes.close()
        sender._lanes = Lanes(sender.device, streams={"h2d": stream})
        sender.register("v", tensors_of(spec, 1))
        report = sender.push("v", [str(receiver.address)], record=True)
    assert all(same(live[name], it) for name, it in tensors_of(spec, 1).items())
    assert stream.awaited == report.buckets == 7
    timeline = report.timeline
    assert timeline is not None
    rows = {
        it.name: [k for k, task in enumerate(timeline.program.tasks()) if task.lane == it]
        for it in timeline.program.lanes
    }
    copied, loaded = (timeline.end[rows[name]] for name in ("h2d", "reload"))
    assert (timeline.start[rows["h2d"]][1:] >= copied[:-1]).all()  # one after the other, though queued before
    assert (timeline.start[rows["reload"]] >= copied).all()
    assert (loaded >= timeline.start[rows["reload"]]).all()
    assert (copied > timeline.start[rows["h2d"]]).all()
