"""One push: what each task of its program is, as work of three lanes."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.executor import Act, Executor, HostLanes
from stretto.execute.groups import broadcast
from stretto.execute.host_lanes import HostLane, Work
from stretto.execute.recorder import Recorder
from stretto.execute.supervisor import Supervisor
from stretto.ir.errors import WeightsError
from stretto.program.program import Program
from stretto.program.task import Kind, Lane, Task
from stretto.weights.checksums import SUM_BYTES
from stretto.weights.connection import PeerTimeout
from stretto.weights.layout import Bucket
from stretto.weights.send.choose import Speeds
from stretto.weights.send.endpoint import Endpoint, naming
from stretto.weights.send.staging import Staging

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
"""Is told how many buckets were loaded here, of how many."""
_LANES = ("h2d", "broadcast", "reload")
_TELLING = 8 << 20  # bytes that tell how fast they are moved


@dataclass(frozen=True, slots=True)
class SenderGroup:
    """The senders of a push: their groups for the device's memory and the host's; none if there is only one sender."""

    rank: int
    size: int
    device: dist.ProcessGroup | None = None
    host: dist.ProcessGroup | None = None


class Lanes:
    """A sender's three threads, and on a device their streams; kept from push to push."""

    def __init__(self, device: torch.device, streams: Mapping[str, Any] | None = None) -> None:
        if streams is None:
            streams = {name: torch.cuda.Stream(device) for name in _LANES} if device.type == "cuda" else {}  # type: ignore[no-untyped-call]
        self.threads = {name: HostLane(name) for name in _LANES}
        self.streams = {name: streams.get(name) for name in _LANES}

    def close(self) -> None:
        for lane in self.threads.values():
            lane.close()


