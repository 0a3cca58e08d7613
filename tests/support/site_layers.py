"""Layers with a module that a policy names."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

WIDTH = 8
RUNS = [0]
"""How often sites have run."""


class Site(nn.Module):
    """A module called `site`, which computes a function of itself and of what it is given."""

    def __init__(self, compute: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.compute, self.linear = compute, nn.Linear(WIDTH, WIDTH)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *given: Any) -> Any:
        RUNS[0] += 1
        return self.compute(self, *given)


class Layer(nn.Module):
    """A layer with a site, which the function runs."""

    def __init__(self, run: Callable[..., Tensor], site: nn.Module, **parts: nn.Module) -> None:
        super().__init__()
        self.run, self.site = run, site
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)
