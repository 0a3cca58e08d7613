"""A sender's receivers: who serves which address, and the connections that stay open from push to push."""

from collections.abc import Sequence
from pathlib import Path

from stretto.execute.team import Team
from stretto.ir.errors import WeightsError
from stretto.weights.listener import read_secret
from stretto.weights.messages import Status
from stretto.weights.send.endpoint import Endpoint, Remote


class Remotes:
    """This sender's."""

    def __init__(self, team: Team, device: str, secret: bytes | None) -> None:
        self._team, self._secret = team, secret
        self.devices = team.gather(device, str)
        """Every sender's."""
        self._remotes: dict[str, Remote] = {}

    def homes(self, addresses: Sequence[str]) -> dict[str, int]:
        """Which sender serves each address; raises if one cannot be reached, or is on no sender's device."""
        asks = addresses if self._team.rank == 0 else []
        asked = self._team.jointly(lambda: _devices({it: status(it, secret=self._secret) for it in asks}))
        return _homes(self._team.gather(asked, dict[str, str])[0], self.devices)

    def endpoints(self, what: list[str], receivers: Sequence[str | Endpoint]) -> list[Endpoint]:
        """This sender's receivers: of each address, by the device that it is on."""
        addresses = [it for it in receivers if isinstance(it, str)]
        said = self._team.gather([*what, *addresses], list[str])
        for rank, other in enumerate(said):
            if other != said[0]:
                raise WeightsError(
                    f"rank {rank} pushes another version, to other addresses, or with other options than rank 0"
                )
        twice = {it for it in addresses if addresses.count(it) > 1}
        if twice:
            raise WeightsError(f"{min(twice)} is named twice")
        if not any(self._team.gather(bool(receivers), bool)):
            raise WeightsError("there is no receiver to push to")
        homes = self.homes(addresses)
        here = [it for it in addresses if homes[it] == self._team.rank]
        for gone in [it for it in self._remotes if it not in here]:
            self._remotes.pop(gone).close()
        own = [it for it in receivers if not isinstance(it, str)]
        return self._team.jointly(lambda: [*map(self._remote, here), *own])

    def _remote(self, address: str) -> Remote:
        known = self._remotes.get(address)
        if known is None or not known.alive():
            if known is not None:
                self._remotes.pop(address).close()
            self._remotes[address] = known = Remote(address, self._secret)
        return known

    def close(self) -> None:
        for remote in self._remotes.values():
            remote.close()
        self._remotes.clear()


def _devices(told: dict[str, Status]) -> dict[str, str]:
    """The device of each; raises if one receiver has two addresses."""
    seen: dict[str, str] = {}
    for address, it in told.items():
        if seen.setdefault(it.identity, address) != address:
            raise WeightsError(f"{seen[it.identity]} and {address} are one receiver")
    return {address: it.device for address, it in told.items()}


def _homes(devices: dict[str, str], senders: Sequence[str]) -> dict[str, int]:
    """Which sender serves each address: one on the same device, in turn if there are several."""
    homes: dict[str, int] = {}
    served = [0] * len(senders)
    for address, device in devices.items():
        there = [rank for rank, name in enumerate(senders) if name == device]
        if not there:
            raise WeightsError(f"{address} is on {device}, and senders are on {', '.join(sorted(set(senders)))}")
        homes[address] = rank = min(there, key=lambda it: served[it])
        served[rank] += 1
    return homes


def status(address: str, *, secret_file: str | Path | None = None, secret: bytes | None = None) -> Status:
    """State, version and last error of a receiver, at any time."""
    remote = Remote(address, secret or read_secret(secret_file))
    try:
        return remote.told
    finally:
        remote.close()
