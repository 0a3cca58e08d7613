"""The sender: one per device, holds versions in host memory and pushes them into receivers."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stretto.execute.members import Members
from stretto.execute.recorder import Recorder
from stretto.execute.team import Team
from stretto.ir.errors import PeerError, WeightsError
from stretto.program.update import Mode
from stretto.timeline import Timeline
from stretto.weights.host_memory import uncollected
from stretto.weights.ipc_buffers import device_name, resolved
from stretto.weights.layout import validate_bucket_bytes
from stretto.weights.listener import read_secret
from stretto.weights.messages import InFlight, Status
from stretto.weights.send.choose import Choice, Speeds, choose
from stretto.weights.send.endpoint import Endpoint, Offer, Wanted
from stretto.weights.send.operations import Operations
from stretto.weights.send.push import Lanes, Progress, Push, Resources
from stretto.weights.send.receiver_group import ReceiverGroup
from stretto.weights.send.remotes import Remotes, status
from stretto.weights.send.report import Report
from stretto.weights.send.sender_group import SenderGroup
from stretto.weights.send.speeds import measure, slowest
from stretto.weights.send.staging import Staging, free_bytes
from stretto.weights.send.store import Store, Version
from stretto.weights.send.times import Times, longest_times, make_report
from stretto.weights.send.validate import validate_push, validate_shard, validate_version
from stretto.weights.sources.shard import Shard, Source
from stretto.weights.sources.tensors import as_source
from stretto.wire import timing

log = logging.getLogger(__name__)
_LOADING = 8.0  # seconds to load a bucket: others wait less than 10 s for a receiver that is stuck


class Sender:
    """Registers versions and pushes them. All ranks of a mesh create a sender, register, push and close together.

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
        max_versions: int = 1,
        timeout: float = 60.0,
        bucket_timeout: float | None = None,
        secret_file: str | Path | None = None,
    ) -> None:
        """Join all ranks of `mesh`; without it all ranks of the default group, or this process alone if there is none.

        The sender holds `max_versions` versions in host memory. `split` sends a tensor larger than a bucket in parts;
        only receivers that write in place accept parts. A receiver may take `timeout` seconds to pause, to finish and
        to resume, and `bucket_timeout` seconds (default: 8, or `timeout` if that is less) to load a bucket.
        """
        self._timeout = timeout
        self._bucket_timeout = min(timeout, _LOADING) if bucket_timeout is None else bucket_timeout
        for name, seconds in (("timeout", timeout), ("bucket_timeout", self._bucket_timeout)):
            if not seconds > 0:
                raise WeightsError(f"{name} is a number of seconds above 0 (got {seconds})")
        if bucket_bytes is not None:
            validate_bucket_bytes(bucket_bytes)
        members = None
        if mesh is not None:
            members = Members.of_mesh(mesh)
        elif dist.is_initialized():
            assert dist.group.WORLD is not None
            members = Members.of_group(dist.group.WORLD)
        device_or_type = device if device is not None else mesh.device_type if mesh is not None else None
        self.device = resolved(device_or_type)
        patience = max(timeout, self._bucket_timeout)
        team_device = torch.device(self.device.type)
        self._team = Team(members, team_device, timeout=patience, turns="push", error=WeightsError)
        self._operations = Operations(self._team)
        self._group = SenderGroup(self._team.rank, self._team.size, self._team.everybody, self._team.host)
        with self._team.closing_if_it_fails():
            store = Store(
                self._team, self._group, self.device, bucket_bytes=bucket_bytes, split=split, max_versions=max_versions
            )
            self._store, self._secret = store, read_secret(secret_file)
            self._lanes = Lanes(self.device)
            self._remotes = Remotes(self._team, device_name(self.device), self._secret)
            self._staging = Staging(self.device, self._group.size)
        self._speeds: Speeds | None = None
        self._chosen: tuple[Any, Speeds, Choice] | None = None
        self._team.supervisor.ready()

    def register(self, version: str, source: Any) -> str:
        """Copy a version into host memory, each sender its share. Return the digest of its content.

        The source is safetensors files, a module, a pipeline, (name, tensor) pairs that this rank has, or any `Source`.
        Its tensors may change after this call.
        """
        with self._operations.exclusive(), self._operations.breaking(), self._team.patient(), uncollected():
            validated = self._team.jointly(lambda: _source(version, source))
            shards = self._team.jointly(lambda: _shards(validated))
            self._store.add(version, validated, shards, self._free())
            return self._store.get(version).content.digest

    def drop(self, version: str) -> None:
        """Forget a version and keep its memory for the next one."""
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
        """Push a version into all receivers, or raise. After an error, receivers that had begun to load are dirty until
        the next push repairs them.

        All ranks pass the same addresses; endpoints belong to the rank that passes them. `in_flight` says what
        receivers do with running generations. With `record`, the first rank's report has the measured timeline.
        """
        with self._operations.exclusive(), self._operations.breaking(), uncollected():
            registered = self._team.jointly(lambda: self._validated(version, receivers, in_flight, progress))
            options = [version, registered.content.digest, str(mode), in_flight, str(record)]
            endpoints = self._remotes.endpoints(options, receivers)
            choice = self._choice(registered, mode)
            self._team.jointly(lambda: self._staging.fit(registered.bucket_bytes, choice.mode))
            receiver_group = ReceiverGroup(
                self._team, endpoints, timeout=self._timeout, bucket_timeout=self._bucket_timeout
            )
            with receiver_group.abandoning(version):
                push = self._prepared(registered, choice)
                try:
                    if not record:  # a recorded timeline shows all copies
                        self._team.jointly(push.copy_ahead)
                    answers = receiver_group.open(self._offer(registered))
                    answered = list(zip(endpoints, answers, strict=True))
                    self._validate_aliases(registered, {endpoint.name: answer.alike for endpoint, answer in answered})
                    push.aim(
                        self._wanted(registered, answers), [(endpoint, answer.skips) for endpoint, answer in answered]
                    )
                    began = time.perf_counter()
                    receiver_group.pause(in_flight, answers, len(registered.buckets))
                    receiver_group.begin()
                    recorder = Recorder(len(push.tasks)) if record else None
                    moving = self._move(push, version, recorder, progress)
                    receiver_group.end()
                    serving = receiver_group.commit(version)
                    seconds = time.perf_counter() - began
                    times, timeline = self._times(push, choice, recorder, moving)
                finally:
                    push.forget()
            return make_report(registered, choice, seconds, times, serving, timeline)

    def _validate_aliases(self, registered: Version, alike: dict[str, list[list[int]]]) -> None:
        """Raise WeightsError if tensors differ that are names of one live tensor at any sender's receiver."""
        by_rank = self._team.gather(alike, dict[str, list[list[int]]])
        for name, groups in [item for rank in by_rank for item in rank.items()]:
            if groups and (pair := self._store.differing(registered.manifest.version, groups)) is not None:
                one, other = (registered.manifest.entries[place].name for place in pair)
                raise WeightsError(
                    f"{name}: {one} and {other} are one tensor there, and differ in {registered.manifest.version}"
                )

    def homes(self, addresses: Sequence[str]) -> dict[str, int]:
        """Return which sender serves each address. Raise if one is unreachable, or on no sender's device."""
        with self._operations.breaking():
            return self._remotes.homes(addresses)

    def status(self, address: str) -> Status:
        """Return the state, version and last error of a receiver."""
        return status(address, secret=self._secret)

    def free_buffers(self) -> None:
        """Free the buffers on the device; the next push allocates them again."""
        self._remotes.close()  # receivers have the buffers open
        self._staging.close()

    def close(self) -> None:
        """Release memory, connections and threads."""
        if self._operations.closed:
            return
        self._operations.closed = True
        self.free_buffers()
        self._store.close()
        self._lanes.close()
        self._team.close()

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _offer(self, registered: Version) -> Offer:
        return Offer(
            registered.manifest,
            registered.buckets,
            registered.bucket_bytes,
            self._store.split,
            self._staging.shared,
            registered.content.digest,
            # A loader that holds the GIL stops heartbeats: give it as much time as a slow one.
            silence=max(timing.SILENCE, self._bucket_timeout),
        )

    def _wanted(self, registered: Version, answers: Sequence[Wanted]) -> list[set[int]]:
        """Return the buckets that each sender's receivers need."""
        all_buckets = set(range(len(registered.buckets)))
        wanted = set[int]().union(*(all_buckets - answer.skips for answer in answers))
        return [set(buckets) for buckets in self._team.gather(sorted(wanted), list[int])]

    def _prepared(self, registered: Version, choice: Choice) -> Push:
        resources = Resources(self._team.supervisor, self._group, self._lanes, self._staging)
        return Push(choice.program, registered, resources, timeout=self._bucket_timeout)

    def _move(self, push: Push, version: str, recorder: Recorder | None, progress: Progress | None) -> float:
        """Move all buckets to all receivers; return how many seconds that took."""
        began = time.perf_counter()
        with self._team.supervisor.guarding(f"the push of {version}"):
            push.run(recorder, progress)
        self._team.supervisor.answer()
        moving = time.perf_counter() - began
        self._team.jointly(push.check)
        return moving

    def _times(
        self, push: Push, choice: Choice, recorder: Recorder | None, moving: float
    ) -> tuple[Times, Timeline | None]:
        """Return the times of the slowest sender, and the recorded timeline.

        All receivers serve the version by now, so an error here does not fail the push.
        """
        own = Times(moving, push.seconds())
        try:
            timeline = (
                recorder.gathered(choice.program, self._group.host, self._team.settle) if recorder is not None else None
            )
            times = longest_times(own, self._team)
            self._speeds = slowest(push.speeds(), self._team, choice.speeds)
        except Exception as error:
            log.warning("the push has gone well, but how long it took at other senders is not known: %s", error)
            if isinstance(error, PeerError):
                self._operations.break_off(str(error))
            return own, None
        return times, timeline

    def _validated(
        self, version: str, receivers: Sequence[str | Endpoint], in_flight: str, progress: Progress | None
    ) -> Version:
        """Return the version to push; raise WeightsError if an argument of `push` is invalid."""
        validate_push(receivers, in_flight, progress)
        return self._store.get(version)

    def _choice(self, registered: Version, mode: Mode | None) -> Choice:
        """Choose how to push; keep the previous choice unless sizes, mode or speeds have changed."""
        speeds = self._speeds or measure(self.device, self._group, self._team)
        free = self._free()
        request = self._group.size, len(registered.buckets), registered.bucket_bytes, mode
        if self._chosen is None or self._chosen[0] != request or not speeds.like(self._chosen[1]):
            choice = choose(self._group.size, len(registered.buckets), registered.bucket_bytes, speeds, free, mode=mode)
            self._chosen = request, speeds, choice
        return self._chosen[2]

    def _free(self) -> int:
        """Return how many bytes every sender has for its buffers."""
        return min(self._team.gather(self._team.jointly(self._free_locally), int))

    def _free_locally(self) -> int:
        """Return the bytes for this sender's buffers, existing ones included; senders share a device's free memory."""
        senders = self._remotes.devices.count(device_name(self.device))
        return free_bytes(self.device) // senders + self._staging.nbytes


def _source(version: str, source: Any) -> Source:
    """Return the source of a version; raise WeightsError if either is invalid."""
    converted = as_source(source)
    validate_version(version)
    return converted


def _shards(source: Source) -> list[Shard]:
    """Return this rank's shards; raise WeightsError if one is invalid."""
    shards = []
    for shard in source.held():
        validate_shard(shard)
        shards.append(shard)
    return shards
