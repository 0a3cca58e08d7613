"""Receivers and senders in processes of their own, each of which can be told when to die or to stop."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from processes import FORKS
from pushes import Sharded, tensors_of
from stretto.ir.errors import WeightsError
from stretto.weights.connection import Connection
from stretto.weights.messages import Beat, Status
from stretto.weights.receive.loaders import CallbackLoader, InPlaceLoader
from stretto.weights.receive.receiver import Receiver
from stretto.weights.send.push import Push
from stretto.weights.send.sender import Sender
from stretto.weights.send.staging import Staging

SPEC = [("uint8", (4000,))] * 9 + [("bfloat16", (5, 7)), ("float32", (6, 100))]
BUCKET = 4096
SECONDS = 60.0


# In the processes.


class Fuse:
    """Counts what happens in a process, and sends it a signal when it is time."""

    def __init__(self) -> None:
        self._lock, self.count = threading.Lock(), 0
        self._what, self._left, self._signal = "", 0, 0
        for owner, name, what in (
            (Connection, "send", "told"),
            (Connection, "recv", "heard"),
            (Push, "_copy", "copy"),
            (Push, "_broadcast", "broadcast"),
            (Push, "_reload", "reload"),
            (InPlaceLoader, "load", "load"),
            (CallbackLoader, "load", "load"),
        ):
            setattr(owner, name, self._lit(getattr(owner, name), what))

    def arm(self, what: str, left: int, number: int) -> None:
        """Of events of this kind, or of any; how many are left to go."""
        with self._lock:
            self.count, self._what, self._left, self._signal = 0, what, left, number

    def _lit(self, act: Callable[..., Any], what: str) -> Callable[..., Any]:
        @wraps(act)
        def lit(*given: Any, **options: Any) -> Any:
            if what not in ("told", "heard"):  # of a task its beginning counts, of a message that it has passed
                self._burn(what)
            made = act(*given, **options)
            if what == "heard" or (what == "told" and not isinstance(given[1], Beat)):
                self._burn(what)
            return made

        return lit

    def _burn(self, what: str) -> None:
        with self._lock:
            self.count += 1
            if self._left and self._what in ("", what):
                self._left -= 1
                if not self._left:
                    os.kill(os.getpid(), self._signal)


def digest(tensors: Mapping[str, Tensor]) -> str:
    made = hashlib.blake2b()
    for name in sorted(tensors):
        made.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


@cache
def expected(version: str) -> str:
    return digest(tensors_of(SPEC, int(version.removeprefix("v"))))


class Engine:
    """A receiver's tensors, a loader with some trouble, and a look at whether what it serves is what it says."""

    def __init__(self, address: str, trouble: str) -> None:
        self.live = tensors_of(SPEC, 1)
        self._trouble, self.release = trouble, threading.Event()
        how: dict[str, Any] = {"into": self.live} if trouble == "in place" else {"load": self.load}
        self.receiver = Receiver(address, **how, version="v1", device="cpu").start()
        self.mixed: list[str] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> list[str]:
        for name, tensor in tensors:
            self.live[name].copy_(tensor)
        names = [name for name, _ in tensors]
        if "t5" in names:
            match self._trouble:
                case "memory":
                    self._trouble = ""
                    raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
                case "slow":
                    self._trouble = ""
                    self.release.wait()
                case "a little slow":
                    threading.Event().wait(0.5)
        return names

    def _watch(self) -> None:
        while True:
            before = self.receiver.status
            bits = digest(self.live)
            if before == self.receiver.status and before.state == "serving" and bits != expected(before.version):
                self.mixed.append(before.version)
            threading.Event().wait(0.005)


def receive(pipe: Any, address: str, trouble: str) -> None:
    torch.set_num_threads(1)
    fuse, engine = Fuse(), Engine(address, trouble)
    pipe.send("ready")
    while True:
        match _next(pipe):
            case "how", _:
                pipe.send((engine.receiver.status, digest(engine.live), engine.mixed))
            case "arm", how:
                fuse.arm(*how)
                pipe.send("armed")
            case "count", _:
                pipe.send(fuse.count)
            case "release", _:
                engine.release.set()
                pipe.send("released")
            case "close", _:
                engine.receiver.close()
                pipe.send("closed")


