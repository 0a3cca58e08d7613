"""Runs the program of one push: copies to the device, broadcasts and reloads, on three lanes."""

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
from stretto.execute.groups import broadcast, check_group
from stretto.execute.host_lanes import HostLane, Work
from stretto.execute.recorder import Recorder
from stretto.execute.supervisor import Supervisor
from stretto.ir.errors import WeightsError
from stretto.program.program import Program
from stretto.program.task import Kind, Lane, Task
from stretto.weights.checksums import SUM_BYTES
from stretto.weights.connection import PeerTimeout
from stretto.weights.send.choose import Speeds
from stretto.weights.send.endpoint import Endpoint, naming
from stretto.weights.send.sender_group import SenderGroup
from stretto.weights.send.staging import Staging
from stretto.weights.send.store import Version

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
"""Called with the number of buckets that receivers of this sender have loaded, and the number of all buckets."""
_LANES = ("h2d", "broadcast", "reload")
_MEASURABLE = 8 << 20  # bytes that must move before their speed is meaningful


class Lanes:
    """A sender's three threads, and their streams if the device has any; kept from push to push."""

    def __init__(self, device: torch.device, streams: Mapping[str, Any] | None = None) -> None:
        if streams is None:
            streams = {name: torch.cuda.Stream(device) for name in _LANES} if device.type == "cuda" else {}  # type: ignore[no-untyped-call]
        self.threads = {name: HostLane(name) for name in _LANES}
        self.streams = {name: streams.get(name) for name in _LANES}

    def close(self) -> None:
        for lane in self.threads.values():
            lane.close()


@dataclass(frozen=True, slots=True)
class Resources:
    """What a sender's pushes run on."""

    supervisor: Supervisor
    group: SenderGroup
    lanes: Lanes
    staging: Staging


