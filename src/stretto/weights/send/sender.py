"""A sender: one for each device, holds versions in host memory and pushes them into receivers."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stretto.execute.recorder import Recorder
from stretto.execute.team import Team
from stretto.ir.errors import PeerError, WeightsError, named
from stretto.program.update import Mode
from stretto.timeline import Timeline
from stretto.weights.host_memory import uncollected
from stretto.weights.ipc_buffers import device_name, resolved
from stretto.weights.layout import demand_bucket_bytes
from stretto.weights.listener import read_secret
from stretto.weights.manifest import is_possible, is_text
from stretto.weights.messages import Assurance, InFlight, Status
from stretto.weights.send.choose import Choice, Speeds, busy, choose
from stretto.weights.send.endpoint import MEMBERS, Endpoint, Offer, Wanted
from stretto.weights.send.fleet import Fleet
from stretto.weights.send.push import Lanes, Progress, Push, SenderGroup
from stretto.weights.send.remotes import Remotes, status
from stretto.weights.send.report import Report, Step
from stretto.weights.send.speeds import measure, slowest
from stretto.weights.send.staging import Staging, free_bytes
from stretto.weights.send.store import Store, Version
from stretto.weights.sources.shard import Shard
from stretto.weights.sources.tensors import as_source
from stretto.wire.connection import SILENCE

T = TypeVar("T")
log = logging.getLogger(__name__)
_LOADING = 8.0  # seconds for a receiver to load a bucket, so that nobody waits longer than 10 s for one that is stuck


class _Took(msgspec.Struct, frozen=True):
    """How long it took, at one sender: moving all buckets, and each step of it."""

    moving: float
    seconds: dict[str, float]


class Sender:
    """Registers versions and pushes them. All senders of a mesh make, register, push and close together.

    >>> import tempfile, torch
    >>> from stretto.weights import Receiver, Sender
    >>> live = {"w": torch.zeros(3)}
    >>> address = f"unix://{tempfile.mkdtemp()}/engine"
    >>> with Receiver(address, into=live) as receiver, Sender(device="cpu") as sender:
    ...     _ = receiver.start()
    ...     content = sender.register("step-1", {"w": torch.arange(3.0)})
    ...     report = sender.push("step-1", [address])
    ...     receiver.status.content == report.content == content, live["w"].tolist(), report.receivers[address]
    (True, [0.0, 1.0, 2.0], 'verified')
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        bucket_bytes: int | None = None,
        split: bool = False,
        keep: int = 1,
        timeout: float = 60.0,
        bucket_timeout: float | None = None,
        secret_file: str | Path | None = None,
    ) -> None:
        """Without a mesh: all processes of the default group, or only this one if there is none.

        `keep` versions are held in host memory; `split` lets tensors larger than a bucket go in parts, which only
        receivers that write in place take. A receiver may take `timeout` seconds to pause, to finish and to resume,
        and `bucket_timeout` seconds (8, or less if `timeout` is) to load a bucket.
        """
        self._timeout = timeout
        self._bucket_timeout = min(timeout, _LOADING) if bucket_timeout is None else bucket_timeout
        for name, seconds in (("timeout", timeout), ("bucket_timeout", self._bucket_timeout)):
            if not seconds > 0:
                raise WeightsError(f"{name} is a number of seconds above 0 (got {seconds})")
        if bucket_bytes is not None:
            demand_bucket_bytes(bucket_bytes)
        group = mesh.get_group() if mesh is not None else dist.group.WORLD if dist.is_initialized() else None
        given = device if device is not None else mesh.device_type if mesh is not None else None
        self.device = resolved(given)
        patience = max(timeout, self._bucket_timeout)
        kind = torch.device(self.device.type)
        self._team = Team(group, kind, timeout=patience, turns="push", error=WeightsError)
        self._group = SenderGroup(self._team.rank, self._team.size, self._team.everybody, self._team.host)
        with self._team.closing_if_it_fails():
            store = Store(self._team, self._group, self.device, bucket_bytes=bucket_bytes, split=split, keep=keep)
            self._store, self._secret = store, read_secret(secret_file)
            self._lanes = Lanes(self.device)
            self._remotes = Remotes(self._team, device_name(self.device), self._secret)
            self._staging = Staging(self.device, self._group.size)
        self._speeds: Speeds | None = None
        self._chosen: tuple[Any, Speeds, Choice] | None = None
        self._broken, self._closed, self._one = "", False, threading.Lock()
        self._team.supervisor.ready()

    def register(self, version: str, source: Any) -> str:
        """Hold a version in host memory, each sender its share. Returns the digest of its content.

        The source is safetensors files, a module, a pipeline, (name, tensor) pairs that this rank has, or any `Source`.
        What it holds may change afterwards.
        """
        with self._alone(), self._breaking(), self._team.patient(), uncollected():
            made = self._team.jointly(lambda: _named(version, as_source(source)))
            held = self._team.jointly(lambda: [_checked(it) for it in made.held()])
            self._store.add(version, made, held, self._free())
            return self._store.get(version).content.digest

    def drop(self, version: str) -> None:
        """Forget a version; its memory is used for the next one."""
        self._store.drop(version)

    def push(
        self,
        version: str,
        receivers: Sequence[str | Endpoint],
        *,
        in_flight: InFlight = "wait",
        mode: Mode | None = None,
        record: bool = False,
        progress: Progress | None = None,
    ) -> Report:
        """Bring a version into all these receivers, or raise: then those that had begun to load are dirty, and the
        next push repairs them.

        Addresses are the same on all ranks; other endpoints are each rank's own. `in_flight` says what becomes of
        generations under way; with `record`, the first rank's report has the measured timeline.
        """
        with self._alone(), self._breaking(), uncollected():
            found = self._team.jointly(lambda: self._asked(version, receivers, in_flight, progress))
            what = [version, found.content.digest, str(mode), in_flight, str(record)]
            mine = self._remotes.endpoints(what, receivers)
            choice = self._choice(found, mode)
            self._team.jointly(lambda: self._staging.fit(found.bucket_bytes, choice.mode))
            shared = self._staging.shared
            split, content = self._store.split, found.content.digest
            silence = max(SILENCE, self._bucket_timeout)  # who holds Python's lock is judged as one that is slow
            offer = Offer(found.manifest, found.buckets, found.bucket_bytes, split, shared, content, silence)
            fleet = Fleet(self._team, mine, timeout=self._timeout, bucket_timeout=self._bucket_timeout)
            with fleet.abandoning(version):
                push = self._prepared(found, choice)
                try:
                    if not record:  # a picture shows all copies
                        self._team.jointly(push.copy_ahead)
                    wanted = fleet.open(offer)
                    endpoints = list(zip(mine, wanted, strict=True))
                    self._demand_equal(found, {it.name: wants.alike for it, wants in endpoints})
                    push.aim(self._wanted(found, wanted), [(it, wants.skips) for it, wants in endpoints])
                    began = time.perf_counter()
                    fleet.pause(in_flight, wanted, len(found.buckets))
                    fleet.begin()
                    recorder = Recorder(len(push.tasks)) if record else None
                    moving = self._move(push, version, recorder, progress)
                    fleet.end()
                    serving = fleet.commit(version)
                    seconds = time.perf_counter() - began
                    took, timeline = self._took(push, choice, recorder, moving)
                finally:
                    push.forget()
            return self._report(found, choice, seconds, took, serving, timeline)

    def _demand_equal(self, found: Version, alike: dict[str, list[list[int]]]) -> None:
        """Refuse to give one live tensor, which has several names, several values."""
        everybodys = [said for rank in self._team.gather(alike, dict[str, list[list[int]]]) for said in rank.items()]
        for name, groups in everybodys:
            if groups and (pair := self._store.differing(found.manifest.version, groups)) is not None:
                one, other = (found.manifest.entries[place].name for place in pair)
                raise WeightsError(
                    f"{name}: {one} and {other} are one tensor there, and differ in {found.manifest.version}"
                )

    def homes(self, addresses: Sequence[str]) -> dict[str, int]:
        """Which sender serves each address; raises if one cannot be reached, or is on no sender's device."""
        with self._breaking():
            return self._remotes.homes(addresses)

    def status(self, address: str) -> Status:
        """State, version and last error of a receiver."""
        return status(address, secret=self._secret)

    def free_buffers(self) -> None:
        """Give the device's memory back; the next push takes it again."""
        self._remotes.close()  # which have the buffers open
        self._staging.close()

    def close(self) -> None:
        """Let go of memory, connections and threads."""
        if self._closed:
            return
        self._closed = True
        self.free_buffers()
        self._store.close()
        self._lanes.close()
        self._team.close()

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wanted(self, found: Version, here: Sequence[Wanted]) -> list[set[int]]:
        """The buckets that each sender's receivers need."""
        everything = set(range(len(found.buckets)))
        wanted = set[int]().union(*(everything - wants.skips for wants in here))
        return [set(it) for it in self._team.gather(sorted(wanted), list[int])]

    def _prepared(self, found: Version, choice: Choice) -> Push:
        return Push(
            choice.program,
            self._team.supervisor,
            self._lanes,
            self._group,
            self._staging,
            found.buckets,
            found.room,
            found.content.buckets,
            timeout=self._bucket_timeout,
        )

    def _move(self, push: Push, version: str, recorder: Recorder | None, progress: Progress | None) -> float:
        """All buckets, to all receivers; how long it took."""
        began = time.perf_counter()
        with self._team.supervisor.guarding(f"the push of {version}"):
            push.run(recorder, progress)
        self._team.supervisor.answer()
        moving = time.perf_counter() - began
        self._team.jointly(push.check)
        return moving

    def _report(
        self,
        found: Version,
        choice: Choice,
        seconds: float,
        took: _Took,
        serving: dict[str, Assurance],
        timeline: Timeline | None,
    ) -> Report:
        foreseen = busy(choice.predicted)
        return Report(
            found.manifest.version,
            found.content.digest,
            found.manifest.nbytes,
            len(found.buckets),
            found.bucket_bytes,
            choice.mode,
            seconds,
            Step(choice.predicted.makespan, took.moving),
            {name: Step(foreseen[name], it) for name, it in took.seconds.items() if name in foreseen},
            serving,
            timeline,
        )

    def _took(
        self, push: Push, choice: Choice, recorder: Recorder | None, moving: float
    ) -> tuple[_Took, Timeline | None]:
        """How long it took, at the slowest sender. All receivers serve by now: what goes wrong here is no failure."""
        mine = _Took(moving, push.seconds())
        try:
            timeline = (
                recorder.gathered(choice.program, self._group.host, self._team.settle) if recorder is not None else None
            )
            done = self._team.gather(mine, _Took)
            self._speeds = slowest(push.speeds(), self._team, choice.speeds)
        except Exception as error:
            log.warning("the push has gone well, but how long it took at other senders is not known: %s", error)
            if isinstance(error, PeerError):
                self._break(str(error))
            return mine, None
        seconds = {name: max(it.seconds[name] for it in done) for name in mine.seconds}
        return _Took(max(it.moving for it in done), seconds), timeline

    # What all senders do together.

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thing at a time, and none after the end."""
        if self._closed:
            raise WeightsError("this sender is closed")
        if self._broken:
            raise WeightsError(f"this sender cannot go on: {self._broken}; start the senders again")
        if not self._one.acquire(blocking=False):
            raise WeightsError("this sender is at work in another thread")
        try:
            with torch.inference_mode(False):  # memory that is kept is used outside of it too
                yield
        finally:
            self._one.release()

    def _asked(
        self, version: str, receivers: Sequence[str | Endpoint], in_flight: str, progress: Progress | None
    ) -> Version:
        if isinstance(receivers, str):
            raise WeightsError(f"receivers are a list: push(…, [{receivers!r}])")
        for address in receivers:
            if isinstance(address, str) and not is_text(address):
                raise WeightsError(f"{address!r:.100} is no address")
            missing = [it for it in MEMBERS if not isinstance(address, str) and not hasattr(address, it)]
            if missing:
                raise WeightsError(f"{address!r:.100} is no address, and no endpoint: it has no {', '.join(missing)}")
        if in_flight not in get_args(InFlight):
            raise WeightsError(f"in_flight is one of {', '.join(get_args(InFlight))} (got {in_flight!r:.40})")
        if progress is not None and not callable(progress):
            raise WeightsError(f"progress is a function of buckets loaded and their number (got {progress!r:.40})")
        return self._store.get(version)

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Without one of its group, a sender is of no more use."""
        try:
            yield
        except WeightsError:
            raise
        except PeerError as error:
            self._break(str(error))
            raise WeightsError(f"{error}; start the senders again") from error
        except BaseException as error:
            self._broken = f"rank {self._group.rank}: {named(error)}"
            self._team.supervisor.fail(self._broken)
            self._team.end()
            raise

    def _break(self, why: str) -> None:
        self._broken = why
        self._team.end()

    def _choice(self, found: Version, mode: Mode | None) -> Choice:
        """How to push this, as last time if nothing has become much faster or slower."""
        speeds = self._speeds or measure(self.device, self._group, self._team)
        free = self._free()
        what = self._group.size, len(found.buckets), found.bucket_bytes, mode
        if self._chosen is None or self._chosen[0] != what or not speeds.like(self._chosen[1]):
            made = choose(self._group.size, len(found.buckets), found.bucket_bytes, speeds, free, mode=mode)
            self._chosen = what, speeds, made
        return self._chosen[2]

    def _free(self) -> int:
        """Bytes for any sender's buffers."""
        return min(self._team.gather(self._team.jointly(self._free_here), int))

    def _free_here(self) -> int:
        """Those that are there included; senders on one device share what it has."""
        senders = self._remotes.devices.count(device_name(self.device))
        return free_bytes(self.device) // senders + self._staging.nbytes


def _named(version: str, source: T) -> T:
    if not is_text(version):
        raise WeightsError(f"a version needs a name (got {version!r:.40})")
    return source


def _checked(held: Shard) -> Shard:
    if not is_text(held.entry.name):
        raise WeightsError(f"a tensor needs a name (got {held.entry.name!r:.80})")
    if not is_possible(held.entry.shape):
        raise WeightsError(f"{held.entry.name} has shape {held.entry.shape}, which no tensor can have")
    return held
