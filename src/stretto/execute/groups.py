"""Process groups of our own, so that nothing we do, and nothing that fails, is seen by those of the user."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from stretto.ir.errors import StrettoError

_LONG = 1800.0  # seconds that a group has patience; supervisors find out sooner what is wrong
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED = 1 << 20  # a tag that nobody sends with


class Groups:
    """Makes groups of the ranks of one of the user's, each by its members alone.

    `torch.distributed.new_group` is for all processes of the world, and names a group by how many the process has made
    before: if one process fails on the way, no two agree on a name any more. These have names of their own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        store: c10d.Store,
        *,
        timeout: float,
        blocking: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """`store` is one that only these ranks use, this time; `blocking` runs what nothing can wake."""
        self._rank, self._size, self._store, self._blocking = group.rank(), group.size(), store, blocking
        self._timeout = timedelta(seconds=max(_LONG, 2 * timeout))
        backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        self._backend = backends.get(device.type, "")
        self._made: list[tuple[str, Any]] = []
        self._count = 0
        every = range(self._size)
        self.everybody = self._all(every, self._backend)
        """All ranks, for tensors of the device."""
        self.host = self.everybody if device.type == "cpu" else self._all(every, "gloo")
        """All ranks, for tensors of the host."""

    def make(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of these ranks, in ascending order; None on a rank that is not among them. All ranks ask for all."""
        self._count += 1
        if self._rank not in members:
            return None
        return self._new(sorted(members), self._backend)

    def _all(self, members: Sequence[int], backend: str) -> dist.ProcessGroup:
        self._count += 1
        return self._new(members, backend)

    def _new(self, members: Sequence[int], backend: str) -> dist.ProcessGroup:
        store, rank = c10d.PrefixStore(str(self._count), self._store), list(members).index(self._rank)
        made: dist.ProcessGroup = self._blocking(lambda: _group(backend, store, rank, len(members), self._timeout))
        self._made.append((backend, made))
        return made

    def abort(self) -> None:
        """Give up on all that is under way: whatever waits for it, here or on another rank, is let go."""
        for backend, group in self._made:
            with contextlib.suppress(RuntimeError):
                if backend == "gloo":
                    _abort_gloo(group)
                else:
                    group.abort()

    def close(self) -> None:
        """Let go of all that were made."""
        for backend, group in self._made:
            with contextlib.suppress(RuntimeError):
                if backend != "gloo":
                    group.shutdown()
        self._made.clear()


def _group(backend: str, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group with one backend, as `torch.distributed` makes them."""
    if plugin := dist.Backend._plugins.get(backend.upper()):
        return plugin.creator_fn(store, rank, size, timeout)
    made = dist.ProcessGroup(store, rank, size)
    if backend == "gloo":
        kind, part, device = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo, "cpu"
        one: Any = part(store, rank, size, timeout=timeout)
    elif backend == "nccl":
        kind, device = dist.ProcessGroup.BackendType.NCCL, "cuda"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        one = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        raise StrettoError(f"process groups of gloo, nccl, onegpu and onecpu can be used (got {backend or 'none'!r})")
    made._set_default_backend(kind)
    made._register_backend(torch.device(device), kind, one)
    return made


def _abort_gloo(group: dist.ProcessGroup) -> None:
    """Gloo's own abort does nothing. But a wait that takes too long closes all connections of its group, and ends
    everything that waits for them.
    """
    if group.size() > 1:
        group.recv([torch.empty(1, device="cpu")], (group.rank() + 1) % group.size(), _UNUSED).wait(_AT_ONCE)


# What `torch.distributed` does for groups that it knows; all of these begin something, and do not wait for it.


def all_reduce(group: dist.ProcessGroup, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work:
    options = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    return group.allreduce([tensor], options)


def all_gather(group: dist.ProcessGroup, rows: list[Tensor], mine: Tensor) -> dist.Work:
    return group.allgather([rows], [mine])


def broadcast(group: dist.ProcessGroup, tensor: Tensor, source: int) -> dist.Work:
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return group.broadcast([tensor], options)


def all_to_all(group: dist.ProcessGroup, taken: Tensor, sent: Tensor, sizes: list[int], of: list[int]) -> dist.Work:
    """Of rows: as many `of` them as go to each, and `sizes` that come from each."""
    return group.alltoall_base(taken, sent, sizes, of, c10d.AllToAllOptions())


def place_among(ranks: Sequence[int]) -> int:
    """Which of the groups that lie side by side in a regular mesh this is, in the order of their first ranks.

    >>> place_among([0, 1]), place_among([2, 3]), place_among([1, 3]), place_among([5, 7])
    (0, 1, 1, 3)
    """
    first, size = ranks[0], len(ranks)
    step = ranks[1] - first if size > 1 else 1
    return first // (step * size) * step + first % step
