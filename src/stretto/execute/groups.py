"""Stretto's own process groups, so that the user's groups see neither its operations nor its failures."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from stretto.execute.gloo import abort_gloo, gloo_group
from stretto.execute.members import Members
from stretto.ir.errors import StrettoError, one_line

_LONG = 1800.0  # seconds of a group's timeout at least; supervisors detect failures sooner


class Groups:
    """Makes groups from the ranks of one team; only the members of a group take part in making it.

    `torch.distributed.new_group` involves all processes of the world, and names a group after the number of groups that
    the process made before: if one process fails in between, the names no longer agree. These groups have unique names.
    """

    def __init__(
        self,
        members: Members,
        device: torch.device,
        store: c10d.Store,
        *,
        timeout: float,
        blocking: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """Only these ranks use `store`, and only this time; `blocking` runs a call that cannot be interrupted."""
        self._rank, self._size, self._store, self._blocking = members.rank, len(members.ranks), store, blocking
        self._timeout = timedelta(seconds=max(_LONG, 2 * timeout))
        self._backend = members.backends.get(device.type, "")
        self._groups: list[tuple[str, Any]] = []  # with their backends
        self._failure = ""  # of groups that are closed
        self._count = 0
        every = range(self._size)
        self.everybody = self._all(every, self._backend)
        """All ranks, for tensors on the device."""
        self.host = self.everybody if device.type == "cpu" else self._all(every, "gloo")
        """All ranks, for tensors on the host."""

    def make(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """Make a group of these ranks in ascending order, or return None on other ranks. All ranks must call this."""
        self._count += 1
        if self._rank not in members:
            return None
        return self._new(sorted(members), self._backend)

    def _all(self, members: Sequence[int], backend: str) -> dist.ProcessGroup:
        self._count += 1
        return self._new(members, backend)

    def _new(self, members: Sequence[int], backend: str) -> dist.ProcessGroup:
        store, rank = c10d.PrefixStore(str(self._count), self._store), list(members).index(self._rank)
        group: dist.ProcessGroup = self._blocking(lambda: _group(backend, store, rank, len(members), self._timeout))
        self._groups.append((backend, group))
        if hasattr(group, "share_fate"):
            group.share_fate(self._groups[0][1])
        return group

    def check(self) -> None:
        """Raise if a nonblocking group has failed: what waits for it goes on then, without its data."""
        if self._failure:
            raise RuntimeError(self._failure)
        for _, group in self._groups:
            check_group(group)

    def abort(self) -> None:
        """Abort all operations in progress, which ends every wait for them, here or on another rank."""
        self._remember()
        for backend, group in self._groups:
            with contextlib.suppress(RuntimeError):
                if backend == "gloo":
                    abort_gloo(group)
                else:
                    group.abort()
                    self._failure = self._failure or "its groups were aborted"

    def close(self) -> None:
        """Close all groups. If one has failed, `check` says so even then: what waited for it never came."""
        self._remember()
        for backend, group in self._groups:
            with contextlib.suppress(RuntimeError):
                if backend != "gloo":
                    group.shutdown()
        self._groups.clear()

    def _remember(self) -> None:
        try:
            self.check()
        except RuntimeError as error:
            self._failure = one_line(error)


def _group(backend: str, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group with one backend, as `torch.distributed` does."""
    if plugin := dist.Backend._plugins.get(backend.upper()):
        return plugin.creator_fn(store, rank, size, timeout)
    if backend == "gloo":
        return gloo_group(store, rank, size, timeout)
    if backend != "nccl":
        raise StrettoError(f"process groups of gloo, nccl, onegpu and onecpu can be used (got {backend or 'none'!r})")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = True  # or its kernels would wait for those of compute, which fill the device
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    return group


def check_group(group: dist.ProcessGroup) -> None:
    """Raise if a nonblocking group has failed."""
    if hasattr(group, "check"):
        group.check()


# The same as in `torch.distributed`, for groups that it does not know. They begin an operation and do not wait for it.


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
    """Exchange rows: `sizes` rows come from each rank, and `of` rows go to each rank."""
    return group.alltoall_base(taken, sent, sizes, of, c10d.AllToAllOptions())


def place_among(ranks: Sequence[int]) -> int:
    """Return the index of a group among the parallel groups of a regular mesh, ordered by their first ranks.

    >>> place_among([0, 1]), place_among([2, 3]), place_among([1, 3]), place_among([5, 7])
    (0, 1, 1, 3)
    """
    first, size = ranks[0], len(ranks)
    step = ranks[1] - first if size > 1 else 1
    return first // (step * size) * step + first % step
