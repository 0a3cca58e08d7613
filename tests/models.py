"""Small models, batches and losses, and the plain single-process run that everything is compared with."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from strategies import SCHEDULES

WIDTH, VOCABULARY, TOKENS = 8, 11, 5


class Block(nn.Module):
    """Norm, MLP, residual: a layer with parameters of every kind."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class DictBlock(Block):
    """The same on a dict that also carries an integer mask and something nobody uses."""

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {**x, "hidden": super().forward(x["hidden"]) * x["mask"].unsqueeze(-1)}


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {"hidden": self.table(x["tokens"]), "mask": x["mask"], "unused": torch.ones_like(x["mask"]).double()}
        return self.table(x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Any) -> Tensor:
        return self.out(x["hidden"] if isinstance(x, dict) else x)


@dataclass(frozen=True)
class Case:
    """All that a rank needs to know to make the same model, batch and plan as everyone else."""

    schedule: str
    devices: int
    microbatches: int
    layers: int = 0
    dicts: bool = False
    checkpoint: bool = False
    balance: tuple[int, ...] | None = None
    counted: bool = False
    dtype: torch.dtype = torch.float64
    tied: bool = False
    dropout: float = 0.0
    steps: int = 1

    def plan(self) -> stretto.Plan:
        extra = {"overlap": True} if self.schedule == "interleaved" else {}
        return SCHEDULES[self.schedule](devices=self.devices, microbatches=self.microbatches, **extra)

    def modules(self) -> list[nn.Module]:
        torch.manual_seed(1)
        count = max(self.layers or self.plan().stages, 2)
        block = DictBlock if self.dicts else Block
        embed, head = Embed(), Head()
        made = [embed, *(block(dropout=self.dropout) for _ in range(count - 2)), head]
        for module in made:
            module.to(self.dtype)
        if self.tied:
            head.out.weight = embed.table.weight
        return made

    def batch(self) -> tuple[Any, Tensor]:
        torch.manual_seed(2)
        size = 2 * self.microbatches
        tokens = torch.randint(VOCABULARY, (size, TOKENS))
        targets = torch.randint(VOCABULARY, (size, TOKENS))
        if self.dicts:
            return {"tokens": tokens, "mask": (torch.rand(size, TOKENS) > 0.2).long()}, targets
        return tokens, targets

    def loss(self, output: Tensor, target: Tensor) -> Any:
        if not self.counted:
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        chosen = target != 0  # a different number in each microbatch
        return F.cross_entropy(output[chosen], target[chosen], reduction="sum"), chosen.sum()


def plain(case: Case) -> tuple[float, dict[str, Any]]:
    """The loss and gradients of one process that knows nothing of pipelines."""
    model = nn.Sequential(*case.modules())
    inputs, targets = case.batch()
    loss = case.loss(model(inputs), targets)
    if isinstance(loss, tuple):
        loss = loss[0] / loss[1]
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.double().numpy()
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }


def train(mesh: Any, case: Case) -> tuple[float, dict[str, Any]]:
    """The same by a pipeline: the last step's loss, and this rank's gradients."""
    pipe = stretto.Pipeline(
        case.modules(),
        plan=case.plan(),
        loss=case.loss,
        mesh=mesh,
        balance=case.balance,
        checkpoint=case.checkpoint,
    )
    inputs, targets = case.batch()
    for _ in range(case.steps):
        result = pipe.step(inputs, targets)
    return result.loss, {name: p.grad.double().numpy() for name, p in pipe.named_parameters() if p.grad is not None}
