"""Tied parameters: one parameter that several layers hold."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from stretto.ir.errors import PipelineError
from stretto.pipeline.layers import Layers

Place = tuple[nn.Module, str]
"""A module, and the name of one of its parameters or buffers."""

_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
_SIZES = 8  # dimensions of a shape that are compared


def ties_of(layers: Layers) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters(prefix=str(number), remove_duplicate=False):
            names[id(parameter)].append(name)
    return [same for same in names.values() if len(same) > 1]


def tied_stages(together: Mapping[str, tuple[str, ...]], shares: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the stages of each tie that spans several stages."""
    stage_of = {number: stage for stage, share in enumerate(shares) for number in share}
    tied = {tuple(sorted({stage_of[layer_of(name)] for name in names})) for names in together.values()}
    return sorted(stages for stages in tied if len(stages) > 1)


def layer_of(name: str) -> int:
    return int(name.split(".")[0])


def validate_groups(tied: Any) -> None:
    """Raise PipelineError if `tied` is not a list of groups of names."""
    for names in (tied,) if isinstance(tied, str) else tied:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise PipelineError(
                f'tied is a list of names that are one, such as [("0.weight", "9.weight")] (got {tied!r:.60})'
            )
        if len(names) < 2:
            raise PipelineError(f"a tie needs two names at least (got {names!r:.60})")


def numbered(tied: Sequence[Sequence[str]], found: Mapping[str, Collection[str]], layer_count: int) -> list[list[str]]:
    """Return ties with the names that begin with a layer's number; `found` has them for parameters of `NamedLayer`s.

    Raise PipelineError if a name is neither such a parameter nor begins with a layer's number.
    """
    ties = [[name for given in names for name in found.get(given, (given,))] for names in tied]
    for name in (name for names in ties for name in names):
        first = name.split(".")[0]
        if not first.isdecimal() or int(first) >= layer_count:
            raise PipelineError(
                f"{name!r:.60} is no parameter to tie: names begin with a layer's number, 0 to {layer_count - 1}, "
                "except those of a NamedLayer, of which none has it"
            )
    return ties


def joined(ties: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return for each tied name all names of its tie, including itself, the earliest layer's first."""
    together: dict[str, set[str]] = {}
    for names in ties:
        merged = set(names).union(*(together.get(name, set()) for name in names))
        together.update(dict.fromkeys(merged, merged))
    return {
        name: tuple(sorted(merged, key=lambda other: (layer_of(other), other))) for name, merged in together.items()
    }


def description(parameter: nn.Parameter) -> list[int]:
    """Return as numbers the properties that tied parameters must have in common."""
    if isinstance(parameter, UninitializedParameter):
        return [1, int(parameter.requires_grad), _DTYPES.index(parameter.dtype), -1] + [0] * 2 * _SIZES
    shape, strides = ([*sizes, *[0] * _SIZES][:_SIZES] for sizes in (parameter.shape, parameter.stride()))
    return [1, int(parameter.requires_grad), _DTYPES.index(parameter.dtype), parameter.dim(), *shape, *strides]


def difference(one: Sequence[int], other: Sequence[int]) -> str | None:
    """Return in words how two described parameters differ, or None."""
    if one[2:-_SIZES] != other[2:-_SIZES]:
        return f"have {_in_words(one)} and {_in_words(other)}"
    if one[1] != other[1]:
        return "are frozen in one place, and trained in the other"
    return None if one == other else "lie in memory in other ways (their strides differ)"


def _in_words(described: Sequence[int]) -> str:
    _, _, dtype, dimensions, *sizes = described[:-_SIZES]
    shape = "no shape yet" if dimensions < 0 else f"shape {tuple(sizes[:dimensions])}"
    return f"{shape} ({str(_DTYPES[dtype]).removeprefix('torch.')})"


def wrong_ties(
    together: Mapping[str, tuple[str, ...]],
    parameters: Mapping[str, nn.Parameter],
    most: Callable[[Tensor], Tensor],
    seen: Callable[[str], str],
) -> str | None:
    """Return what is wrong with the ties, the same on all ranks, or None.

    `most` is an all-reduce by maximum, and `seen` returns the name that users see.
    """
    names = sorted(together)
    if not names:
        return None
    absent = [-1] * (4 + 2 * _SIZES)
    descriptions = [description(parameters[name]) if name in parameters else absent for name in names]
    rows = dict(zip(names, most(torch.tensor(descriptions, device="cpu")).tolist(), strict=True))
    for name in names:
        if rows[name][0] < 0:
            return f"{seen(name)!r:.60} is no parameter to tie: layer {layer_of(name)} has none of that name"
    for name, same in together.items():
        if (how := difference(rows[same[0]], rows[name])) is not None:
            return f"{seen(same[0])} and {seen(name)} cannot be tied: they {how}"
    return None


def tie(together: Mapping[str, tuple[str, ...]], places: Mapping[str, Place]) -> None:
    """Replace this rank's parameters of each tie by the earliest layer's."""
    for names in set(together.values()):
        local = [places[name] for name in names if name in places]
        for module, key in local[1:]:
            first, other = local[0][0]._parameters[local[0][1]], module._parameters[key]
            if first is not other:
                for owner, name in places.values():
                    if owner._parameters.get(name) is other:
                        setattr(owner, name, first)


def places_of(module: nn.Module) -> dict[str, Place]:
    """Return the place of each parameter of a module, by each of its names."""
    return {
        f"{prefix}.{key}": (owner, key)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for key, parameter in owner._parameters.items()
        if parameter is not None
    }


def names_of(places: Mapping[str, Place]) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, (module, key) in places.items():
        names[id(module._parameters[key])].append(name)
    return names


def conflicting(
    together: Mapping[str, tuple[str, ...]], places: Mapping[str, Place], seen: Callable[[str], str]
) -> str | None:
    """Return an error text if names of one parameter are in several ties, else None."""
    for names in names_of(places).values():
        if len({together[name] for name in names if name in together}) > 1:
            return f"{' and '.join(map(seen, names))} are one parameter; give them in one tie"
    return None
