"""How fast bytes move here: measured before the first push, and by every push for the next."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from stretto.weights.choose import Speeds
from stretto.weights.council import Council
from stretto.weights.push import Group

_BYTES = 16 << 20
_TIMES = 3


def measure(device: torch.device, group: Group, council: Council) -> Speeds:
    """The slowest sender's, by a few small copies."""
    cuda = device.type == "cuda"
    host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=cuda)
    one, other = torch.empty(2, _BYTES, dtype=torch.uint8, device=device)

    def least(act: Callable[[], object]) -> float:
        found = float("inf")
        for _ in range(_TIMES):
            began = time.perf_counter()
            act()
            if cuda:
                torch.cuda.current_stream(device).synchronize()
            found = min(found, time.perf_counter() - began)
        return _BYTES / max(found, 1e-9)

    def broadcast() -> None:
        work = dist.broadcast(one, group_src=0, group=group.device, async_op=True)
        if cuda and work is not None:
            work.wait()
        else:
            council.settle(work)

    h2d, reload = least(lambda: one.copy_(host, non_blocking=True)), least(lambda: other.copy_(one))
    return slowest(Speeds(h2d, least(broadcast) if group.size > 1 else 1e12, reload), council)


def slowest(mine: Speeds, council: Council) -> Speeds:
    """Of all senders, step by step."""
    found = council.gather(mine, Speeds)
    return Speeds(min(it.h2d for it in found), min(it.broadcast for it in found), min(it.reload for it in found))
