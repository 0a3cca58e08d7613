"""Process groups over gloo that can be aborted, and then hold up nobody.

Where a connection breaks at a bad moment, gloo loses the wait of a collective, which then ends only after the group's
timeout; and the destructor of a group waits for its collectives.
"""

import atexit
import contextlib
import threading
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_CPU = torch.device("cpu")
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED = 1 << 20  # a tag that no message has
_LAST_WAIT = 2.0  # seconds that a process waits at exit for groups that are ending

_ending: set[threading.Thread] = set()


def gloo_group(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group with the backend gloo."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def abort_gloo(group: dist.ProcessGroup) -> None:
    """Abort a gloo group by a wait that times out. When it is let go of, it ends in a thread of its own.

    Gloo's own abort does nothing. But a timeout closes all connections of the group, and ends the waits for them. It
    takes a connection that is still open: a wait for a rank that has gone fails at once, and closes no other.
    """
    if group.size() == 1:
        return
    gone = threading.Lock()
    gone.acquire()
    held = [group._get_backend(_CPU)]
    keeper = threading.Thread(target=_keep, args=(held, gone), name="stretto gloo group", daemon=True)
    keeper.start()
    weakref.finalize(group, _let_go, keeper, gone).atexit = False  # at exit the keeper stays as it is
    for step in range(1, group.size()):
        with contextlib.suppress(RuntimeError):
            peer = (group.rank() + step) % group.size()
            group.recv([torch.empty(1, device="cpu")], peer, _UNUSED).wait(_AT_ONCE)


def _keep(held: list[dist.Backend], gone: threading.Lock) -> None:
    """Hold the last reference to a backend until its group is gone."""
    gone.acquire()
    held.clear()
    _ending.discard(threading.current_thread())


def _let_go(keeper: threading.Thread, gone: threading.Lock) -> None:
    _ending.add(keeper)
    gone.release()


@atexit.register
def _end() -> None:
    """Wait for groups that are ending: a thread that returns from a destructor while Python exits would crash it.

    Aborted groups end soon, or if gloo has lost a wait, long after the process.
    """
    deadline = time.monotonic() + _LAST_WAIT
    for keeper in list(_ending):
        keeper.join(max(0.0, deadline - time.monotonic()))
