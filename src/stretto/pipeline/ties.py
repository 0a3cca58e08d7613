"""Parameters that are one, though several layers hold them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from stretto.ir.errors import PipelineError
from stretto.pipeline.layers import Layers

Place = tuple[nn.Module, str]
"""A module, and the name of a parameter or buffer in it."""

_DTYPES = sorted((it for it in vars(torch).values() if isinstance(it, torch.dtype)), key=str)
_SIZES = 8  # of a shape, that are compared


def ties_of(layers: Layers) -> list[list[str]]:
    """The names of parameters that several layers share."""
    names: dict[int, list[str]] = defaultdict(list)
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters(prefix=str(number), remove_duplicate=False):
            names[id(parameter)].append(name)
    return [same for same in names.values() if len(same) > 1]


def tied_stages(together: Mapping[str, tuple[str, ...]], shares: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The stages that hold the same parameters: those of each tie that is of several."""
    stage_of = {number: stage for stage, share in enumerate(shares) for number in share}
    found = {tuple(sorted({stage_of[layer_of(name)] for name in every})) for every in together.values()}
    return sorted(stages for stages in found if len(stages) > 1)


def layer_of(name: str) -> int:
    return int(name.split(".")[0])


def demand_names(tied: Any, layer_count: int) -> None:
    """Refuse what cannot be names of parameters to tie."""
    for names in (tied,) if isinstance(tied, str) else tied:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise PipelineError(
                f'tied is a list of names that are one, such as [("0.weight", "9.weight")] (got {tied!r:.60})'
            )
        if len(names) < 2:
            raise PipelineError(f"a tie needs two names at least (got {names!r:.60})")
        for name in names:
            first = name.split(".")[0]
            if not first.isdecimal() or int(first) >= layer_count:
                raise PipelineError(
                    f"{name!r:.60} is no parameter to tie: names begin with a layer's number, 0 to {layer_count - 1}"
                )


def joined(ties: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """For each name, all that it is tied to, itself included, the earliest layer's first."""
    together: dict[str, set[str]] = {}
    for names in ties:
        every = set(names).union(*(together.get(name, set()) for name in names))
        together.update(dict.fromkeys(every, every))
    return {name: tuple(sorted(every, key=lambda it: (layer_of(it), it))) for name, every in together.items()}


def description(parameter: nn.Parameter) -> list[int]:
    """What must be the same of parameters that are one, as numbers."""
    if isinstance(parameter, UninitializedParameter):
        return [1, int(parameter.requires_grad), _DTYPES.index(parameter.dtype), -1] + [0] * 2 * _SIZES
    shape, strides = ([*sizes, *[0] * _SIZES][:_SIZES] for sizes in (parameter.shape, parameter.stride()))
    return [1, int(parameter.requires_grad), _DTYPES.index(parameter.dtype), parameter.dim(), *shape, *strides]


def difference(one: Sequence[int], other: Sequence[int]) -> str | None:
    """How two described parameters differ, in words."""
    if one[2:-_SIZES] != other[2:-_SIZES]:
        return f"have {_said(one)} and {_said(other)}"
    if one[1] != other[1]:
        return "are frozen in one place, and trained in the other"
    return None if one == other else "lie in memory in other ways (their strides differ)"


def _said(described: Sequence[int]) -> str:
    _, _, dtype, dimensions, *sizes = described[:-_SIZES]
    shape = "no shape yet" if dimensions < 0 else f"shape {tuple(sizes[:dimensions])}"
    return f"{shape} ({str(_DTYPES[dtype]).removeprefix('torch.')})"


def wrong_ties(
    together: Mapping[str, tuple[str, ...]], mine: Mapping[str, nn.Parameter], most: Callable[[Tensor], Tensor]
) -> str | None:
    """What is wrong with ties, the same on all ranks; `most` gives the largest of all ranks' numbers."""
    names = sorted(together)
    if not names:
        return None
    nobody = [-1] * (4 + 2 * _SIZES)
    mine_of = [description(mine[name]) if name in mine else nobody for name in names]
    rows = dict(zip(names, most(torch.tensor(mine_of, device="cpu")).tolist(), strict=True))
    for name in names:
        if rows[name][0] < 0:
            return f"{name!r:.60} is no parameter to tie: layer {layer_of(name)} has none of that name"
    for name, every in together.items():
        if (how := difference(rows[every[0]], rows[name])) is not None:
            return f"{every[0]} and {name} cannot be tied: they {how}"
    return None


def tie(together: Mapping[str, tuple[str, ...]], places: Mapping[str, Place]) -> None:
    """Make parameters of these names one, where several are here: the earliest layer's."""
    for every in set(together.values()):
        here = [places[name] for name in every if name in places]
        for module, key in here[1:]:
            first, other = here[0][0]._parameters[here[0][1]], module._parameters[key]
            if first is not other:
                for at, name in places.values():
                    if at._parameters.get(name) is other:
                        setattr(at, name, first)


def places_of(module: nn.Module) -> dict[str, Place]:
    """Where a module's parameters are, by all their names."""
    return {
        f"{prefix}.{key}": (where, key)
        for prefix, where in module.named_modules(remove_duplicate=False)
        for key, parameter in where._parameters.items()
        if parameter is not None
    }


def names_of(places: Mapping[str, Place]) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, (module, key) in places.items():
        names[id(module._parameters[key])].append(name)
    return names


def conflicting(together: Mapping[str, tuple[str, ...]], places: Mapping[str, Place]) -> str | None:
    """What is wrong if names of one parameter are in several ties."""
    for every in names_of(places).values():
        if len({together[name] for name in every if name in together}) > 1:
            return f"{' and '.join(every)} are one parameter; give them in one tie"
    return None
