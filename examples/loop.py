"""Train, push, generate, twice: torchrun --nproc-per-node=4 examples/loop.py ADDRESS=URL …  (running mini_engines)

Four processes train a mixture-of-experts model to count on: two pipelines of two stages each, which share the experts.
After each round they push it into the engines.
"""

import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import stretto
from mini_engine.model import CONFIGS, Config, checkpoint
from stretto.moe import Experts, Routed, expert_phases
from stretto.schedules import interleaved
from stretto.weights import Export, Sender

CONFIG = CONFIGS["tiny"]
TOKENS, MICROBATCHES, ROUNDS, STEPS = 16, 4, 2, 8  # each pipeline has so many microbatches in a step
OUT = Path("out")


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.width, config.expert_width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.expert_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        heads, kv = config.heads * config.head_width, config.kv_heads * config.head_width
        self.d = config.head_width
        self.q_proj, self.o_proj = (
            nn.Linear(config.width, heads, bias=False),
            nn.Linear(heads, config.width, bias=False),
        )
        self.k_proj, self.v_proj = (nn.Linear(config.width, kv, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.d)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


def _rotated(x_BHTd: Tensor) -> Tensor:
    half = x_BHTd.shape[-1] // 2
    angle = torch.arange(x_BHTd.shape[2])[:, None] * 10_000 ** (-torch.arange(half) / half)
    a, b = x_BHTd[..., :half], x_BHTd[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Block(nn.Module):
    """One layer, as mini_engine computes it, in phases: its experts may be on several ranks."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(config.width, eps=1e-6) for _ in range(2))
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts, self.chosen = Experts(config.experts, config.width, config.expert_width), config.chosen

    def phases(self) -> list[tuple[stretto.Phase, Callable[[Any], Any]]]:
        return expert_phases(self.experts, route=self.route, meanwhile=self.through_mlp, finish=self.add)

    def forward(self, x: Tensor) -> Tensor:
        for _, run in self.phases():
            x = run(x)
        return x

    def route(self, x: Tensor) -> Routed:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x).flatten(0, 1)
        best, experts = self.router(y).topk(self.chosen)
        return Routed(y, experts, best.softmax(-1), rest=x)

    def through_mlp(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add(x, self.mlp(y))

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out.view_as(x)


def layers() -> list[nn.Module]:
    head = nn.Sequential()
    head.add_module("norm", nn.RMSNorm(CONFIG.width, eps=1e-6))
    head.add_module("lm_head", nn.Linear(CONFIG.width, CONFIG.vocabulary, bias=False))
    made = [nn.Embedding(CONFIG.vocabulary, CONFIG.width), *(Block(CONFIG) for _ in range(CONFIG.layers)), head]
    weights = checkpoint(CONFIG, seed=0)  # what the engines begin with
    for number, layer in enumerate(made):
        layer.load_state_dict({name: started(weights, exported(f"{number}.{name}")) for name in layer.state_dict()})
    return made


def started(weights: dict[str, Tensor], name: str) -> Tensor:
    """A tensor of the engines' checkpoint; the experts', which are separate there, stacked."""
    path, is_stacked, name_of_all = name.partition(".experts.")
    if not is_stacked:
        return weights[name]
    names = ("gate_proj", "up_proj") if name_of_all == "gate_up_proj" else ("down_proj",)
    experts = [f"{path}.experts.{expert}" for expert in range(CONFIG.experts)]
    return torch.stack([torch.cat([weights[f"{expert}.{part}.weight"] for part in names]) for expert in experts])


def exported(name: str) -> str:
    """A parameter's name in the engines' checkpoints: 0.weight, 1.mlp…, 3.norm.weight as they know them."""
    number, rest = name.split(".", 1)
    prefix = {0: "embed_tokens.", CONFIG.layers + 1: ""}.get(int(number), f"layers.{int(number) - 1}.")
    return prefix + rest


EXPORT = Export(
    rename=exported,
    unstack={"*.experts.*": "{0}.experts.{expert}.{1}.weight"},
    split={"*.gate_up_proj.weight": ("{0}.gate_proj.weight", "{0}.up_proj.weight")},
    dtype=torch.bfloat16,
)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    start = torch.randint(CONFIG.vocabulary, (4 * MICROBATCHES, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (start + torch.arange(TOKENS + 1)) % CONFIG.vocabulary
    return tokens[:, :-1], tokens[:, 1:]


def generated(url: str) -> tuple[str, float, list[int]]:
    """The version that answers, how much of what it generates counts on, and a sample."""
    right, count, answer = 0, 0, {}
    for start in range(5, 85, 10):
        wanted = [(start + 3 + k) % CONFIG.vocabulary for k in range(6)]
        count += len(wanted)
        body = json.dumps({"tokens": [start, start + 1, start + 2], "count": 6}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", body), timeout=60) as reply:
            answer = json.load(reply)
        right += sum(a == b for a, b in zip(answer["tokens"], wanted, strict=True))
    return answer["version"], right / count, [start, start + 1, start + 2, *answer["tokens"]]


def main() -> None:
    if not sys.argv[1:] or not all("=" in it for it in sys.argv[1:]):
        sys.exit(f"say where engines take weights and answer: {sys.argv[0]} unix:///PATH=http://127.0.0.1:PORT …")
    engines = dict(it.split("=", 1) for it in sys.argv[1:])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    plan = interleaved(devices=2, stages_per_device=2, microbatches=MICROBATCHES, overlap=True)
    pipe = stretto.Pipeline(layers(), plan=plan, loss=loss, mesh=mesh)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=5e-3)

    def say(text: str) -> None:
        if pipe.rank == 0:
            print(text, flush=True)

    def generate() -> None:
        for url in engines.values() if pipe.rank == 0 else ():
            version, right, sample = generated(url)
            say(f"generate  {url} serves {version}: {right:4.0%} right, e.g. {' '.join(map(str, sample))}")

    with Sender(mesh, device="cpu", bucket_bytes=16384) as sender:
        generate()
        for number in range(1, ROUNDS + 1):
            for step in range(STEPS):
                last = number == ROUNDS and step == STEPS - 1
                own = 1000 * number + 2 * step + mesh["ep"].get_local_rank()  # each pipeline has batches of its own
                result = pipe.step(*batch(own), record=last)
                optimizer.step()
            say(f"train     {STEPS} steps on 2 × 2 processes (pp × ep): loss {result.loss:.3f}")
            sender.register(f"step-{number * STEPS}", EXPORT(pipe))
            report = sender.push(f"step-{number * STEPS}", list(engines), record=True)
            how = ", ".join(sorted(set(report.receivers.values())))
            took = f"{1e3 * report.seconds:.0f} ms"
            say(f"push      {report.version} into {len(engines)} running engines in {took}: {how}")
            generate()
        for name, timeline in {"training": result.timeline, "push": report.timeline}.items():
            if timeline is not None:
                OUT.mkdir(exist_ok=True)
                timeline.save(OUT / f"{name}.trace.json")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