class Push:
    """Runs a program.

    A receiver that fails stops the push at all senders within a round, without breaking a process group: before each
    broadcast, its source announces whether it goes on.
    """

    def __init__(self, program: Program, version: Version, resources: Resources, *, timeout: float) -> None:
        """`timeout` is the number of seconds that a receiver may take to load a bucket."""
        self._lanes, self._group, self._staging = resources.lanes, resources.group, resources.staging
        self._buckets, self._host_buffer, self._timeout = version.buckets, version.host_buffer, timeout
        self._executor = Executor(program, resources.supervisor)
        self.tasks = self._executor.tasks
        threads = {Lane(self._group.rank, name): thread for name, thread in self._lanes.threads.items()}
        self._running = HostLanes(self._executor, threads)
        self._executor.bind(self._running, self._bind)
        self._wanted: Sequence[set[int]] = []
        self._wanted_by_any = set(range(len(self._buckets)))
        self._endpoints: Sequence[tuple[Endpoint, set[int]]] = []
        self._checksums = dict(version.content.buckets)
        self._copies: dict[int, torch.cuda.Event] = {}
        self._ahead: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._stopped = threading.Event()
        self.failure = ""
        """Why the push stopped, if this sender or one of its receivers failed."""

    def copy_ahead(self) -> None:
        """Start the copies that need no other task first, while receivers still look at the offer.

        No task reads these buffers yet. Only a CUDA device copies asynchronously; otherwise do nothing.
        """
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
        """Set the buckets that each sender's receivers need, and this sender's receivers with the buckets they skip."""
        self._wanted, self._endpoints = wanted, endpoints
        self._wanted_by_any = set[int]().union(*wanted)

    def run(self, recorder: Recorder | None, progress: Progress | None) -> None:
        """Run all tasks. If a receiver fails, the remaining copies and reloads do nothing, and `check` raises."""

        def ended(task: Task) -> None:
            nonlocal progress
            if progress is not None and task.kind is Kind.RELOAD and not self._stopped.is_set():
                progress = _report_progress(progress, task.microbatch + 1, len(self._buckets))

        self._endpoint_threads = ThreadPoolExecutor(max(1, len(self._endpoints)), "stretto asks")
        try:
            self._executor.run(recorder, ended)
        finally:
            self._stopped.set()
            self._endpoint_threads.shutdown(wait=False)

    def forget(self) -> None:
        """Wait for copies that are still running, and release everything that the push holds."""
        with contextlib.suppress(Exception):  # the device may have failed
            for copy in self._copies.values():
                copy.synchronize()
        self._executor.forget()

    def check(self) -> None:
        """Raise WeightsError if this sender or one of its receivers stopped the push."""
        if self.failure:
            raise WeightsError(self.failure)

    def speeds(self) -> Speeds:
        """Return this sender's speeds; infinity for a step that moved too few bytes to measure."""
        seconds, moved = self.seconds(), dict.fromkeys(_LANES, 0)
        for task in self.tasks:
            wanted = self._wanted[self._group.rank] if task.kind is Kind.RELOAD else self._wanted_by_any
            if task.microbatch in wanted:
                moved[task.lane.name] += self._buckets[task.microbatch].nbytes
        measurable = {name for name in _LANES if moved[name] >= _MEASURABLE and seconds[name] > 0}
        return Speeds(**{name: moved[name] / seconds[name] if name in measurable else inf for name in _LANES})

    def seconds(self) -> dict[str, float]:
        """Return how long each step ran at this sender."""
        seconds = dict.fromkeys(_LANES, 0.0)
        for at, task in enumerate(self.tasks):
            if task.kind is Kind.H2D and task.microbatch in self._ahead:  # it started before its task was issued
                begin, end = self._ahead[task.microbatch]
                end.synchronize()
                seconds["h2d"] += begin.elapsed_time(end) / 1e3
            else:
                began, ended = self._running.spans[at]
                seconds[task.lane.name] += ended - began
        return seconds

    def _bind(self, task: Task) -> Act:
        """Return the function that runs a task. After a stop, only broadcasts run: they tell the other senders."""
        act = {Kind.H2D: self._copy, Kind.BROADCAST: self._broadcast, Kind.RELOAD: self._reload}[task.kind]

        def run() -> Work | None:
            if self._stopped.is_set() and task.kind is not Kind.BROADCAST:
                return None
            with torch.cuda.stream(self._lanes.streams[task.lane.name]):
                return act(task.microbatch)

        return run

    def _stop(self, error: Exception, what: str) -> None:
        """Keep the first error and stop the push in order, so that process groups stay usable."""
        self.failure = self.failure or (str(error) if isinstance(error, WeightsError) else f"{what}: {error}")
        self._stopped.set()

    def _copy(self, bucket: int) -> "_RunningCopy | None":
        """Copy a bucket to the device. CUDA copies are asynchronous: the next one is queued before this one ends."""
        if bucket in self._wanted_by_any and bucket not in self._copies:
            try:
                target = self._h2d_buffer(bucket)[: self._buckets[bucket].nbytes]
                target.copy_(self._host_buffer(bucket), non_blocking=True)
                if (stream := self._lanes.streams["h2d"]) is not None:
                    self._copies[bucket] = stream.record_event()
            except Exception as error:
                self._stop(error, f"copying bucket {bucket} to the device")
        return _RunningCopy(self, bucket) if bucket in self._copies else None

    def wait_for_copy(self, bucket: int) -> None:
        try:
            self._copies.pop(bucket).synchronize()
        except Exception as error:
            self._stop(error, f"copying bucket {bucket} to the device")

    def _h2d_buffer(self, bucket: int) -> Tensor:
        if self._group.size == 1:
            return self._staging.shared.tensors[bucket % 2]
        return self._staging.h2d[bucket // self._group.size % len(self._staging.h2d)]

    def _broadcast(self, bucket: int) -> None:
        """Send a header (whether the source has stopped, and the checksum), and then the bucket itself."""
        group, source = self._group, bucket % self._group.size
        nbytes = self._buckets[bucket].nbytes
        target = self._staging.shared.tensors[bucket % 2][:nbytes]
        header = torch.zeros(1 + SUM_BYTES, dtype=torch.uint8, device="cpu")
        if group.rank == source:
            header = torch.tensor([self._stopped.is_set(), *self._checksums[bucket]], dtype=torch.uint8, device="cpu")
        assert group.host is not None
        _wait(broadcast(group.host, header, source))
        if header[0]:
            self._stopped.set()
            return
        self._checksums[bucket] = header[1:].numpy().tobytes()
        ranks = [rank for rank, wanted in enumerate(self._wanted) if bucket in wanted]
        if group.rank == source and source in ranks:
            try:
                target.copy_(self._h2d_buffer(bucket)[:nbytes])
            except Exception as error:  # the other senders still get the bucket
                self._stop(error, f"copying bucket {bucket} into its buffer")
        self._send(self._h2d_buffer(bucket)[:nbytes] if group.rank == source else target, source, ranks)
        if (stream := self._lanes.streams["broadcast"]) is not None:
            stream.record_event().synchronize()  # blocks only this thread
            assert group.device is not None
            check_group(group.device)

    def _send(self, tensor: Tensor, source: int, targets: list[int]) -> None:
        """Broadcast a bucket if all senders want it; otherwise send it only to those that do."""
        group, device = self._group, self._group.device
        assert device is not None
        if len({*targets, source}) == group.size:
            _wait(broadcast(device, tensor, source))
        elif group.rank == source:
            for target in targets:
                if target != source:
                    _wait(device.send([tensor], target, 0))
        elif group.rank in targets:
            _wait(device.recv([tensor], source, 0))

    def _load(self, endpoint: Endpoint, bucket: int, slot: int, checksum: bytes) -> None:
        with naming(endpoint):
            endpoint.load(bucket, slot, checksum, seconds=self._timeout)

    def _reload(self, bucket: int) -> None:
        """Make this sender's receivers load a bucket, all at the same time."""
        if bucket not in self._wanted[self._group.rank]:
            return
        slot = bucket % 2
        try:
            endpoints = [endpoint for endpoint, skips in self._endpoints if bucket not in skips]
            checksum = self._checksums[bucket]
            submit = self._endpoint_threads.submit
            loads = [submit(self._load, endpoint, bucket, slot, checksum) for endpoint in endpoints]
            futures.wait(loads)  # wait for all: no thread may still be reading from a receiver when we abandon it
            for load in loads:
                load.result()
        except PeerTimeout as error:
            self._stop(WeightsError(f"{error} (bucket {bucket}; bucket_timeout={self._timeout:g})"), "")
        except Exception as error:
            self._stop(error, f"reloading bucket {bucket}")


@dataclass(frozen=True, slots=True)
class _RunningCopy:
    """A copy to the device that was started."""

    push: Push
    bucket: int

    def wait(self) -> None:
        self.push.wait_for_copy(self.bucket)


def _report_progress(progress: Progress, done: int, total: int) -> Progress | None:
    """Call the progress function. Return it, or None if it raised and should not be called again."""
    try:
        progress(done, total)
    except Exception:
        log.exception("progress could not be told")
        return None
    return progress


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
