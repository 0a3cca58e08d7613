"""Whether float8 changes what is learned: a small DeepSeek-V3, trained by `none` and by `k2` from several seeds.

    python benchmarks/offload/losses.py [--steps 400] [--seed 0]… [--device cpu]

A seed stands for the weights at the start. All runs have the same batches, weights in float32 and activations in
bfloat16 (autocast). The data are sequences in which each token depends on the two before it, at random, so there is a
least loss that no model can go below. The table has the mean loss of every tenth of the steps, for every seed.
"""

import argparse
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import stretto
from stretto.model import CausalLM, ModelConfig, causal_lm_loss, update_router_biases

VOCABULARY, TOKENS, MICROBATCHES, ROWS = 64, 128, 2, 16
CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
)


class Language:
    """Each token is one of four, which depend on the two tokens before it, with fixed probabilities."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._next = random.integers(VOCABULARY, size=(VOCABULARY, VOCABULARY, 4))
        self._chances = np.array([0.6, 0.2, 0.15, 0.05])
        self._ends = self._chances.cumsum()
        self.least = float(-(self._chances * np.log(self._chances)).sum())

    def batch(self, step: int) -> Tensor:
        random = np.random.default_rng(1000 + step)
        tokens = np.empty((MICROBATCHES * ROWS, TOKENS + 1), dtype=np.int64)
        tokens[:, :2] = random.integers(VOCABULARY, size=(len(tokens), 2))
        chosen = np.searchsorted(self._ends, random.random(tokens.shape)).clip(max=3)
        for place in range(2, TOKENS + 1):
            tokens[:, place] = self._next[tokens[:, place - 2], tokens[:, place - 1], chosen[:, place]]
        return torch.from_numpy(tokens)


def losses(policy: stretto.Memory, seed: int, steps: int, device: str) -> list[float]:
    torch.manual_seed(seed)
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("pp",))
    plan = stretto.schedules.interleaved(devices=1, microbatches=MICROBATCHES, stages_per_device=2, overlap=True)
    model = CausalLM(CONFIG).to(device)
    pipe = stretto.Pipeline(model.layers(), plan=plan, loss=causal_lm_loss, mesh=mesh, memory=policy)
    optimizer, language, found = torch.optim.AdamW(pipe.parameters(), lr=1e-3), Language(), []
    for step in range(steps):
        tokens = language.batch(step).to(device)
        with torch.autocast(device, torch.bfloat16):
            result = pipe.step(tokens[:, :-1], tokens[:, 1:])
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        update_router_biases(pipe, rate=1e-3)
        found.append(result.loss)
    if policy.compresses:
        with torch.autocast(device, torch.bfloat16):
            print(pipe.dry_run(tokens[:, :-1], tokens[:, 1:]), file=sys.stderr)
    pipe.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, action="append", help="by default 0, 1 and 2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    seeds = options.seed or [0, 1, 2]
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29572")
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", rank=0, world_size=1)
    print(f"least possible loss {Language().least:.3f}\n", flush=True)
    runs = []
    for preset in ("none", "k2"):
        policy = stretto.Memory(preset=preset, min_bytes=0)
        runs += [losses(policy, seed, options.steps, options.device) for seed in seeds]
    columns = [f"{preset}, seed {seed}" for preset in ("none", "k2") for seed in seeds]
    print(f"| steps | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for part in np.array_split(np.arange(options.steps), 10):
        means = (f"{np.mean([run[step] for step in part]):.3f}" for run in runs)
        print(f"| {part[0] + 1} to {part[-1] + 1} | {' | '.join(means)} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
