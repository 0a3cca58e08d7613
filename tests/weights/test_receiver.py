"""Receivers: they follow their engine, say what was wrong, and leave in peace."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pushes import until
from stretto.ir.errors import WeightsError
from stretto.weights.connection import Connection
from stretto.weights.manifest import TensorSpec
from stretto.weights.messages import Commit
from stretto.weights.receive.receiver import Receiver
from stretto.weights.receive.state import Hooks
from stretto.weights.send.report import PushError
from stretto.weights.send.sender import Sender
from stretto.wire import timing

SECONDS = 20.0
MODEL = {f"t{k}": torch.arange(k, k + 60.0) for k in range(6)}  # each a bucket of its own
BUCKET = 256


@pytest.fixture
def sender() -> Iterator[Sender]:
    with Sender(device="cpu", bucket_bytes=BUCKET) as made:
        yield made


def names(tensors: Any) -> list[str]:
    return [name for name, _ in tensors]


# They follow their engine.


@pytest.mark.parametrize("how", ["data", "entry"])
def test_live_tensors_that_were_replaced_are_found(folder: Path, sender: Sender, how: str) -> None:
    live = {name: torch.zeros(60) for name in MODEL}
    with Receiver(f"unix://{folder}/r", into=live) as receiver:
        receiver.start()
        for number in range(3):
            if how == "data":
                live["t2"].data = torch.zeros(60)
            else:
                live["t2"] = torch.zeros(60)
            sender.register(f"v{number}", {name: it + number for name, it in MODEL.items()})
            sender.push(f"v{number}", [str(receiver.address)])
            assert all(torch.equal(live[name], it + number) for name, it in MODEL.items())


def test_an_engine_may_make_its_tensors_when_an_update_begins(folder: Path, sender: Sender) -> None:
    live = {name: torch.zeros(60) for name in MODEL}

    def begin() -> None:  # as one does that wakes up
        live.update((name, torch.zeros(60)) for name in MODEL)

    with Receiver(f"unix://{folder}/r", into=live, hooks=Hooks(begin=begin)) as receiver:
        receiver.start()
        for number in range(2):
            sender.register(f"v{number}", {name: it + number for name, it in MODEL.items()})
            sender.push(f"v{number}", [str(receiver.address)])
            assert all(torch.equal(live[name], it + number) for name, it in MODEL.items())


def test_a_loader_may_turn_what_it_is_handed(folder: Path, sender: Sender) -> None:
    found: dict[str, Tensor] = {}

    def load(tensors: Any) -> list[str]:
        found.update((name, tensor.t_().clone()) for name, tensor in tensors)
        return names(tensors)

    tensor = torch.arange(6.0).view(2, 3)
    with Receiver(f"unix://{folder}/r", load) as receiver:
        receiver.start()
        for number in range(2):
            sender.register(f"v{number}", {"w": tensor + number})
            sender.push(f"v{number}", [str(receiver.address)])
            assert torch.equal(found["w"], (tensor + number).t())


# They say what was wrong.


def raises(*_: Any) -> None:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("load", "hooks", "why", "state"),
    [
        (
            lambda tensors: names(tensors)[:0],
            Hooks(),
            "the loader did not account for t0 of bucket 0 and 5 more",
            "dirty",
        ),
        (lambda it: [n for n in names(it) if n != "t3"], Hooks(), "did not account for t3 of bucket 3", "dirty"),
        (names, Hooks(pause=raises), "the engine's pause failed: RuntimeError: no", "serving"),
        (names, Hooks(begin=raises), "the engine's begin failed: RuntimeError: no", "dirty"),
        (names, Hooks(finish=raises), "the engine's finish failed: RuntimeError: no", "dirty"),
        (names, Hooks(flush_cache=raises), "the engine's flush_cache failed: RuntimeError: no", "dirty"),
        (names, Hooks(resume=raises), "the engine did not resume: RuntimeError: no", "dirty"),
    ],
)
def test_what_failed_is_named_by_sender_and_receiver(
    folder: Path, sender: Sender, load: Callable[[Any], list[str]], hooks: Hooks, why: str, state: str
) -> None:
    with Receiver(f"unix://{folder}/r", load, hooks=hooks) as receiver:
        receiver.start()
        sender.register("v", MODEL)
        with pytest.raises(WeightsError) as told:
            sender.push("v", [str(receiver.address)])
        verb = " does not" if isinstance(told.value, PushError) else ""
        assert f"{receiver.address}{verb}: " in str(told.value)
        assert why in str(told.value)
        assert why in receiver.status.error
        assert receiver.status.state == state


def test_the_last_error_is_told_whatever_the_state(folder: Path, sender: Sender) -> None:
    problems: list[Exception] = [KeyError("first")]

    def prepare() -> None:
        if not problems:
            raise RuntimeError("second")

    def load(tensors: Any) -> list[str]:
        if problems:
            raise problems.pop()
        return names(tensors)

    with Receiver(f"unix://{folder}/a", load, hooks=Hooks(prepare=prepare)) as receiver:
        receiver.start()
        sender.register("v", MODEL)
        for why in ("KeyError: 'first'", "RuntimeError: second"):
            with pytest.raises(WeightsError):
                sender.push("v", [str(receiver.address)])
            assert receiver.status.state == "dirty"
            assert why in receiver.status.error
    with Receiver(f"unix://{folder}/b", into={"t0": torch.zeros(3)}) as receiver:
        receiver.start()
        with pytest.raises(WeightsError, match="does not fit"):
            sender.push("v", [str(receiver.address)])
        assert receiver.status.state == "serving"  # it has refused in time
        assert "t0 is pushed with shape (60,), and it does not fit (3,)" in receiver.status.error


def test_senseless_receivers_are_refused(folder: Path) -> None:
    with pytest.raises(WeightsError, match="into has no tensors"):
        Receiver(f"unix://{folder}/r", into={})
    with pytest.raises(WeightsError, match="expects is for load"):
        Receiver(f"unix://{folder}/r", into={"w": torch.zeros(2)}, expects=[TensorSpec("w", "float32", (2,))])


# Nobody waits for those that are stuck.


def test_those_that_are_stuck_are_told_too_and_another_sender_repairs_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "BEAT", 0.001)  # as many as a minute has, so that they would fill the socket
    released = threading.Event()

    def stuck(tensors: Any) -> list[str]:
        released.wait(SECONDS)
        return names(tensors)

    receivers = [Receiver(f"unix://{folder}/{k}", load).start() for k, load in enumerate((stuck, stuck, names))]
    addresses = [str(it.address) for it in receivers]
    with Sender(device="cpu", bucket_timeout=1.5) as sender:
        sender.register("v", MODEL)
        with pytest.raises(WeightsError, match=r"/[01] is slow"):
            sender.push("v", addresses)
        until(lambda: receivers[2].status.state == "dirty", SECONDS)
        released.set()
        until(lambda: {it.status.state for it in receivers} == {"dirty"}, SECONDS)
        with Sender(device="cpu") as other:
            other.register("w", MODEL)
            assert set(other.push("w", addresses).receivers.values()) == {"delivered"}
    for receiver in receivers:
        receiver.close()


def test_signs_of_life_in_a_process_with_many_files() -> None:
    many = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * many:
        pytest.skip("not so many files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * many), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(many)]
    try:
        one, other = map(Connection, socket.socketpair())
        one.limit = other.limit = 1000
        one.beat()
        one.send(Commit())
        assert other.recv(seconds=SECONDS)[0] == Commit()
        one.close()
        other.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# They leave in peace.

FORKED = """
import os, sys, torch
from stretto.weights import Receiver, Sender
receiver = Receiver(sys.argv[1], into={"w": torch.zeros(3)}).start()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
with Sender(device="cpu") as sender:
    sender.register("v", {"w": torch.ones(3)})
    print(*sender.push("v", [sys.argv[1]]).receivers.values())
