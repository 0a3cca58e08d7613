"""Ranks that work together: they watch each other, and communicate on connections and groups of their own."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.device_lanes import Reached, StreamTicket
from stretto.execute.groups import Groups, all_gather, all_reduce, broadcast
from stretto.execute.host_lanes import Awaited, HostLane
from stretto.execute.rendezvous import Rendezvous, demand_none
from stretto.execute.ring import supervised
from stretto.execute.uncaught import print_told_errors_as_one_line
from stretto.ir.errors import PeerError, StrettoError, named, one_line

T = TypeVar("T")
_LONG, _USUAL, _LONGEST = 3600.0, 300.0, 1e9  # seconds


class Team:
    """All ranks of a group of the user's, which is only asked who is in it; or this process alone."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        timeout: float,
        turns: str = "step",
        wrong: StrettoError | None = None,
        error: type[StrettoError] = StrettoError,
        failure: Callable[[str], StrettoError] = PeerError,
    ) -> None:
        """`turns` are what is done together, again and again. If something is `wrong` on any rank, there is no team.
        `error` is what is raised for what a rank was asked for, `failure` for what others do not do.
        """
        if not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
            wrong = wrong or error(f"timeout is a number of seconds above 0, and at most 10⁹ (got {timeout!r:.40})")
            timeout = _USUAL
        self.device, self._error, self._failure = device, error, failure
        self._patience: float | None = None
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        print_told_errors_as_one_line()
        self.rendezvous = None if group is None else Rendezvous(group, timeout=timeout, failure=failure)
        if self.rendezvous is not None:
            self.rendezvous.demand_none(wrong)
        elif wrong is not None:
            raise wrong
        self.supervisor = supervised(self.rendezvous, timeout=timeout, turns=turns)
        weakref.finalize(self, self.supervisor.leave).atexit = False  # of a pipeline that was let go of and not closed
        self._lane = HostLane("collectives")
        self.groups: Groups | None = None
        if self.rendezvous is not None and group is not None:
            self.rendezvous.check = self.supervisor.check
            with self.closing_if_it_fails():
                self.groups = Groups(group, device, self.rendezvous.store(), timeout=timeout, blocking=self._blocking)

    @property
    def everybody(self) -> dist.ProcessGroup | None:
        """A group of all, for tensors of the device."""
        return None if self.groups is None else self.groups.everybody

    @property
    def host(self) -> dist.ProcessGroup | None:
        """A group of all, for tensors of the host."""
        return None if self.groups is None else self.groups.host

    def make(self, members: "list[int] | tuple[int, ...]") -> dist.ProcessGroup | None:
        """A group of these ranks; None on a rank that is not among them."""
        assert self.groups is not None
        return self.groups.make(members)

    def gather(self, word: T, kind: type[T]) -> list[T]:
        """Everybody's word, in the order of ranks."""
        if self.host is None:
            return [word]
        data = msgspec.msgpack.encode(word)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        self._all_gather(sizes, torch.tensor([len(data)], device="cpu"))
        most = max(int(size) for size in sizes)
        rows = [torch.zeros(most, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        self._all_gather(rows, torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8))
        found = (row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True))
        return [msgspec.msgpack.decode(text, type=kind) for text in found]

    def _all_gather(self, rows: list[Tensor], mine: Tensor) -> None:
        host = self.host
        assert host is not None
        self.settle(self.start(lambda: all_gather(host, rows, mine)), mine)

    def jointly(self, act: Callable[[], T]) -> T:
        """Each rank's own part; if it goes wrong for one, all raise, and can go on."""
        cause: Exception | None = None
        text = ""
        try:
            result = act()
        except Exception as error:
            cause = error
            text = _what(error)
        said = self.gather(text, str)
        wrong = [f"rank {rank}: {it}" if self.size > 1 else it for rank, it in enumerate(said) if it]
        if wrong:
            raise self._error("; ".join(wrong)) from cause
        return result

    def all_or_none(self, act: Callable[[], T]) -> T:
        """The same, but each rank for which it goes wrong raises its own error."""
        wrong: Exception | None = None
        try:
            result = act()
        except Exception as error:
            wrong = error
        demand_none(wrong, self.gather("" if wrong is None else _what(wrong), str), self._failure)
        return result

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a tensor over a group of ours, in place."""
        self.settle(self.start(lambda: all_reduce(group, tensor, op)), tensor)

    def broadcast(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        """Give a rank's tensor to all others of a group of ours; `source` is its rank there."""
        self.settle(self.start(lambda: broadcast(group, tensor, source)), tensor)

    def start(self, begin: Callable[[], T]) -> T:
        """Begin what is done together; if that fails, say why."""
        with self.supervisor.explaining(_others):
            return begin()

    def settle(self, work: dist.Work | None, held: Tensor) -> None:
        """Wait for what was begun with a tensor: on a device its stream does, on the host we do, and can be woken."""
        if work is None:
            return
        if held.is_cuda or work.is_completed():
            self.start(work.wait)
        else:
            self.supervisor.wait(self._lane.follow(work, held), _others, patience=self._patience)

    def catch_up(self, what: str) -> None:
        """Let the host wait until the device has got here."""
        if self.device.type == "cuda":
            ticket: Awaited = StreamTicket(Reached())
            self.supervisor.wait(ticket, lambda: what, patience=self._patience)

    def _blocking(self, act: Callable[[], T]) -> T:
        """Run what nothing can wake, while we can be."""
        found: list[T] = []
        device = torch.cuda.current_device() if self.device.type == "cuda" else None

        class Call:
            def wait(self) -> None:
                if device is not None:
                    torch.cuda.set_device(device)
                found.append(act())

        self.supervisor.wait(self._lane.follow(Call()), _others)
        return found[0]

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Others may take long, as to read files: only their death ends the wait soon."""
        self._patience = _LONG
        try:
            yield
        finally:
            self._patience = None

    @contextmanager
    def closing_if_it_fails(self) -> Iterator[None]:
        """What goes wrong is told to all, and nothing is left of the team."""
        try:
            yield
        except BaseException as error:
            self.supervisor.failed_by(error)
            self.close()
            raise

    def end(self) -> None:
        """Nothing more is done together: let go of groups, and of all that waits for them. Others are still told."""
        if self.groups is not None:
            if self.supervisor.has_failed:
                self.supervisor.retire()
                self.groups.abort()
            self.groups.close()
        self._lane.close()

    def close(self) -> None:
        """The end, in peace."""
        self.supervisor.close()
        self.end()


def _others() -> str:
    return "the others"


def _what(error: Exception) -> str:
    """What went wrong, for those who did not see it."""
    return one_line(error) if isinstance(error, StrettoError) else named(error)
