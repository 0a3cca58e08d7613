"""Trains a small transformer by any schedule: torchrun --nproc-per-node=4 examples/train.py dualpipe [TRACE]"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import stretto

VOCABULARY, WIDTH, TOKENS, MICROBATCHES, STEPS = 64, 64, 32, 16, 20


def layers(count: int) -> list[nn.Module]:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    return [nn.Embedding(VOCABULARY, WIDTH), *(block() for _ in range(count - 2)), nn.Linear(WIDTH, VOCABULARY)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def main() -> None:
    name, *trace = sys.argv[1:] or ["dualpipe"]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    plan = getattr(stretto.schedules, name)(devices=mesh.size(), microbatches=MICROBATCHES)
    pipe = stretto.Pipeline(layers(max(10, plan.stages)), plan=plan, loss=loss, mesh=mesh["pp"])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    for step in range(STEPS):
        start = torch.randint(VOCABULARY, (2 * MICROBATCHES, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start + torch.arange(TOKENS + 1)) % VOCABULARY  # what comes next is one more
        result = pipe.step(tokens[:, :-1], tokens[:, 1:], record=bool(trace) and step == STEPS - 1)
        optimizer.step()
        if pipe.rank == 0 and step % 5 in (0, 4):
            print(f"step {step + 1:>2}  loss {result.loss:.3f}", flush=True)
    if result.timeline is not None:
        result.timeline.save(trace[0])
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
