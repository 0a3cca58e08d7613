"""The members of a team: which processes of the world, and the backends of their groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Members:
    """Processes of the world, by their global ranks. Their ranks in the team are their places here."""

    ranks: tuple[int, ...]
    rank: int
    """This process's rank in the team."""
    backends: dict[str, str]
    """The backend for each type of device."""

    @staticmethod
    def of_group(group: dist.ProcessGroup) -> "Members":
        return _members(dist.get_process_group_ranks(group), group)

    @staticmethod
    def of_mesh(mesh: DeviceMesh) -> "Members":
        """Return all processes of a mesh, row by row."""
        return _members(mesh.mesh.flatten().tolist(), mesh.get_group(0))


def _members(ranks: Sequence[int], group: dist.ProcessGroup) -> Members:
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return Members(tuple(ranks), list(ranks).index(dist.get_rank()), backends)
