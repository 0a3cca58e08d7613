"""Trains a small random Qwen3-MoE, cut into layers: torchrun --nproc-per-node=2 examples/finetune.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import stretto
from stretto.model import transformers_loss

VOCABULARY, TOKENS, MICROBATCHES, STEPS = 32, 16, 4, 40
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "moe_intermediate_size": 32}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    plan = stretto.schedules.zb_h1(devices=mesh.size(), microbatches=MICROBATCHES)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **ATTENTION, **EXPERTS))
    pipe = stretto.Pipeline(stretto.cut(model), plan=plan, loss=transformers_loss, mesh=mesh["pp"])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(STEPS):
        start = torch.randint(VOCABULARY, (4 * MICROBATCHES, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start + torch.arange(TOKENS)) % VOCABULARY  # what comes next is one more
        with torch.autocast("cpu", torch.bfloat16):
            result = pipe.step(tokens, tokens)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        if pipe.rank == 0 and step % 10 in (0, 9):
            print(f"step {step + 1:>2}  loss {result.loss:.3f}", flush=True)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
