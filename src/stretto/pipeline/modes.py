"""Training and evaluation mode of a pipeline's layers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Put all modules into evaluation mode, and restore each module's own mode afterwards."""
    before = {layer: [(module, module.training) for module in layer.modules()] for layer in layers}
    training = {layer: modes for layer, modes in before.items() if any(mode for _, mode in modes)}
    try:
        for layer in training:
            layer.eval()
        yield
    finally:
        for layer, modes in training.items():
            layer.train(modes[0][1])
            for module, mode in modes:
                if module.training != mode:
                    module.training = mode
