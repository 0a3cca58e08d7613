"""Senders among themselves: what each has to say is known to all, or it is known who is missing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from stretto.execute.lanes import Awaited, HostLane
from stretto.execute.streams import Reached, StreamTicket
from stretto.execute.supervise import Supervisor
from stretto.ir.errors import WeightsError

T = TypeVar("T")
_LONG = 3600.0  # seconds


class Council:
    """Gathers words of all senders, over their host group; alone, there is only one's own."""

    def __init__(self, group: dist.ProcessGroup | None, supervisor: Supervisor) -> None:
        self.group, self._supervisor = group, supervisor
        self._lane = HostLane("council")
        self._patience: float | None = None
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    def gather(self, word: T, kind: type[T]) -> list[T]:
        """Everybody's word, in the order of ranks."""
        if self.group is None:
            return [word]
        data = msgspec.msgpack.encode(word)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.settle(dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group, async_op=True))
        most = max(int(size) for size in sizes)
        mine = torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8)
        rows = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.size)]
        self.settle(dist.all_gather(rows, mine, group=self.group, async_op=True))
        found = (row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True))
        return [msgspec.msgpack.decode(text, type=kind) for text in found]

    def jointly(self, act: Callable[[], T]) -> T:
        """Each sender's own part; if it goes wrong for one, all raise."""
        cause: Exception | None = None
        text = ""
        try:
            result = act()
        except Exception as error:
            cause = error
            text = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
        said = self.gather(text, str)
        wrong = [f"rank {rank}: {it}" if self.size > 1 else it for rank, it in enumerate(said) if it]
        if wrong:
            raise WeightsError("; ".join(wrong)) from cause
        return result

    def settle(self, work: dist.Work | None, device: torch.device | None = None) -> None:
        """Wait for what all senders do together."""
        if work is None:
            return
        ticket: Awaited
        if device is not None and device.type == "cuda":
            work.wait()  # the stream does
            ticket = StreamTicket(Reached())
        else:
            ticket = self._lane.follow(work)
        self._supervisor.wait(ticket, lambda: "the other senders", patience=self._patience)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Others may take long, as to read files: only their death ends the wait soon."""
        self._patience = _LONG
        try:
            yield
        finally:
            self._patience = None

    def close(self) -> None:
        self._lane.close()
