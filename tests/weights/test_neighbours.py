"""No neighbour's trouble: what one receiver or sender does, or fails to do, is not paid for by the others."""

import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from openings import after_opening, opening
from pushes import until
from stretto.execute.recorder import Recorder
from stretto.ir.errors import PeerError, WeightsError
from stretto.weights import Hooks, PushError, Receiver, Sender, status
from stretto.weights.connection import PeerClosed
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.listener import Listener, connect
from stretto.weights.manifest import TensorSpec
from stretto.weights.messages import Abandon, Begin, Begun, Buffers, Failed, Filled, Pause, Paused, Ready
from stretto.weights.receive import receiver as receiving
from stretto.weights.receive.session import Session
from stretto.weights.receive.state import ReceiverState
from stretto.weights.regions import whole
from stretto.weights.send import receiver_group
from stretto.weights.send.endpoint import Wanted
from stretto.weights.sources.shard import Shard

SECONDS = 60.0


class Engine:
    """A receiver of one tensor, and what its hooks were called for."""

    def __init__(self, folder: Path, name: str, **hooks: Callable[..., None]) -> None:
        self.calls: list[str] = []
        self.live = {"w": torch.zeros(100)}
        self._hooks = hooks
        noted = {it: self._noting(it) for it in ("pause", "begin", "finish", "flush_cache", "resume")}
        self.receiver = Receiver(f"unix://{folder}/{name}", into=self.live, hooks=Hooks(**noted)).start()
        self.address = str(self.receiver.address)

    def _noting(self, name: str) -> Callable[..., None]:
        def hook(*given: Any) -> None:
            self.calls.append(name)
            if name in self._hooks:
                self._hooks[name](*given)

        return hook


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**hooks: Callable[..., None]) -> Engine:
        made.append(Engine(folder, str(len(made)), **hooks))
        return made[-1]

    yield make
    for it in made:
        it.receiver.close()


