"""How much of the GPU the broker keeps from the ranks over many steps of a model with experts on other ranks.

Two pipelines of two stages, eight layers, each of which exchanges 64 MiB with its neighbour twice (as experts'
dispatch and combine do), in unequal parts; sixteen microbatches, and the allocator's cache emptied every few steps.
"""

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import stretto
import stretto.onegpu
from stretto.schedules import one_f_one_b

WIDTH, ROWS, LAYERS, MICROBATCHES = 4096, 8192, 8, 16
GIB = 2**30


class Exchange(torch.autograd.Function):
    """Rows to and from the other ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: list[int], given: list[int], group: Any) -> Tensor:
        ctx.sizes = out, given, group
        result = x.new_empty(sum(out), x.shape[1])
        dist.all_to_all_single(result, x.contiguous(), out, given, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        out, given, group = ctx.sizes
        result = grads[0].new_empty(sum(given), grads[0].shape[1])
        dist.all_to_all_single(result, grads[0].contiguous(), given, out, group=group)
        return result, None, None, None


class Experts(nn.Module):
    def __init__(self, group: Any, number: int) -> None:
        super().__init__()
        self.here = nn.Linear(WIDTH, WIDTH, bias=False)
        self._group, self._number, self._runs = group, number, 0

    def forward(self, x: Tensor) -> Tensor:
        self._runs += 1
        mine = self._group.rank()
        moved = ROWS // 8 + 64 * ((7 * self._runs + self._number) % 40)  # both ranks send as many as they get
        sizes = [ROWS - moved, moved] if mine == 0 else [moved, ROWS - moved]
        there = _exchange(x, sizes, self._group)
        return x + _exchange(self.here(there), sizes, self._group)


def _exchange(x: Tensor, sizes: list[int], group: Any) -> Tensor:
    moved: Tensor = Exchange.apply(x, sizes, sizes, group)  # type: ignore[no-untyped-call]
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--empty-every", type=int, default=5)
    given = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("onegpu")
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "ep"))
    ep = mesh["ep"].get_group()
    torch.manual_seed(dist.get_rank())
    pipe = stretto.Pipeline(
        lambda number: Experts(ep, number).to(torch.bfloat16),
        layer_count=LAYERS,
        plan=one_f_one_b(devices=2, microbatches=MICROBATCHES),
        loss=lambda output, _: output.float().square().mean(),
        mesh=mesh["pp"],
    )
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    for step in range(given.steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        pipe.step(batch, batch)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        if (step + 1) % given.empty_every == 0:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            dist.barrier()
            time.sleep(0.3)  # in which the broker may let go
        ours = torch.tensor([torch.cuda.memory_reserved()], dtype=torch.float64)
        dist.all_reduce(ours)
        if dist.get_rank() == 0 and ((step + 1) % given.empty_every == 0 or step < 3):
            free, total = torch.cuda.mem_get_info()
            rest = (total - free - float(ours)) / GIB
            held = f"ranks {float(ours) / GIB:5.1f} GiB, everything else {rest:5.1f} GiB"
            print(f"step {step + 1:3}: {held}, {seconds * 1e3:6.0f} ms", flush=True)
        dist.barrier()
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
