"""Trains a small DeepSeek-V3 on a mesh: torchrun --nproc-per-node=4 examples/train_moe.py pp=2,ep=2 [CHECKPOINT]"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import stretto
from stretto.model import CausalLM, ModelConfig, causal_lm_loss, update_router_biases

CONFIG = ModelConfig.named("tiny")
TOKENS, MICROBATCHES, STEPS = 16, 4, 20  # each pipeline has so many microbatches in a step


def main() -> None:
    text, *checkpoint = sys.argv[1:] or ["pp=2,ep=2"]
    sizes = {name: int(size) for name, size in (word.split("=") for word in text.split(","))}
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks make the same model, and each keeps its own layers and experts
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    plan = stretto.schedules.dualpipev(devices=sizes.get("pp", 1), microbatches=MICROBATCHES)
    memory = {"*norm": "recompute", "*.swiglu": "recompute"}  # these are computed again, rather than kept
    pipe = stretto.Pipeline(CausalLM(CONFIG).layers(), plan=plan, loss=causal_lm_loss, mesh=mesh, memory=memory)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    pipeline = 0  # which of the ep × dp pipelines this rank belongs to
    for name in ("dp", "ep"):
        pipeline = pipeline * sizes.get(name, 1) + (mesh.get_local_rank(name) if name in sizes else 0)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * pipeline + step)  # each pipeline has batches of its own
        start = torch.randint(CONFIG.vocab_size, (8 * MICROBATCHES, 1), generator=generator)
        tokens = (start + torch.arange(TOKENS + 1)) % CONFIG.vocab_size  # what comes next is one more
        result = pipe.step(tokens[:, :-1], tokens[:, 1:])
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        update_router_biases(pipe, rate=1e-3)
        if pipe.rank == 0 and step % 5 in (0, 4):
            print(f"step {step + 1:>2}  norm {norm:.2f}  loss {result.loss:.3f}", flush=True)
    if checkpoint:  # of the whole model, for any mesh
        state = {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}
        dcp.save(state, checkpoint_id=checkpoint[0])
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
