"""Refuses experts that several layers share: their shares on expert-parallel ranks would have no sum of their own."""

from collections.abc import Iterable, Mapping

from torch import nn

from stretto.moe.experts import experts_of, sharded_experts
from stretto.pipeline.names import Names


def shared_experts(layers: Iterable[tuple[int, nn.Module]]) -> str | None:
    """Return why experts of these layers cannot be divided among ranks, or None."""
    seen: dict[int, tuple[int, int]] = {}  # the experts that have a parameter, and their layer
    for number, layer in layers:
        for experts in experts_of(layer):
            for parameter in experts.parameters():
                other, first = seen.setdefault(id(parameter), (id(experts), number))
                if (other, first) != (id(experts), number):
                    return (
                        f"layers {first} and {number} share experts, which cannot be divided among expert-parallel "
                        "ranks; give each its own, or use dp instead of ep"
                    )
    return None


def tied_experts(module: nn.Module, together: Mapping[str, tuple[str, ...]], names: Names) -> str | None:
    """Return why ties of experts that are divided among ranks cannot be, or None."""
    divided = {id(parameter) for experts in sharded_experts(module) for parameter in experts.parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in divided and len(together.get(name, ())) > 1:
            tied = " and ".join(map(names.seen, together[name]))
            return f"{tied} are tied experts, which cannot be divided among expert-parallel ranks; use dp instead of ep"
    return None
