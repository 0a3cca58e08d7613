"""Measures copy and broadcast speeds before the first push; later pushes use the speeds of the push before."""

import time
from collections.abc import Callable
from math import inf

import msgspec
import torch

from stretto.execute.team import Team
from stretto.weights.send.choose import Speeds
from stretto.weights.send.sender_group import SenderGroup

_BYTES = 16 << 20
_TIMES = 3


def measure(device: torch.device, group: SenderGroup, team: Team) -> Speeds:
    """Measure a few small copies; return the slowest sender's speeds."""
    local = team.jointly(lambda: copies(device))
    if group.size > 1:
        buffer = torch.empty(_BYTES, dtype=torch.uint8, device=device)

        def share() -> None:
            assert group.device is not None
            team.broadcast(buffer, 0, group.device)
            team.catch_up("the other senders")

        local = msgspec.structs.replace(local, broadcast=_fastest(share, device))
    return slowest(local, team)


def copies(device: torch.device) -> Speeds:
    """Measure copies to and within a device; assume that a broadcast is twice as fast as a copy from the host."""
    host = torch.zeros(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    one, other = torch.empty(2, _BYTES, dtype=torch.uint8, device=device)
    h2d = _fastest(lambda: one.copy_(host, non_blocking=True), device)
    return Speeds(h2d, 2 * h2d, _fastest(lambda: other.copy_(one), device))


def _fastest(act: Callable[[], object], device: torch.device) -> float:
    """Return the bytes per second of the fastest of a few runs."""
    shortest = float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        shortest = min(shortest, time.perf_counter() - began)
    return _BYTES / max(shortest, 1e-9)


def slowest(mine: Speeds, team: Team, known: Speeds | None = None) -> Speeds:
    """Return the slowest sender's speed for each step; for a step that no sender has measured, the `known` one."""
    rows = [msgspec.structs.astuple(speeds) for speeds in team.gather(mine, Speeds)]
    measured = [min(row) for row in zip(*rows, strict=True)]
    previous = measured if known is None else msgspec.structs.astuple(known)
    return Speeds(*(old if new == inf else new for new, old in zip(measured, previous, strict=True)))
