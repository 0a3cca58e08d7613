"""The shape of a mesh of devices: pipeline stages (pp) × expert-parallel ranks (ep) × data-parallel ranks (dp)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from stretto.ir.errors import PlanError

NAMES = ("pp", "ep", "dp")
_MOST_DEVICES = 2**20


@dataclass(frozen=True)
class MeshShape:
    """The dimensions of a mesh, outermost first. Devices are numbered row by row, as in PyTorch's DeviceMesh.

    The devices with the same place along all dimensions but "pp" form a pipeline, called a replica: each runs the plan
    on microbatches of its own. Replicas are numbered row by row too. Along "ep", replicas hold different experts; all
    else is held by every replica.

    >>> mesh = MeshShape.of({"dp": 2, "pp": 4, "ep": 2})
    >>> mesh.devices, mesh.replicas, mesh.device(pp=1, replica=3), mesh.place(11)
    (16, 4, 11, (1, 3))
    >>> [mesh.ep_rank(replica) for replica in range(4)], mesh.ep_replicas(3)
    ([0, 1, 0, 1], (2, 3))
    """

    dimensions: tuple[tuple[str, int], ...]

    @staticmethod
    def of(sizes: "Mapping[str, int] | MeshShape") -> "MeshShape":
        """Return the shape with these dimensions, outermost first. Sizes that are left out are 1."""
        if isinstance(sizes, MeshShape):
            return sizes
        if not isinstance(sizes, Mapping) or not all(_is_dimension(name, size) for name, size in sizes.items()):
            raise PlanError(
                f'a mesh has sizes of at least 1 for "pp", "ep" and "dp", such as {{"pp": 4, "ep": 2}} '
                f"(got {sizes!r:.80})"
            )
        if prod(sizes.values()) > _MOST_DEVICES:
            raise PlanError(f"a mesh has at most {_MOST_DEVICES:,} devices (got {prod(sizes.values()):,})")
        return MeshShape(tuple(sizes.items()))

    @staticmethod
    def parse(text: str) -> "MeshShape":
        """Read a shape as it prints.

        >>> str(MeshShape.parse("pp=4, ep=2"))
        'pp=4,ep=2'
        """
        sizes: dict[str, int] = {}
        for word in text.split(","):
            name, _, size = (side.strip() for side in word.partition("="))
            if name not in NAMES or name in sizes or not (size.isascii() and size.isdecimal() and len(size) < 8):
                raise PlanError(f"a mesh is written as pp=4,ep=2,dp=2, outermost dimension first (got {text!r:.40})")
            sizes[name] = int(size)
        return MeshShape.of(sizes)

    @property
    def devices(self) -> int:
        return prod(size for _, size in self.dimensions)

    @property
    def pp(self) -> int:
        return self._size("pp")

    @property
    def ep(self) -> int:
        return self._size("ep")

    @property
    def dp(self) -> int:
        return self._size("dp")

    @property
    def replicas(self) -> int:
        """The number of pipelines."""
        return self.ep * self.dp

    def device(self, *, pp: int, replica: int) -> int:
        """Return the device at this place of a replica."""
        return self._devices[replica][pp]

    def place(self, device: int) -> tuple[int, int]:
        """Return a device's place along "pp", and its replica."""
        return self._places[device]

    def place_text(self, device: int) -> str:
        """Return a device's coordinates along the dimensions with several places, in words.

        >>> MeshShape.of({"pp": 4, "ep": 2}).place_text(3)
        'pp 1, ep 1'
        """
        coordinates = self._coordinates[device]
        return ", ".join(f"{name} {coordinates[name]}" for name, size in self.dimensions if size > 1)

    def ep_rank(self, replica: int) -> int:
        """Return a replica's place along "ep"."""
        return self._ranks[replica]["ep"]

    def ep_replicas(self, replica: int) -> tuple[int, ...]:
        """Return the replicas that hold the other experts, and this one, in the order of their places along "ep"."""
        other = self._ranks[replica]["dp"]
        return tuple(number for number, ranks in enumerate(self._ranks) if ranks["dp"] == other)

    def _size(self, name: str) -> int:
        return dict(self.dimensions).get(name, 1)

    @cached_property
    def _coordinates(self) -> list[dict[str, int]]:
        """The coordinates of each device."""
        every = []
        for device in range(self.devices):
            coordinates, rest = dict.fromkeys(NAMES, 0), device
            for name, size in reversed(self.dimensions):
                rest, coordinates[name] = divmod(rest, size)
            every.append(coordinates)
        return every

    @cached_property
    def _ranks(self) -> list[dict[str, int]]:
        """The coordinates of each replica's first device."""
        return [coordinates for coordinates in self._coordinates if coordinates["pp"] == 0]

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        number = {(ranks["ep"], ranks["dp"]): replica for replica, ranks in enumerate(self._ranks)}
        return [(at["pp"], number[at["ep"], at["dp"]]) for at in self._coordinates]

    @cached_property
    def _devices(self) -> list[list[int]]:
        devices = [[0] * self.pp for _ in range(self.replicas)]
        for device, (pp, replica) in enumerate(self._places):
            devices[replica][pp] = device
        return devices

    def __str__(self) -> str:
        """Return the sizes as in "pp=4,ep=2"."""
        return ",".join(f"{name}={size}" for name, size in self.dimensions)


def _is_dimension(name: Any, size: Any) -> bool:
    return name in NAMES and type(size) is int and size >= 1
