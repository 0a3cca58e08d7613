"""How fast bytes move here: measured before the first push, and by every push for the next."""

import time
from collections.abc import Callable
from math import inf

import msgspec
import torch

from stretto.execute.team import Team
from stretto.weights.send.choose import Speeds
from stretto.weights.send.push import SenderGroup

_BYTES = 16 << 20
_TIMES = 3


def measure(device: torch.device, group: SenderGroup, team: Team) -> Speeds:
    """The slowest sender's, by a few small copies."""
    here = team.jointly(lambda: copies(device))
    if group.size > 1:
        buffer = torch.empty(_BYTES, dtype=torch.uint8, device=device)

        def share() -> None:
            assert group.device is not None
            team.broadcast(buffer, 0, group.device)
            team.catch_up("the other senders")

        here = msgspec.structs.replace(here, broadcast=_fastest(share, device))
    return slowest(here, team)


def copies(device: torch.device) -> Speeds:
    """Of copies to and within a device; a broadcast is taken to be twice as fast as a copy from the host."""
    host = torch.zeros(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    one, other = torch.empty(2, _BYTES, dtype=torch.uint8, device=device)
    h2d = _fastest(lambda: one.copy_(host, non_blocking=True), device)
    return Speeds(h2d, 2 * h2d, _fastest(lambda: other.copy_(one), device))


def _fastest(act: Callable[[], object], device: torch.device) -> float:
    """Bytes in a second, of a few times."""
    found = float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        found = min(found, time.perf_counter() - began)
    return _BYTES / max(found, 1e-9)


def slowest(mine: Speeds, team: Team, known: Speeds | None = None) -> Speeds:
    """Of all senders, step by step; what nobody can tell is as it was known."""
    rows = [msgspec.structs.astuple(it) for it in team.gather(mine, Speeds)]
    found = [min(row) for row in zip(*rows, strict=True)]
    before = found if known is None else msgspec.structs.astuple(known)
    return Speeds(*(old if new == inf else new for new, old in zip(found, before, strict=True)))
