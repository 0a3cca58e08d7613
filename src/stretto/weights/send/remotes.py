"""Assigns receiver addresses to senders, and keeps each sender's connections open from push to push."""

from collections.abc import Sequence
from pathlib import Path

from stretto.execute.team import Team
from stretto.ir.errors import WeightsError
from stretto.weights.listener import read_secret
from stretto.weights.messages import Status
from stretto.weights.send.endpoint import Endpoint, Remote


class Remotes:
    """The connections of this sender."""

    def __init__(self, team: Team, device: str, secret: bytes | None) -> None:
        self._team, self._secret = team, secret
        self.devices = team.gather(device, str)
        """The device of each sender."""
        self._remotes: dict[str, Remote] = {}

    def homes(self, addresses: Sequence[str]) -> dict[str, int]:
        """Return which sender serves each address. Raise if one is unreachable, or on no sender's device."""
        queried = addresses if self._team.rank == 0 else []
        devices = self._team.jointly(
            lambda: _devices({address: status(address, secret=self._secret) for address in queried})
        )
        return _assign(self._team.gather(devices, dict[str, str])[0], self.devices)

    def endpoints(self, what: list[str], receivers: Sequence[str | Endpoint]) -> list[Endpoint]:
        """Return this sender's receivers: its share of the addresses, by device, and the endpoints passed here.

        Raise WeightsError unless all senders pass the same addresses and the same options (`what`).
        """
        addresses = [receiver for receiver in receivers if isinstance(receiver, str)]
        requests = self._team.gather([*what, *addresses], list[str])
        for rank, request in enumerate(requests):
            if request != requests[0]:
                raise WeightsError(
                    f"rank {rank} pushes another version, to other addresses, or with other options than rank 0"
                )
        duplicates = {address for address in addresses if addresses.count(address) > 1}
        if duplicates:
            raise WeightsError(f"{min(duplicates)} is named twice")
        if not any(self._team.gather(bool(receivers), bool)):
            raise WeightsError("there is no receiver to push to")
        homes = self.homes(addresses)
        served = [address for address in addresses if homes[address] == self._team.rank]
        for unused in [address for address in self._remotes if address not in served]:
            self._remotes.pop(unused).close()
        endpoints = [receiver for receiver in receivers if not isinstance(receiver, str)]
        return self._team.jointly(lambda: [*map(self._remote, served), *endpoints])

    def _remote(self, address: str) -> Remote:
        """Return a working connection to an address: the known one, or a new one."""
        remote = self._remotes.get(address)
        if remote is None or not remote.alive():
            if remote is not None:
                self._remotes.pop(address).close()
            self._remotes[address] = remote = Remote(address, self._secret)
        return remote

    def close(self) -> None:
        for remote in self._remotes.values():
            remote.close()
        self._remotes.clear()


def _devices(statuses: dict[str, Status]) -> dict[str, str]:
    """Return the device of each address; raise WeightsError if two addresses are one receiver."""
    seen: dict[str, str] = {}
    for address, receiver in statuses.items():
        if seen.setdefault(receiver.identity, address) != address:
            raise WeightsError(f"{seen[receiver.identity]} and {address} are one receiver")
    return {address: receiver.device for address, receiver in statuses.items()}


def _assign(devices: dict[str, str], senders: Sequence[str]) -> dict[str, int]:
    """Return which sender serves each address: one on the same device, in turn if there are several."""
    homes: dict[str, int] = {}
    served = [0] * len(senders)
    for address, device in devices.items():
        candidates = [rank for rank, name in enumerate(senders) if name == device]
        if not candidates:
            raise WeightsError(f"{address} is on {device}, and senders are on {', '.join(sorted(set(senders)))}")
        homes[address] = rank = min(candidates, key=lambda candidate: served[candidate])
        served[rank] += 1
    return homes


def status(address: str, *, secret_file: str | Path | None = None, secret: bytes | None = None) -> Status:
    """Return the state, version and last error of a receiver; works at any time."""
    remote = Remote(address, secret or read_secret(secret_file))
    try:
        return remote.initial_status
    finally:
        remote.close()