class Push:
    """Runs a program. A receiver that fails stops the push at all senders within a round, and breaks no group:
    whose turn it is to broadcast says first whether it goes on."""

    def __init__(
        self,
        program: Program,
        supervisor: Supervisor,
        lanes: Lanes,
        group: SenderGroup,
        staging: Staging,
        buckets: Sequence[Bucket],
        room: Callable[[int], Tensor],
        sums: Mapping[int, bytes],
        *,
        timeout: float,
    ) -> None:
        """`room` and `sums` are of this sender's buckets in host memory."""
        self._lanes, self._group = lanes, group
        self._staging, self._buckets, self._room, self._timeout = staging, buckets, room, timeout
        self._executor = Executor(program, supervisor)
        self.tasks = self._executor.tasks
        threads = {Lane(group.rank, name): thread for name, thread in lanes.threads.items()}
        self._running = HostLanes(self._executor, threads)
        self._executor.bind(self._running, self._bound)
        self._wanted: Sequence[set[int]] = []
        self._anyones = set(range(len(buckets)))
        self._endpoints: Sequence[tuple[Endpoint, set[int]]] = []
        self._sums = dict(sums)
        self._copies: dict[int, torch.cuda.Event] = {}
        self._ahead: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._stopped = threading.Event()
        self.failure = ""
        """Why it stopped, if it is a receiver of this sender that failed."""

    def copy_ahead(self) -> None:
        """Begin to copy what needs nothing else first, while receivers are still asked; nobody reads it yet. Only a
        device does that by itself."""
        if (stream := self._lanes.streams["h2d"]) is None:
            return
        with torch.cuda.stream(stream):
            for at, task in enumerate(self.tasks):
                if task.kind is Kind.H2D and not self._executor.needs[at]:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                    stream.record_event(begin)
                    self._copy(task.microbatch)
                    stream.record_event(end)
                    self._ahead[task.microbatch] = begin, end
        self.check()

    def aim(self, wanted: Sequence[set[int]], endpoints: Sequence[tuple[Endpoint, set[int]]]) -> None:
        """`wanted` are the buckets that each sender's receivers need; `endpoints` are this sender's receivers, and what
        each of them skips."""
        self._wanted, self._endpoints = wanted, endpoints
        self._anyones = set[int]().union(*wanted)

    def run(self, recorder: Recorder | None, progress: Progress | None) -> None:
        def ended(task: Task) -> None:
            nonlocal progress
            if progress is not None and task.kind is Kind.RELOAD and not self._stopped.is_set():
                progress = _told(progress, task.microbatch + 1, len(self._buckets))

        self._asking = ThreadPoolExecutor(max(1, len(self._endpoints)), "stretto asks")
        try:
            self._executor.run(recorder, ended)
        finally:
            self._stopped.set()
            self._asking.shutdown(wait=False)

    def forget(self) -> None:
        """Let go of all that it held, and of what is still copied."""
        with contextlib.suppress(Exception):  # of a device that does not copy any more
            for copy in self._copies.values():
                copy.synchronize()
        self._executor.forget()

    def check(self) -> None:
        """Raise if it was a receiver of this sender, or this sender, that stopped it."""
        if self.failure:
            raise WeightsError(self.failure)

    def speeds(self) -> Speeds:
        """As they were here; of what was moved too little to tell, no bound."""
        seconds, taken = self.seconds(), dict.fromkeys(_LANES, 0)
        for task in self.tasks:
            wants = self._wanted[self._group.rank] if task.kind is Kind.RELOAD else self._anyones
            if task.microbatch in wants:
                taken[task.lane.name] += self._buckets[task.microbatch].nbytes
        tells = {name for name in _LANES if taken[name] >= _TELLING and seconds[name] > 0}
        return Speeds(**{name: taken[name] / seconds[name] if name in tells else inf for name in _LANES})

    def seconds(self) -> dict[str, float]:
        """How long each step was under way here."""
        found = dict.fromkeys(_LANES, 0.0)
        for at, task in enumerate(self.tasks):
            if task.kind is Kind.H2D and task.microbatch in self._ahead:  # before its ticket was drawn
                begin, end = self._ahead[task.microbatch]
                end.synchronize()
                found["h2d"] += begin.elapsed_time(end) / 1e3
            else:
                begun, ended = self._running.spans[at]
                found[task.lane.name] += ended - begun
        return found

    def _bound(self, task: Task) -> Act:
        act = {Kind.H2D: self._copy, Kind.BROADCAST: self._broadcast, Kind.RELOAD: self._reload}[task.kind]

        def run() -> Work | None:
            if self._stopped.is_set() and task.kind is not Kind.BROADCAST:
                return None
            with torch.cuda.stream(self._lanes.streams[task.lane.name]):
                return act(task.microbatch)

        return run

    def _stop(self, error: Exception, what: str) -> None:
        """What goes wrong here stops the push in order, and not by breaking off."""
        self.failure = self.failure or (str(error) if isinstance(error, WeightsError) else f"{what}: {error}")
        self._stopped.set()

    def _copy(self, bucket: int) -> "_Copied | None":
        """A device copies by itself: the next one is queued before this one has ended."""
        if bucket in self._anyones and bucket not in self._copies:
            try:
                into = self._h2d_buffer(bucket)[: self._buckets[bucket].nbytes]
                into.copy_(self._room(bucket), non_blocking=True)
                if (stream := self._lanes.streams["h2d"]) is not None:
                    self._copies[bucket] = stream.record_event()
            except Exception as error:
                self._stop(error, f"copying bucket {bucket} to the device")
        return _Copied(self, bucket) if bucket in self._copies else None

    def copied(self, bucket: int) -> None:
        """Wait for a copy."""
        try:
            self._copies.pop(bucket).synchronize()
        except Exception as error:
            self._stop(error, f"copying bucket {bucket} to the device")

    def _h2d_buffer(self, bucket: int) -> Tensor:
        if self._group.size == 1:
            return self._staging.shared.tensors[bucket % 2]
        return self._staging.h2d[bucket // self._group.size % len(self._staging.h2d)]

    def _broadcast(self, bucket: int) -> None:
        group, source = self._group, bucket % self._group.size
        count = self._buckets[bucket].nbytes
        into = self._staging.shared.tensors[bucket % 2][:count]
        word = torch.zeros(1 + SUM_BYTES, dtype=torch.uint8, device="cpu")
        if group.rank == source:
            word = torch.tensor([self._stopped.is_set(), *self._sums[bucket]], dtype=torch.uint8, device="cpu")
        assert group.host is not None
        _wait(broadcast(group.host, word, source))
        if word[0]:
            self._stopped.set()
            return
        self._sums[bucket] = word[1:].numpy().tobytes()
        takers = [rank for rank, wanted in enumerate(self._wanted) if bucket in wanted]
        if group.rank == source and source in takers:
            try:
                into.copy_(self._h2d_buffer(bucket)[:count])
            except Exception as error:  # the others get theirs all the same
                self._stop(error, f"copying bucket {bucket} into its buffer")
        self._move(self._h2d_buffer(bucket)[:count] if group.rank == source else into, source, takers)
        if (stream := self._lanes.streams["broadcast"]) is not None:
            stream.record_event().synchronize()  # this thread alone waits for the device

    def _move(self, tensor: Tensor, source: int, takers: list[int]) -> None:
        """To all senders at once; or, if only some want it, to those, and nobody else has to do with it."""
        group, device = self._group, self._group.device
        assert device is not None
        if len({*takers, source}) == group.size:
            _wait(broadcast(device, tensor, source))
        elif group.rank == source:
            for taker in takers:
                if taker != source:
                    _wait(device.send([tensor], taker, 0))
        elif group.rank in takers:
            _wait(device.recv([tensor], source, 0))

    def _load(self, endpoint: Endpoint, bucket: int, slot: int, total: bytes) -> None:
        with naming(endpoint):
            endpoint.load(bucket, slot, total, seconds=self._timeout)

    def _reload(self, bucket: int) -> None:
        if bucket not in self._wanted[self._group.rank]:
            return
        slot = bucket % 2
        try:
            asked = [endpoint for endpoint, skips in self._endpoints if bucket not in skips]
            total = self._sums[bucket]
            begun = [self._asking.submit(self._load, it, bucket, slot, total) for it in asked]
            futures.wait(begun)  # all of them, or one would still be listened to when it is told to stop
            for it in begun:
                it.result()
        except PeerTimeout as error:
            self._stop(WeightsError(f"{error} (bucket {bucket}; bucket_timeout={self._timeout:g})"), "")
        except Exception as error:
            self._stop(error, f"reloading bucket {bucket}")


@dataclass(frozen=True, slots=True)
class _Copied:
    """A copy to the device that was begun."""

    push: Push
    bucket: int

    def wait(self) -> None:
        self.push.copied(self.bucket)


def _told(progress: Progress, done: int, total: int) -> Progress | None:
    """Whoever cannot hear of progress is not told again."""
    try:
        progress(done, total)
    except Exception:
        log.exception("progress could not be told")
        return None
    return progress


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