def no(why: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        raise RuntimeError(why)

    return hook


def registered(**options: Any) -> Sender:
    sender = Sender(device="cpu", **options)
    sender.register("v", {"w": torch.ones(100)})
    return sender


# Pausing.


def test_one_that_cannot_pause_leaves_the_others_serving(engine: Any) -> None:
    stuck, fine = engine(pause=no("it will not stop")), engine()
    with registered() as sender:
        with pytest.raises(WeightsError, match="pause failed: RuntimeError: it will not stop"):
            sender.push("v", [stuck.address, fine.address])
        until(lambda: fine.calls == ["pause", "resume"], SECONDS)
        for one in (stuck, fine):
            until(lambda one=one: one.receiver.ensure_serving() == "initial", SECONDS)
            assert one.live["w"].sum() == 0
        stuck._hooks.clear()
        assert set(sender.push("v", [stuck.address, fine.address]).receivers.values()) == {"verified"}


def test_one_long_generation_takes_nobody_out_of_service(engine: Any) -> None:
    over = threading.Event()
    long, fine = engine(pause=lambda _: over.wait(SECONDS)), engine()
    with registered(timeout=5) as sender:
        with pytest.raises(WeightsError, match=r"it did not answer in time \(pause; timeout=[0-9.]+\)"):
            sender.push("v", [long.address, fine.address])
        until(lambda: fine.calls == ["pause", "resume"], SECONDS)
        assert fine.receiver.ensure_serving() == "initial"
        over.set()
        until(lambda: long.calls == ["pause", "resume"], SECONDS)
        assert long.receiver.ensure_serving() == "initial"
        sender.push("v", [long.address, fine.address])


def test_a_sender_that_leaves_during_a_pause_is_noticed_before_anything_is_touched(engine: Any) -> None:
    over = threading.Event()
    one = engine(pause=lambda _: over.wait(SECONDS))
    connection = connect(one.address)
    shared = SharedBuffers(512, torch.device("cpu"))
    buffers, files = shared.described(local=True)
    connection.send(opening(buffers=buffers), files)
    assert isinstance(connection.recv(seconds=SECONDS)[0], Ready)
    connection.send(Pause("wait", 60))
    until(lambda: one.calls == ["pause"], SECONDS)
    connection.close()
    over.set()
    until(lambda: one.calls == ["pause", "resume"], SECONDS)
    until(lambda: one.receiver.status.state == "serving", SECONDS)
    shared.close()


def test_a_receiver_is_dirty_from_its_first_write_and_not_before(folder: Path) -> None:
    live = {"w": torch.zeros(100)}
    with Receiver(f"unix://{folder}/r", into=live) as receiver:
        receiver.start()
        for words, state in (
            ((Pause("wait", 60),), "serving"),
            ((Pause("wait", 60), Begin()), "serving"),
            ((Pause("wait", 60), Begin(), Filled(0, 0, b"not its sum")), "serving"),
        ):
            connection = connect(str(receiver.address))
            after_opening(connection, *words)
            connection.close()
            until(lambda state=state: receiver.status.state == state, SECONDS)
            until(lambda: not receiver._state.busy, SECONDS)
        assert receiver.ensure_serving() == "initial"


def test_a_dirty_one_stays_dirty_whatever_comes_to_nothing(engine: Any) -> None:
    one, stuck = engine(finish=no("cannot quantise")), engine()
    with registered() as sender:
        with pytest.raises(WeightsError, match="cannot quantise"):
            sender.push("v", [one.address])
        assert one.receiver.status.state == "dirty"
        stuck._hooks["pause"] = no("it will not stop")
        with pytest.raises(WeightsError, match="it will not stop"):
            sender.push("v", [one.address, stuck.address])
        until(lambda: one.receiver.status.state == "dirty", SECONDS)
        assert "resume" not in one.calls


# The end.


def test_an_error_at_the_end_says_who_serves_what(engine: Any) -> None:
    fine, lost = engine(), engine(resume=no("no memory left"))
    with registered() as sender, pytest.raises(PushError) as error:
        sender.push("v", [fine.address, lost.address])
    said = error.value
    assert said.version == "v"
    assert said.serving == {fine.address: "verified"}
    assert list(said.failed) == [lost.address]
    assert str(said).startswith(f"the push of v failed at its end: {fine.address} serves it; {lost.address} does not: ")
    assert "no memory left" in str(said)
    assert "\n" not in str(said)
    assert fine.receiver.ensure_serving() == "v"
    assert lost.receiver.status.state == "dirty"


def test_of_one_that_does_not_answer_at_the_end_nothing_is_claimed(engine: Any) -> None:
    over = threading.Event()
    slow, fine = engine(resume=lambda: over.wait(SECONDS)), engine()
    with registered(timeout=5) as sender, pytest.raises(PushError, match="may or may not: it is slow") as error:
        sender.push("v", [slow.address, fine.address])
    over.set()
    assert (error.value.serving, error.value.failed) == ({fine.address: "verified"}, {})
    assert list(error.value.unknown) == [slow.address]
    until(lambda: slow.receiver.status.version == "v", SECONDS)


@pytest.mark.parametrize("error", [RuntimeError("no clock"), PeerError("rank 1 died")])
def test_a_push_that_went_well_is_reported_so_whatever_happens_to_its_figures(
    engine: Any, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise error

    one = engine()
    with registered() as sender:
        monkeypatch.setattr(Recorder, "gathered", broken)
        report = sender.push("v", [one.address], record=True)
        assert report.receivers == {one.address: "verified"}
        assert report.timeline is None
        assert f"the push has gone well, but how long it took at other senders is not known: {error}" in caplog.text
        monkeypatch.undo()
        if isinstance(error, PeerError):
            with pytest.raises(WeightsError, match="cannot go on: rank 1 died; start the senders again"):
                sender.push("v", [one.address])
        else:
            sender.push("v", [one.address])


# Deadlines.


def test_a_receiver_waits_for_a_sender_that_lives_but_does_not_go_on_only_so_long(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_group, "_AHEAD", 1)
    hang, told = threading.Event(), threading.Event()

    def progress(*_: object) -> None:
        told.set()
        hang.wait(SECONDS)

    one = engine()
    with registered(timeout=6, bucket_timeout=5) as sender:
        failed: list[BaseException] = []

        def push() -> None:
            try:
                sender.push("v", [one.address], progress=progress)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=push)
        thread.start()
        assert told.wait(SECONDS)
        until(lambda: one.receiver.status.state == "dirty", SECONDS)
        assert one.receiver.status.error == "the sender lives, but has not gone on for 11 s"
        hang.set()
        thread.join(SECONDS)
        assert isinstance(failed[0], WeightsError)
        assert sender.push("v", [one.address]).receivers == {one.address: "verified"}


HOLDING = """
import ctypes, sys
from stretto.weights import Receiver

def load(tensors):
    ctypes.PyDLL(None).usleep(int(1e6 * float(sys.argv[2])))  # and lets no other thread run
    return [name for name, _ in tensors]

receiver = Receiver(sys.argv[1], load, device="cpu")
print("ready", flush=True)
receiver.serve()
"""


@pytest.mark.parametrize(("seconds", "allowed"), [(7, 10**8), (12, 8)])
def test_a_loader_that_holds_pythons_lock_is_judged_by_its_time_for_a_bucket(
    folder: Path, seconds: int, allowed: int
) -> None:
    address = f"unix://{folder}/r"
    process = subprocess.Popen([sys.executable, "-c", HOLDING, address, str(seconds)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with registered(bucket_timeout=allowed) as sender:
            if seconds < allowed:
                assert sender.push("v", [address]).receivers == {address: "delivered"}
            else:
                with pytest.raises(WeightsError, match=r"bucket 0; bucket_timeout=8"):
                    sender.push("v", [address])
    finally:
        process.kill()
        process.communicate()


def test_a_sender_that_has_opened_is_not_thrown_out_by_another(folder: Path) -> None:
    with Receiver(f"unix://{folder}/r", into={"w": torch.zeros(100)}) as receiver:
        receiver.start()
        first, second = (connect(str(receiver.address)) for _ in range(2))
        shared = SharedBuffers(512, torch.device("cpu"))
        buffers, files = shared.described(local=True)
        first.send(opening(buffers=buffers), files)
        assert isinstance(first.recv(seconds=SECONDS)[0], Ready)
        second.send(opening())
        assert second.recv(seconds=SECONDS)[0] == Failed("is busy with another update", dirty=False)
        first.send(Pause("wait", 60))
        assert first.recv(seconds=SECONDS)[0] == Paused()
        first.send(Begin())
        assert first.recv(seconds=SECONDS)[0] == Begun()
        first.close()
        until(lambda: not receiver._state.busy, SECONDS)
        second.send(opening(buffers=buffers), files)
        assert isinstance(second.recv(seconds=SECONDS)[0], Ready)
        second.close()
        shared.close()


def test_a_sender_that_comes_back_at_once_is_not_told_that_its_own_failure_keeps_the_receiver_busy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Session._answer

    def slowly(session: Session, *arguments: Any) -> None:
        answer(session, *arguments)
        time.sleep(0.3)  # it has answered, and still counts as busy

    monkeypatch.setattr(Session, "_answer", slowly)
    monkeypatch.setattr(receiving, "_BUSY_SECONDS", 30.0)
    with Receiver(f"unix://{folder}/r", into={"w": torch.zeros(100)}) as receiver:
        receiver.start()
        first = connect(str(receiver.address))
        first.send(opening())  # without a file for its buffers
        assert isinstance(first.recv(seconds=SECONDS)[0], Failed)
        first.close()
        with registered() as sender:
            assert sender.push("v", [str(receiver.address)]).receivers == {str(receiver.address): "verified"}


def test_pause_and_resume_alternate_so_that_a_lock_will_do(folder: Path) -> None:
    generating, failures = threading.Lock(), [ValueError("no room"), ValueError("no room")]
    calls: list[str] = []

    def load(tensors: Any) -> list[str]:
        if failures:
            raise failures.pop()
        return [name for name, _ in tensors]

    def pause(_: object) -> None:
        calls.append("pause")
        assert generating.acquire(timeout=SECONDS)

    def resume() -> None:
        calls.append("resume")
        generating.release()

    hooks = Hooks(pause=pause, prepare=lambda: calls.append("prepare"), resume=resume)
    with Receiver(f"unix://{folder}/r", load, hooks=hooks, device="cpu") as receiver, registered() as sender:
        receiver.start()
        for _ in range(2):
            with pytest.raises(WeightsError, match="no room"):
                sender.push("v", [str(receiver.address)])
            until(lambda: receiver.status.state == "dirty", SECONDS)
            assert "no room" in receiver.status.error
        for _ in range(2):
            assert sender.push("v", [str(receiver.address)]).receivers == {str(receiver.address): "delivered"}
        assert receiver.status.error == ""
    assert calls == ["pause", "prepare", "prepare", "prepare", "resume", "pause", "prepare", "resume"]


def test_a_receiver_that_serves_late_does_not_wait_for_those_who_have_left(folder: Path) -> None:
    with Receiver(f"unix://{folder}/r", into={"w": torch.zeros(100)}) as receiver:
        first, second = (connect(str(receiver.address)) for _ in range(2))
        first.send(opening())
        until(lambda: receiver._waiting is not None, SECONDS)
        second.send(opening())
        assert second.recv(seconds=SECONDS)[0] == Failed("is busy with another update", dirty=False)
        first.close()
        second.close()
        pushed = threading.Timer(0.5, receiver.start)
        pushed.start()
        with registered() as sender:
            assert sender.push("v", [str(receiver.address)]).receivers == {str(receiver.address): "verified"}
        pushed.join()


def test_many_pushes_at_once_each_go_well_or_are_refused_in_words(engine: Any) -> None:
    one, wrong, well = engine(), list[str](), list[int]()

    def push(number: int) -> None:
        with Sender(device="cpu") as sender:
            sender.register(f"v{number}", {"w": torch.full((100,), float(number))})
            for _ in range(15):
                try:
                    sender.push(f"v{number}", [one.address])
                    well.append(number)
                except WeightsError as error:
                    if "busy with another update" not in str(error):
                        wrong.append(str(error))

    threads = [threading.Thread(target=push, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert wrong == []
    assert well
    assert len(one.live["w"].unique()) == 1


def test_a_sender_that_comes_back_while_another_takes_over_is_not_cut_off_after_its_answer(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, busy, came_back = engine(), ReceiverState.busy.fget, threading.Event()
    first = connect(one.address)
    after_opening(first)
    first.send(Abandon("not yet"))
    until(lambda: not one.receiver._state.busy, SECONDS)

    def busy_slowly(state: ReceiverState) -> bool:
        found = busy(state)
        if not found and not came_back.is_set():  # another sender takes over, and `first` comes back just now
            came_back.set()
            first.send(opening())
            time.sleep(0.5)
        return found

    monkeypatch.setattr(ReceiverState, "busy", property(busy_slowly))
    with registered() as second:
        second.push("v", [one.address])
    assert came_back.is_set()
    with pytest.raises(PeerClosed):
        first.recv(seconds=SECONDS)  # not Ready: it has to connect again
    first.close()


# What would end a process.


@pytest.mark.parametrize("where", ["load", "pause", "begin", "finish", "flush_cache", "resume"])
def test_what_would_end_a_thread_ends_only_the_update(folder: Path, where: str) -> None:
    leaving = [True]

    def leave(*given: Any) -> Any:
        if leaving[0]:
            sys.exit("enough")
        return [name for name, _ in given[0]] if where == "load" else None

    load = leave if where == "load" else lambda tensors: [name for name, _ in tensors]
    hooks = Hooks() if where == "load" else Hooks(**{where: leave})
    with Receiver(f"unix://{folder}/r", load, hooks=hooks, device="cpu") as receiver, registered() as sender:
        receiver.start()
        with pytest.raises(WeightsError, match="SystemExit: enough"):
            sender.push("v", [str(receiver.address)])
        leaving[0] = False
        assert sender.push("v", [str(receiver.address)]).receivers == {str(receiver.address): "delivered"}


def test_what_would_end_a_program_does_so_once_the_sender_knows(folder: Path) -> None:
    def load(_: object) -> None:
        sys.exit(3)

    receiver, ended = Receiver(f"unix://{folder}/r", load, device="cpu"), list[BaseException]()

    def serve() -> None:
        try:
            receiver.serve()
        except SystemExit as error:
            ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with registered() as sender, pytest.raises(WeightsError, match=r"the loader failed at bucket 0 .*SystemExit: 3"):
        sender.push("v", [str(receiver.address)])
    thread.join(SECONDS)
    assert [error.code for error in ended] == [3]
    assert receiver.status.state == "dirty"
    receiver.close()


@pytest.mark.parametrize("how", ["abandoned", "left"])
def test_what_a_resume_raises_reaches_the_caller_at_once(folder: Path, how: str) -> None:
    def leave() -> None:
        sys.exit(4)

    receiver, ended = Receiver(f"unix://{folder}/r", into={"w": torch.zeros(100)}, hooks=Hooks(resume=leave)), []

    def serve() -> None:
        try:
            receiver.serve()
        except SystemExit as error:
            ended.append(error.code)

    thread = threading.Thread(target=serve)
    thread.start()
    connection = connect(str(receiver.address))
    assert after_opening(connection, Pause("wait", 60)) == [Paused()]
    if how == "abandoned":
        connection.send(Abandon("no more"))
    else:
        connection.close()
    thread.join(SECONDS)
    assert ended == [4]
    connection.close()
    receiver.close()


def test_a_sender_that_is_let_go_of_leaves_no_threads_and_no_files(engine: Any) -> None:
    one = engine()
    with registered() as sender:
        sender.push("v", [one.address])
    until(lambda: not any("beats" in it.name for it in threading.enumerate()), SECONDS)
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(4):
        registered().push("v", [one.address])
    gc.collect()
    until(lambda: threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= files, SECONDS)


# Doors.


def test_of_many_that_start_at_one_place_exactly_one_listens(folder: Path) -> None:
    path, address = folder / "r", f"unix://{folder}/r"
    for _ in range(40):
        with _stale(path):
            opened: list[Listener] = []
            refused: list[str] = []
            start = threading.Barrier(4)

            def begin(start: Any = start, opened: Any = opened, refused: Any = refused) -> None:
                start.wait(SECONDS)
                try:
                    opened.append(Listener(address))
                except WeightsError as error:
                    refused.append(str(error))

            threads = [threading.Thread(target=begin) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS)
            assert refused == [f"another process listens at {address}"] * 3
            assert _answers(path)
            opened[0].close()
            assert not path.exists()


def test_one_that_closes_does_not_take_the_place_of_one_that_starts(folder: Path) -> None:
    path, address = folder / "r", f"unix://{folder}/r"
    began = 0
    for _ in range(40):
        old, found = Listener(address), list[Listener]()

        def begin(found: Any = found) -> None:
            for _ in range(200):
                try:
                    found.append(Listener(address))
                    return
                except WeightsError as error:
                    assert "another process listens" in str(error)

        thread = threading.Thread(target=begin)
        thread.start()
        old.close()
        thread.join(SECONDS)
        began += len(found)
        for new in found:
            assert _answers(path)
            new.close()
        assert not path.exists()
    assert began


def _stale(path: Path) -> Any:
    import socket

    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))  # and never listens
    return left


def _answers(path: Path) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_directories_that_are_made_are_for_their_user_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        Listener(f"unix://{folder}/a/b/c/r").close()
    finally:
        os.umask(before)
    for made in ("a", "a/b", "a/b/c"):
        assert (folder / made).stat().st_mode & 0o777 == 0o700


def test_nothing_is_pushed_to_another_user(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    user = os.geteuid()
    monkeypatch.setattr("stretto.weights.listener.peer_user", lambda _: user + 1)
    with registered() as sender:
        said = f"{one.address} belongs to user {user + 1}, and this process to user {user}"
        with pytest.raises(WeightsError, match=said):
            sender.push("v", [one.address])
        with pytest.raises(WeightsError, match=said):
            status(one.address)


# Memory.


@pytest.mark.parametrize("how", ["not sealed", "another size", "no memory"])
def test_memory_that_could_be_cut_is_not_used(folder: Path, how: str, tmp_path: Path) -> None:
    with Receiver(f"unix://{folder}/r", into={"w": torch.zeros(100)}) as receiver:
        receiver.start()
        connection = connect(str(receiver.address))
        shared = SharedBuffers(256 if how == "another size" else 512, torch.device("cpu"))
        buffers, (file,) = shared.described(local=True)
        if how == "not sealed":
            file = os.memfd_create("loose")
            os.ftruncate(file, 1024)
        elif how == "no memory":
            file = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
            os.ftruncate(file, 1024)
        buffers.nbytes = 512
        connection.send(opening(buffers=buffers), (file,))
        answer = connection.recv(seconds=SECONDS)[0]
        assert isinstance(answer, Failed)
        assert "cannot open the sender's buffers (a file " in answer.why
        connection.close()
        shared.close()


def test_buffers_that_could_not_be_opened_leave_no_closed_ones_behind(folder: Path) -> None:
    with Receiver(f"unix://{folder}/r", into={"w": torch.zeros(100)}) as receiver:
        receiver.start()
        connection = connect(str(receiver.address))
        shared = SharedBuffers(512, torch.device("cpu"))
        buffers, files = shared.described(local=True)
        answers = []
        for there, attached in ((buffers, files), (Buffers(buffers.number + 1, 512), ()), (buffers, files)):
            connection.send(opening(buffers=there), attached)
            answers.append(connection.recv(seconds=SECONDS)[0])
        assert [type(answer) for answer in answers] == [Ready, Failed, Ready]
        for word, said in ((Pause("wait", 60), Paused()), (Begin(), Begun())):
            connection.send(word)
            assert connection.recv(seconds=SECONDS)[0] == said
        connection.send(Filled(0, 0, b"not its sum"))
        answer = connection.recv(seconds=SECONDS)[0]
        assert isinstance(answer, Failed)
        assert "bucket 0 (w) arrived changed" in answer.why
        connection.close()
        shared.close()


def test_a_senders_buffers_cannot_be_cut() -> None:
    shared = SharedBuffers(4096, torch.device("cpu"))
    _, (file,) = shared.described(local=True)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    shared.close()


# One clear line.


def test_one_receiver_under_two_names_is_an_error(engine: Any, folder: Path) -> None:
    one = engine()
    other = f"unix://{folder}/../{folder.name}/0"
    with registered() as sender:
        with pytest.raises(WeightsError, match=f"{one.address} and {other} are one receiver"):
            sender.push("v", [one.address, other])
        sender.push("v", [one.address])


class Many:
    """A source of a tensor of that shape, which nobody has made."""

    everywhere = False

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self._entry = TensorSpec("w", dtype, shape)

    def held(self) -> list[Shard]:
        return [Shard(self._entry, whole(self._entry.shape), lambda: torch.zeros(0))]


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(100)


ODD: dict[str, tuple[Any, str]] = {
    "half a character": ({"w\ud800": torch.ones(1)}, "a tensor needs a name"),
    "a shape that no tensor has": (Many("float32", (0, 2**63)), "w has shape .*, which no tensor can have"),
    "a shape that no message has": (Many("float32", (0, 2**80)), "w has shape .*, which no tensor can have"),
    "no name": ({"": torch.ones(1)}, "a tensor needs a name"),
    "a fake tensor": ({"w": _fake()}, "w is a FakeTensor without memory of its own, which cannot be pushed"),
    "too large": ({"w": torch.ones(1, dtype=torch.uint8).expand(1 << 47)}, "bytes"),
}


@pytest.mark.parametrize("case", sorted(ODD))
def test_what_cannot_be_pushed_is_refused_in_one_line_and_the_sender_goes_on(engine: Any, case: str) -> None:
    one, (source, said) = engine(), ODD[case]
    with registered(split=True) as sender:
        with pytest.raises(WeightsError, match=said) as error:
            sender.register("odd", source)
        assert "\n" not in str(error.value)
        sender.register("v", {"w": torch.ones(100)})
        sender.push("v", [one.address])


@pytest.mark.parametrize("odd", ["v\udc00", ""])
def test_names_of_versions_and_addresses_are_text(engine: Any, odd: str) -> None:
    one = engine()
    with registered() as sender:
        with pytest.raises(WeightsError, match="a version needs a name"):
            sender.register(odd, {"w": torch.ones(100)})
        with pytest.raises(WeightsError, match="is no address"):
            sender.push("v", [one.address, odd])
        sender.push("v", [one.address])


class Odd:
    """An endpoint that takes nothing, and fails where it is told to."""

    name, device = "odd", "cpu"

    def __init__(self, where: str) -> None:
        self._where, self.told = where, list[str]()

    def __getattr__(self, what: str) -> Any:
        def act(*_: object, **__: object) -> Any:
            self.told.append(what)
            if what == self._where:
                raise RuntimeError("boom")
            return {"open": Wanted(set()), "commit": "great" if self._where == "" else "delivered"}.get(what)

        if what.startswith("_"):
            raise AttributeError(what)
        return act


@pytest.mark.parametrize("where", ["open", "pause", "begin", "load", "end", "commit", "abandon"])
def test_errors_of_endpoints_name_them_and_the_sender_goes_on(engine: Any, where: str) -> None:
    one, odd = engine(), Odd(where)
    with registered() as sender:
        if where == "abandon":
            stuck = engine(pause=no("it will not stop"))
            with pytest.raises(WeightsError, match="it will not stop"):
                sender.push("v", [stuck.address, odd])
        else:
            with pytest.raises(WeightsError, match=r"odd(:| does not:) RuntimeError: boom|odd does not: odd"):
                sender.push("v", [one.address, odd])
        assert odd.told[-1] == "abandon"
        assert sender.push("v", [one.address]).receivers == {one.address: "verified"}


def test_what_is_no_endpoint_is_refused_before_anything_happens(engine: Any) -> None:
    one = engine()
    with registered() as sender:
        for wrong in (3, object(), None):
            with pytest.raises(WeightsError, match="is no address, and no endpoint: it has no name, device, open"):
                sender.push("v", [one.address, wrong])
        with pytest.raises(PushError, match="odd does not: its commit returned 'great', which is no assurance"):
            sender.push("v", [Odd("")])
        assert one.calls == []
        sender.push("v", [one.address])


def test_lazily_conjugate_and_negative_tensors_are_pushed_as_they_read(folder: Path) -> None:
    values = torch.randn(60, dtype=torch.complex64)
    live = {"c": torch.zeros(60, dtype=torch.complex64), "n": torch.zeros(60)}
    with Receiver(f"unix://{folder}/r", into=live) as receiver, Sender(device="cpu") as sender:
        receiver.start()
        sender.register("v", {"c": values.conj(), "n": values.conj().imag})
        assert sender.push("v", [str(receiver.address)]).receivers == {str(receiver.address): "verified"}
    assert torch.equal(live["c"], values.conj().resolve_conj())
    assert torch.equal(live["n"], -values.imag)


def test_a_sender_without_files_left_says_so_and_goes_on(engine: Any) -> None:
    one = engine()
    with registered() as sender:
        sender.push("v", [one.address])
        sender.free_buffers()
        before, (_, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
        for room in range(6):
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + room, hard))
            try:
                sender.push("v", [one.address])
            except WeightsError as error:
                assert "\n" not in str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            sender.free_buffers()
        assert sender.push("v", [one.address]).receivers == {one.address: "verified"}
        sender.free_buffers()
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, SECONDS)
