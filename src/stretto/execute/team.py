"""A team of ranks: they supervise each other, and communicate over their own connections and groups."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.device_lanes import Reached, StreamFuture
from stretto.execute.groups import Groups, all_gather, all_reduce, all_to_all, broadcast
from stretto.execute.host_lanes import Awaited, HostLane
from stretto.execute.members import Members
from stretto.execute.rendezvous import Rendezvous, raise_first_error
from stretto.execute.ring import make_supervisor
from stretto.execute.uncaught import print_peer_errors_as_one_line
from stretto.ir.errors import PeerError, StrettoError, named, one_line

T = TypeVar("T")
_LONG, _USUAL, _LONGEST = 3600.0, 300.0, 1e9  # seconds


class Team:
    """Ranks that work together, by the members they have; or this process alone."""

    def __init__(
        self,
        members: Members | None,
        device: torch.device,
        *,
        timeout: float,
        turns: str = "step",
        wrong: StrettoError | None = None,
        error: type[StrettoError] = StrettoError,
        failure: Callable[[str], StrettoError] = PeerError,
    ) -> None:
        """Form the team; raise on all ranks if any rank has an error `wrong`.

        `turns` names what the ranks do together again and again. `error` is the class of errors for invalid requests to
        a rank; `failure` makes the errors for ranks that fail.
        """
        if not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
            wrong = wrong or error(f"timeout is a number of seconds above 0, and at most 10⁹ (got {timeout!r:.40})")
            timeout = _USUAL
        self.device, self._error, self._failure = device, error, failure
        self._patience: float | None = None
        self.rank, self.size = (0, 1) if members is None else (members.rank, len(members.ranks))
        print_peer_errors_as_one_line()
        self.rendezvous = None if members is None else Rendezvous(members, timeout=timeout, failure=failure)
        if self.rendezvous is not None:
            self.rendezvous.raise_on_all(wrong)
        elif wrong is not None:
            raise wrong
        self.supervisor = make_supervisor(self.rendezvous, timeout=timeout, turns=turns)
        weakref.finalize(self, self.supervisor.leave).atexit = False  # if it is garbage-collected without close()
        self._lane = HostLane("collectives")
        self.groups: Groups | None = None
        if self.rendezvous is not None and members is not None:
            self.rendezvous.check = self.supervisor.check
            with self.closing_if_it_fails():
                self.groups = Groups(members, device, self.rendezvous.store(), timeout=timeout, blocking=self._blocking)

    @property
    def everybody(self) -> dist.ProcessGroup | None:
        """A group of all ranks, for tensors on the device."""
        return None if self.groups is None else self.groups.everybody

    @property
    def host(self) -> dist.ProcessGroup | None:
        """A group of all ranks, for tensors on the host."""
        return None if self.groups is None else self.groups.host

    def make(self, members: "list[int] | tuple[int, ...]") -> dist.ProcessGroup | None:
        """Make a group of these ranks; return None on other ranks."""
        assert self.groups is not None
        return self.groups.make(members)

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Return every rank's value, in the order of ranks."""
        if self.host is None:
            return [value]
        data = msgspec.msgpack.encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        self._all_gather(sizes, torch.tensor([len(data)], device="cpu"))
        longest = max(int(size) for size in sizes)
        rows = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        self._all_gather(rows, torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8))
        values = (row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True))
        return [msgspec.msgpack.decode(encoded, type=kind) for encoded in values]

    def _all_gather(self, rows: list[Tensor], mine: Tensor) -> None:
        host = self.host
        assert host is not None
        self.settle(self.start(lambda: all_gather(host, rows, mine)), mine)

    def jointly(self, act: Callable[[], T]) -> T:
        """Run each rank's part; if one rank fails, all raise, and can go on."""
        cause: Exception | None = None
        text = ""
        try:
            result = act()
        except Exception as error:
            cause = error
            text = _describe(error)
        texts = self.gather(text, str)
        errors = [f"rank {rank}: {text}" if self.size > 1 else text for rank, text in enumerate(texts) if text]
        if errors:
            raise self._error("; ".join(errors)) from cause
        return result

    def all_or_none(self, act: Callable[[], T]) -> T:
        """Run each rank's part; if one rank fails, all raise, and each failed rank raises its own error."""
        cause: Exception | None = None
        try:
            result = act()
        except Exception as error:
            cause = error
        raise_first_error(cause, self.gather("" if cause is None else _describe(cause), str), self._failure)
        return result

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a tensor in place over a group of this team."""
        self.settle(self.start(lambda: all_reduce(group, tensor, op)), tensor)

    def reduced(self, tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> list[Any]:
        """Reduce numbers in place, and return them once they have arrived."""
        self.all_reduce(tensor, group, op)
        self.catch_up("the others")
        return tensor.tolist()

    def broadcast(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        """Broadcast a tensor over a group of this team; `source` is a rank of that group."""
        self.settle(self.start(lambda: broadcast(group, tensor, source)), tensor)

    def all_to_all(
        self, taken: Tensor, sent: Tensor, taken_sizes: list[int], sent_sizes: list[int], group: dist.ProcessGroup
    ) -> None:
        """Exchange rows within a group of this team; without sizes, each rank gets as many as any other."""
        self.settle(self.start(lambda: all_to_all(group, taken, sent, taken_sizes, sent_sizes)), taken)

    def start(self, begin: Callable[[], T]) -> T:
        """Begin a joint operation; if that fails, raise an error that explains why."""
        with self.supervisor.explaining(_others):
            return begin()

    def settle(self, work: dist.Work | None, held: Tensor) -> None:
        """Wait for work on a tensor.

        For a device tensor the stream waits; for a host tensor this thread does, and can be interrupted.
        """
        if work is None:
            return
        if held.is_cuda or work.is_completed():
            self.start(work.wait)
        else:
            self.supervisor.wait(self._lane.follow(work, held), _others, patience=self._patience)

    def catch_up(self, what: str) -> None:
        """Make the host wait until the current stream has run everything queued on it, and raise if a group has failed.

        The stream of a group that fails goes on without its data: only now is it certain that all data has come.
        """
        if self.device.type == "cuda":
            future: Awaited = StreamFuture(Reached())
            self.supervisor.wait(future, lambda: what, patience=self._patience)
        with self.supervisor.explaining(lambda: what):
            self.check_groups()

    def check_groups(self) -> None:
        """Raise if a group of this team has failed."""
        if self.groups is not None:
            self.groups.check()

    def _blocking(self, act: Callable[[], T]) -> T:
        """Run a call that cannot be interrupted in another thread, while this thread can be."""
        results: list[T] = []
        device = torch.cuda.current_device() if self.device.type == "cuda" else None

        class Call:
            def wait(self) -> None:
                if device is not None:
                    torch.cuda.set_device(device)
                results.append(act())

        self.supervisor.wait(self._lane.follow(Call()), _others)
        return results[0]

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Allow other ranks to take long, as when they read files: only a failure ends a wait soon."""
        self._patience = _LONG
        try:
            yield
        finally:
            self._patience = None

    @contextmanager
    def closing_if_it_fails(self) -> Iterator[None]:
        """Tell all ranks of an error in the block, and close the team."""
        try:
            yield
        except BaseException as error:
            self.supervisor.failed_by(error)
            self.close()
            raise

    def end(self) -> None:
        """Close the groups and end all waits for them; the supervisor goes on to tell other ranks."""
        if self.groups is not None:
            if self.supervisor.has_failed:
                self.supervisor.retire()
                self.groups.abort()
            self.groups.close()
        self._lane.close()

    def close(self) -> None:
        """Leave the ring with a farewell, and end."""
        self.supervisor.close()
        self.end()


def _others() -> str:
    return "the others"


def _describe(error: Exception) -> str:
    """Describe an error for the other ranks."""
    return one_line(error) if isinstance(error, StrettoError) else named(error)
