"""Several ranks on one GPU: a backend of `torch.distributed`, registered as "onegpu" by importing this.

`init_process_group("onegpu")` makes groups whose ranks may all use the same GPU: tensors are copied from process to
process within its memory, ordered by streams, and tensors of the CPU go to gloo. "onecpu" is the same for tensors of
the CPU, through shared memory: it has the same order, rendezvous and failures, and needs no GPU.
"""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from stretto.onegpu.engine import GroupError
from stretto.onegpu.group import OneGpuGroup
from stretto.onegpu_broker.link_model import PRESETS, SimulatedLink

__all__ = ["PRESETS", "GroupError", "OneGpuGroup", "SimulatedLink"]


def _on_gpu(store: Store, rank: int, size: int, timeout: timedelta) -> OneGpuGroup:
    return OneGpuGroup(store, rank, size, timeout, host=False)


def _on_cpu(store: Store, rank: int, size: int, timeout: timedelta) -> OneGpuGroup:
    return OneGpuGroup(store, rank, size, timeout, host=True)


dist.Backend.register_backend("onegpu", _on_gpu, devices=["cuda", "cpu"])
dist.Backend.register_backend("onecpu", _on_cpu, devices=["cpu"])
