"""Several ranks on one GPU: a backend of `torch.distributed`, which importing this module registers as "onegpu".

`init_process_group("onegpu")` creates groups whose ranks may all use the same GPU: tensors are copied from process to
process within its memory, in stream order, and CPU tensors go through gloo. "onecpu" does the same for CPU tensors,
through shared memory: messages have the same order, rendezvous and failures, and no GPU is needed.
"""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from stretto.onegpu.errors import GroupError
from stretto.onegpu.group import OneGpuGroup
from stretto.onegpu_broker.link_model import PRESETS, SimulatedLink

__all__ = ["PRESETS", "GroupError", "OneGpuGroup", "SimulatedLink"]


def _onegpu(store: Store, rank: int, size: int, timeout: timedelta) -> OneGpuGroup:
    return OneGpuGroup(store, rank, size, timeout, host=False)


def _onecpu(store: Store, rank: int, size: int, timeout: timedelta) -> OneGpuGroup:
    return OneGpuGroup(store, rank, size, timeout, host=True)


dist.Backend.register_backend("onegpu", _onegpu, devices=["cuda", "cpu"])
dist.Backend.register_backend("onecpu", _onecpu, devices=["cpu"])
