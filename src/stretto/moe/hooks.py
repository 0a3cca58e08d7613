"""Which modules have hooks."""

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its own on its forward or backward."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)