"""


def test_a_child_that_ends_leaves_its_parents_receiver_alone(folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, f"unix://{folder}/r"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "verified\n", "")


WORKERS = """
import os, signal, sys, time, torch
from stretto.weights import Receiver
receiver = Receiver(sys.argv[1], into={"w": torch.zeros(3)}).start()
engine, child = os.getpid(), os.fork()
if child == 0:  # a worker of the engine, which lives on
    print(os.getpid(), flush=True)
    os.kill(engine, signal.SIGKILL)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_a_child_that_lives_on_does_not_keep_a_dead_ones_door(folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WORKERS, f"unix://{folder}/r"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        try:
            assert engine.wait(60) == -signal.SIGKILL
            Receiver(f"unix://{folder}/r", into={"w": torch.zeros(3)}).close()
        finally:
            os.kill(child, signal.SIGKILL)


ENGINE = """
import subprocess, sys, torch
from stretto.weights import Receiver
live = {f"t{k}": torch.zeros(64) for k in range(4)}
receiver = Receiver(sys.argv[1], into=live).start()
pushing = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
sender = subprocess.Popen(pushing, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(sender.stdout.readline().decode(), end="", flush=True)
if sys.argv[3] == "closed":
    receiver.close()
"""
PUSHING = """
import os, sys, torch
from stretto.weights import Sender
sender = Sender(device="cpu", bucket_bytes=256)
sender.register("v", {f"t{k}": torch.ones(64) for k in range(4)})
sender.push("v", [sys.argv[1]])
print("pushed", flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_no_thread_is_left_of_one_that_is_closed(folder: Path, sender: Sender) -> None:
    receiver = Receiver(f"unix://{folder}/r", names).start()
    sender.register("v", MODEL)
    sender.push("v", [str(receiver.address)])
    receiver.close()
    assert "stretto updates" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("how", ["closed", "left open"])
def test_a_process_ends_in_peace_while_its_sender_is_there(folder: Path, how: str) -> None:
    for _ in range(2):
        command = [sys.executable, "-c", ENGINE, f"unix://{folder}/r", PUSHING, how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "pushed\n", "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"load": {}}, "load is a function that takes tensors"),
        ({"into": {"w": 3}}, "w of into is a int, not a tensor"),
        ({"load": names, "expects": [TensorSpec("w", "fp32", (2,))]}, "w is expected as 'fp32'; types are named as in"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_made(folder: Path, given: Any, said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        Receiver(f"unix://{folder}/r", **given)


def test_a_receiver_serves_once_and_not_after_its_end(folder: Path) -> None:
    receiver = Receiver(f"unix://{folder}/r", names).start()
    for again in (receiver.start, receiver.serve):
        with pytest.raises(WeightsError, match="this receiver serves already"):
            again()
    receiver.close()
    for again in (receiver.start, receiver.serve, receiver.ensure_serving):
        with pytest.raises(WeightsError, match="this receiver is closed"):
            again()