def send(pipe: Any, rank: int, size: int, meeting: str, options: dict[str, Any], trouble: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        dist.barrier()
    fuse = Fuse()
    _make(trouble)
    sender = Sender(device="cpu", **options)
    pipe.send("ready")
    while True:
        match _next(pipe):
            case "push", (version, source, addresses):
                try:
                    sender.register(version, source or Sharded(tensors_of(SPEC, int(version[1:])), rank, size))
                    pipe.send(sender.push(version, addresses).receivers)
                except WeightsError as error:
                    pipe.send(str(error))
            case "arm", how:
                fuse.arm(*how)
                pipe.send("armed")
            case "count", _:
                pipe.send(fuse.count)
            case "close", _:
                sender.close()
                pipe.send("closed")


def _next(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        os._exit(0)


def _make(trouble: str) -> None:
    """Something goes wrong in this sender, once."""
    left = [trouble] if trouble else []
    asked: list[None] = []

    def once(owner: type, name: str, instead: Callable[[Callable[..., Any], Any], Any]) -> None:
        act = getattr(owner, name)
        setattr(owner, name, lambda *given: instead(act, given) if left else act(*given))

    def little(act: Callable[..., Any], given: Any) -> int:
        asked.append(None)
        if trouble == "no room" and len(asked) == 1:  # there is some when the version is registered
            return int(act(*given))
        left.clear()
        return 1000

    def refused(_: Callable[..., Any], __: Any) -> None:
        left.clear()
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")

    def flipped(act: Callable[..., Any], given: Any) -> None:
        push, bucket = given
        act(*given)
        if bucket == 4:
            left.clear()
            push._h2d_buffer(bucket)[77] ^= 4

    match trouble:
        case "little memory" | "no room":
            once(Sender, "_free_locally", little)
        case "no memory":
            once(Staging, "fit", refused)
        case "flipped bit":
            once(Push, "_copy", flipped)


# Here.


class Worker:
    """A process that runs one of these."""

    def __init__(self, job: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=job, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def send(self, what: str, how: Any = None) -> None:
        self._pipe.send((what, how))

    def recv(self, seconds: float = SECONDS) -> Any:
        if not self._pipe.poll(max(0.0, seconds)):
            raise TimeoutError(f"process {self.pid} said nothing for {seconds:.1f} s")
        return self._pipe.recv()

    def has_said(self) -> bool:
        return self._pipe.poll()

    def ask(self, what: str, how: Any = None) -> Any:
        self.send(what, how)
        return self.recv()

    def arm(self, what: str, left: int, number: signal.Signals) -> None:
        assert self.ask("arm", (what, left, number)) == "armed"

    def fallen(self) -> bool:
        """Whether it is dead or stopped."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "TZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()

    # Of a receiver.

    @property
    def how(self) -> Status:
        return self._how()[0]

    def _how(self) -> tuple[Status, str]:
        told, bits, mixed = self.ask("how")
        assert not mixed, f"it said that it serves {mixed[0]} while its tensors were not those"
        return told, bits

    def settled(self, until: float) -> Status:
        """How it is once no update is under way, and that it serves what it says it serves."""
        while True:
            told, bits = self._how()
            if told.state in ("serving", "dirty"):
                assert told.state == "dirty" or bits == expected(told.version)
                return told
            assert time.monotonic() < until, f"it is still {told.state}"
            threading.Event().wait(0.05)

    def shares_memory(self) -> bool:
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return "memfd:" in maps or "/dev/shm/" in maps


class Senders:
    """Processes that push together."""

    def __init__(self, count: int, *, troubles: Sequence[str] = (), **options: Any) -> None:
        options = {"bucket_bytes": BUCKET, **options}
        meeting = str(Path(mkdtemp()) / "meeting") if count > 1 else ""
        given = [*troubles, *[""] * count]
        self.ranks = [Worker(send, rank, count, meeting, options, given[rank]) for rank in range(count)]
        for rank in self.ranks:
            assert rank.recv() == "ready"
        if meeting:
            Path(meeting).unlink(missing_ok=True)
            Path(meeting).parent.rmdir()

    def begin(self, version: str, addresses: Sequence[str], source: Any = None, *, but: Sequence[int] = ()) -> None:
        for number, rank in enumerate(self.ranks):
            if number not in but:
                rank.send("push", (version, source, list(addresses)))

    def heard(self, until: float | None = None, *, but: Sequence[int] = ()) -> dict[int, Any]:
        """What each has to say: how receivers took it, or an error's text."""
        end = until or time.monotonic() + SECONDS
        return {k: rank.recv(end - time.monotonic()) for k, rank in enumerate(self.ranks) if k not in but}

    def push(self, version: str, addresses: Sequence[str], source: Any = None) -> dict[int, Any]:
        self.begin(version, addresses, source)
        return self.heard()

    def close(self, *, but: Sequence[int] = ()) -> None:
        for number, rank in enumerate(self.ranks):
            if number not in but:
                rank.send("close")
        assert set(self.heard(but=but).values()) <= {"closed"}

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()


class Team:
    """Senders and receivers, all of which end with it."""

    def __init__(self, folder: Path, *, senders: int = 1, troubles: Sequence[str] = ("", ""), **options: Any) -> None:
        folder.chmod(0o700)
        self.addresses = [f"unix://{folder}/{number}" for number in range(len(troubles))]
        pairs = zip(self.addresses, troubles, strict=True)
        self.receivers = [Worker(receive, address, trouble) for address, trouble in pairs]
        self._made: list[Senders] = []
        try:
            for receiver in self.receivers:
                assert receiver.recv() == "ready"
            self.senders = self.fresh(senders, **options)
        except BaseException:
            self.end()
            raise

    def fresh(self, count: int, **options: Any) -> Senders:
        """Other senders."""
        self._made.append(Senders(count, **options))
        return self._made[-1]

    @staticmethod
    def fall_of(victim: Worker, *, over: Callable[[], bool] = lambda: False) -> float:
        """When it fell, or when it was over without that."""
        deadline = time.monotonic() + SECONDS
        while not victim.fallen() and not over():
            assert time.monotonic() < deadline, "it did not fall"
            threading.Event().wait(0.01)
        return time.monotonic()

    def repaired(
        self, version: str, senders: Senders, *, but: Sequence[int] = (), busy_until: float | None = None
    ) -> None:
        """The receivers that are left take a push, and when its senders have gone nothing is left of them. They may
        be busy for a while, where they wait for a sender that was stopped between two pushes."""
        alive = {a: r for k, (a, r) in enumerate(zip(self.addresses, self.receivers, strict=True)) if k not in but}
        said = senders.push(version, list(alive))
        while busy_until and time.monotonic() < busy_until and "is busy" in str(said[0]):
            said = senders.push(version, list(alive))
        for told in said.values():
            assert isinstance(told, dict), told
            assert told.keys() == alive.keys()
            assert set(told.values()) <= {"verified", "delivered"}  # in place, or by its loader
        for receiver in alive.values():
            assert receiver.settled(0).version == version
        senders.close()
        deadline = time.monotonic() + SECONDS
        while any(worker.shares_memory() for worker in [*alive.values(), *senders.ranks]):
            assert time.monotonic() < deadline, "memory is still shared"
            threading.Event().wait(0.05)
        for receiver in alive.values():
            assert receiver.ask("close") == "closed"
        assert [a for a in alive if Path(a.removeprefix("unix://")).exists()] == []

    def end(self) -> None:
        for it in [*self._made, *self.receivers]:
            it.end()

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
