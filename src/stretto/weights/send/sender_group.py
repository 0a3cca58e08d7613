"""The group of senders that push together."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class SenderGroup:
    """This sender's rank among the senders, and their process groups, which are None if there is only one sender."""

    rank: int
    size: int
    device: dist.ProcessGroup | None = None
    """For tensors in device memory."""
    host: dist.ProcessGroup | None = None
    """For tensors in host memory."""
