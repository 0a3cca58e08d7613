"""Process groups of our own, so that nothing we do, and nothing that fails, is seen by those of the user."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

_LONG = 1800.0  # seconds that a group has patience; supervisors find out sooner what is wrong
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED = 1 << 20  # a tag that nobody sends with


class Groups:
    """Makes groups of the ranks of a user's. Where several such work side by side, each has its own.

    All processes make all groups in the same order, as `new_group` demands. (It has a form for members only, but that
    names a group after how many the process has made before, which differs between ranks.)
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout: float,
        blocking: Callable[[Callable[[], dist.ProcessGroup]], dist.ProcessGroup],
        settle: Callable[[dist.Work | None, torch.Tensor], None],
    ) -> None:
        """`blocking` runs what nothing can wake, and `settle` waits for what was started."""
        self._timeout = timedelta(seconds=max(_LONG, 2 * timeout))
        self._blocking = blocking
        self._made: list[dist.ProcessGroup] = []
        mine = torch.tensor(dist.get_process_group_ranks(group), device=device)
        world = self._new(range(dist.get_world_size()))
        assert world is not None
        rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        settle(dist.all_gather(rows, mine, group=world, async_op=True), mine)
        self._sides: list[tuple[int, ...]] = sorted({tuple(row.tolist()) for row in rows})
        self._mine: tuple[int, ...] = tuple(mine.tolist())
        self.number = self._sides.index(self._mine)
        """Which of those that work side by side this is."""

        every = range(len(self._mine))
        self.everybody = world if self._sides == [tuple(range(len(rows)))] else self._demand(every)
        """All ranks, for tensors of the device."""
        self.host = self.everybody if device.type == "cpu" else self._demand(every, backend="gloo")
        """All ranks, for tensors of the host."""

    def make(self, members: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup | None:
        """A group of these ranks; None on a rank that is not among them."""
        found = None
        for side in self._sides:
            made = self._new([side[rank] for rank in members], backend)
            if side == self._mine:
                found = made
        return found

    def _demand(self, members: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
        made = self.make(members, backend=backend)
        assert made is not None
        return made

    def _new(self, processes: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
        made = self._blocking(lambda: dist.new_group(processes, backend=backend, timeout=self._timeout))
        if dist.get_rank() not in processes:
            return None
        self._made.append(made)
        return made

    def abort(self) -> None:
        """Give up on all that is under way: whatever waits for it, here or on another rank, is let go."""
        for group in self._made if dist.is_initialized() else ():
            with contextlib.suppress(RuntimeError):
                group.abort()
            _abort_gloo(group)

    def close(self) -> None:
        """Let go of all that were made."""
        for group in self._made if dist.is_initialized() else ():  # or all have gone with the world's
            with contextlib.suppress(RuntimeError, ValueError):  # or with an earlier world's
                dist.destroy_process_group(group)
        self._made.clear()


def _abort_gloo(group: dist.ProcessGroup) -> None:
    """Gloo's own abort does nothing. But a wait that takes too long closes all connections of its group, and ends
    everything that waits for them.
    """
    if group.size() > 1 and "cpu:gloo" in dist.get_backend_config(group):
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _UNUSED).wait(_AT_ONCE)
