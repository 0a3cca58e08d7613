"""Refuses experts that several layers share: their shares on expert-parallel ranks would have no sum of their own."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from stretto.moe.experts import experts_of, sharded_experts
from stretto.pipeline.names import Names


def shared_experts(layers: Iterable[tuple[int, nn.Module]], shares: Sequence[Sequence[int]]) -> str | None:
    """Return why experts cannot be divided among ranks, or None. `shares` are the numbers of each stage's layers.

    Experts that are one module may occur again in the same stage.
    """
    stage_of = {number: stage for stage, share in enumerate(shares) for number in share}
    seen: dict[int, tuple[int, int]] = {}  # the experts that have a parameter, and their layer
    for number, layer in layers:
        for experts in experts_of(layer):
            for parameter in experts.parameters():
                other, first = seen.setdefault(id(parameter), (id(experts), number))
                if other != id(experts) or stage_of[first] != stage_of[number]:
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
