"""What the GPU itself takes for the blocks of bf16.py: the same kernels on four ranks at once, and no pipeline.

    stretto onegpu run --devices 4 benchmarks/onegpu/limits.py [TOKENS …]

Every rank runs its two blocks for 16 microbatches, one after the other: forward, backward, weight gradients. No rank
waits for another, so a step of a pipeline that takes longer than this has waited for messages, devices or hosts; and
what CUDA graphs, compiled blocks, or weight gradients of several microbatches in one product would save shows here
first, without anything that a pipeline adds. Columns as in bf16.py.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bf16 import LAYERS, MICROBATCHES, WIDTH, Block, Made, begin_table, measure, say  # which registers the backend
from torch import Tensor, nn

Owed = list[tuple[nn.Parameter, Tensor, Tensor]]
"""Weights, what their layers were given, and the gradients of what they returned."""


class Deferred(nn.Linear):
    """A linear layer that leaves its weight gradient for later."""

    owed: Owed

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Product.apply(x, self.weight, self.owed)  # type: ignore[no-untyped-call]
        return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, owed: Owed) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owed = owed, weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        owed, parameter = ctx.owed
        owed.append((parameter, x.detach().flatten(0, -2), grad.flatten(0, -2)))
        return grad @ weight, None, None


class Rank:
    """Two blocks, and sums of their weight gradients in float32."""

    def __init__(self, devices: int, x: Tensor, *, compiled: bool = False, deferred: bool = True) -> None:
        self.owed: Owed = []
        kind = Deferred if deferred else nn.Linear
        self.blocks = nn.Sequential(*(Block(kind) for _ in range(LAYERS // devices))).to("cuda", torch.bfloat16)
        for layer in self.blocks.modules():
            if isinstance(layer, Deferred):
                layer.owed = self.owed
        if compiled:
            self.blocks.compile()
        self.given = x
        weights = [p for p in self.blocks.parameters() if p.dim() > 1]
        self.sums = {id(p): torch.empty_like(p, dtype=torch.float32) for p in weights} if deferred else {}

    def passes(self, x: Tensor) -> None:
        """Forward and backward of a microbatch; its input has a gradient, as that of an inner stage."""
        y = self.blocks(x.detach().requires_grad_())
        y.backward(y.detach())

    def weights(self, *, first: bool) -> None:
        """The weight gradients that are owed, of one microbatch or of several at once."""
        together: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for entry in self.owed:
            together.setdefault(id(entry[0]), []).append(entry[1:])
        for key, entries in together.items():
            x, grad = entries[0] if len(entries) == 1 else map(torch.cat, zip(*entries, strict=True))
            into = self.sums[key]
            torch.addmm(into, grad.T, x, out_dtype=torch.float32, beta=0 if first else 1, out=into)
        self.owed.clear()

    def step(self, *, joined: int = 1) -> None:
        for k, x in enumerate(self.given.unbind()):
            self.passes(x)
            if (k + 1) % joined == 0:
                self.weights(first=k < joined)

    def plain_step(self) -> None:
        for x in self.given.unbind():
            self.passes(x)


class Graphed:
    """A microbatch as a CUDA graph. The first one of a step, which fills the sums, is another than the rest."""

    def __init__(self, rank: Rank) -> None:
        self._given, self._x = rank.given, torch.empty_like(rank.given[0])
        self._norms = [p for p in rank.blocks.parameters() if p.dim() == 1]
        self._grads = [torch.zeros_like(p) for p in self._norms]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            rank.step()
        torch.cuda.current_stream().wait_stream(side)
        self._graphs = [self._captured(rank, first=first) for first in (True, False)]

    def _captured(self, rank: Rank, *, first: bool) -> Any:
        for parameter, grad in zip(self._norms, self._grads, strict=True):
            parameter.grad = grad
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            rank.passes(self._x)
            rank.weights(first=first)
        return graph

    def step(self) -> None:
        for k, x in enumerate(self._given.unbind()):
            self._x.copy_(x)
            self._graphs[k > 0].replay()


def cases(devices: int, x: Tensor) -> Iterator[tuple[str, Callable[[], Made]]]:
    def made(make: Callable[[], Rank], step: Callable[[Rank], Callable[[], None]]) -> Made:
        rank = make()
        return Made(step(rank), list(rank.blocks.parameters()))

    usual = partial(Rank, devices, x)
    yield "plain autograd, bfloat16 sums", partial(made, partial(usual, deferred=False), lambda it: it.plain_step)
    yield "float32 sums in the product", partial(made, usual, lambda it: it.step)
    yield "the same, a CUDA graph for each microbatch", partial(made, usual, lambda it: Graphed(it).step)
    for joined in (2, 4):
        name = f"the same, weight gradients of {joined} microbatches in one product"
        yield name, partial(made, usual, partial(_joined, joined))
    compiled = partial(usual, deferred=False, compiled=True)
    yield "plain autograd, compiled", partial(made, compiled, lambda it: it.plain_step)


def _joined(joined: int, rank: Rank) -> Callable[[], None]:
    return partial(rank.step, joined=joined)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[512, 2048])
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("onegpu")
    devices = dist.get_world_size()
    for tokens in options.tokens:
        begin_table(tokens)
        torch.manual_seed(1)
        x = torch.randn(MICROBATCHES, tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
        for name, make in cases(devices, x):
            found, made = measure(make)
            say(found.row(name))
            del made
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
