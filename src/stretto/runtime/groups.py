"""Groups of some of a pipeline's ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Groups:
    """Makes groups within a pipeline. Where several pipelines train side by side, each has its own.

    All processes make all groups in the same order, as `new_group` demands. (It has a form for members only, but that
    names a group after how many the process has made before, which differs between the ranks of a pipeline.)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        mine = torch.tensor(dist.get_process_group_ranks(group), device=device)
        rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        self._pipelines: list[tuple[int, ...]] = sorted({tuple(row.tolist()) for row in rows})
        self._mine: tuple[int, ...] = tuple(mine.tolist())
        self.number = self._pipelines.index(self._mine)
        """Which of the pipelines that train side by side this is."""

        self.pipeline = group
        """The group that the pipeline was given."""
        self._made: list[dist.ProcessGroup] = []
        everybody = None if device.type == "cpu" else self.make(range(len(self._mine)), backend="gloo")
        self.host = everybody or group
        """A group of the pipeline's ranks for tensors of the host."""

    def make(self, members: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup | None:
        """A group of these ranks of the pipeline; None on a rank that is not among them."""
        found = None
        for pipeline in self._pipelines:
            processes = [pipeline[rank] for rank in members]
            made = dist.new_group(processes, backend=backend)
            if pipeline == self._mine and dist.get_rank() in processes:
                found = made
                self._made.append(made)
        return found

    def close(self) -> None:
        """Let go of all that were made."""
        for group in self._made if dist.is_initialized() else ():  # or all have gone with the world's
            dist.destroy_process_group(group)
        self._made.clear()
