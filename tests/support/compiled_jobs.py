"""What ranks do with layers, or phases of layers, that `torch.compile` has compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stretto

WIDTH, MICROBATCHES, STEPS, BACKEND = 8, 4, 4, "aot_eager"  # autograd's part of a compiler, without its code


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


class Phased(Block):
    """Its two halves, each compiled for itself."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._halves = [torch.compile(half, backend=BACKEND) for half in (self._first, self._second)]

    def _first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tanh(self.up(self.norm(x)))

    def _second(self, both: tuple[Tensor, Tensor]) -> Tensor:
        x, y = both
        z: Tensor = self.down(y)
        return x + z

    def phases(self) -> Sequence[tuple[stretto.Phase, Callable[[Any], Any]]]:
        return [(stretto.Phase(name), half) for name, half in zip(("up", "down"), self._halves, strict=True)]


def in_place(number: int) -> nn.Module:
    block = Block(number)
    block.compile(backend=BACKEND)
    return block


MAKE: dict[str, Callable[[int], nn.Module]] = {
    "layers": lambda number: torch.compile(Block(number), backend=BACKEND),  # type: ignore[dict-item, return-value]
    "in place": in_place,
    "phases": Phased,
    "inner": lambda number: nn.Sequential(nn.Identity(), torch.compile(Block(number), backend=BACKEND)),  # type: ignore[arg-type]
}


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def compiled(mesh: DeviceMesh, schedule: str, how: str) -> list[str]:
    """What is wrong with some steps: gradients that are not those of one process, and compilations after the first."""
    dynamo.reset()
    plan = getattr(stretto.schedules, schedule)(devices=mesh.size(), microbatches=MICROBATCHES)
    pipe = stretto.Pipeline(MAKE[how], layer_count=4, plan=plan, loss=mean, mesh=mesh, timeout=60)
    alone, wrong, graphs = nn.Sequential(*map(Block, range(4))), [], []
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(step)
        x, y = (torch.randn(2 * MICROBATCHES, WIDTH, generator=draws, dtype=torch.float64) for _ in range(2))
        alone.zero_grad()
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (mean(alone(a), b) / MICROBATCHES).backward()
        pipe.step(x, y)
        wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
        for name, parameter in pipe.named_parameters():
            grad = wanted[".".join(part for part in name.split(".") if part != "_orig_mod").replace(".1.", ".")]
            assert grad is not None
            if parameter.grad is None or (parameter.grad - grad).abs().max() > 1e-12 * grad.abs().max():
                wrong.append(f"step {step}: {name}")
        graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
    if len(set(graphs)) > 1 or not graphs[0]:
        wrong.append(f"graphs {graphs}")
    if how != "phases" and any(pipe.split_report().values()):  # of phases it cannot be known
        wrong.append(f"{pipe.split_report()}")
    return wrong
