"""Tensors of a training process as a source: each rank says what it holds, and nothing is gathered."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from stretto.ir.errors import WeightsError
from stretto.pipeline.pipeline import Pipeline
from stretto.weights.manifest import ITEM_BYTES, TensorSpec
from stretto.weights.regions import Region, Shape, whole
from stretto.weights.sources.safetensors import Safetensors
from stretto.weights.sources.shard import Shard, Source, has_memory

Pairs = Iterable[tuple[str, Tensor]]
Runs = list[tuple[int, int]]
"""Indices of one dimension, from where to where; more than one run if they are not contiguous."""


class Tensors:
    """This rank's tensors by name, whole or as a DTensor's local part. They are referred to, not copied.

    Pairs are asked for again each time, unless they are an iterator, which is used up at once.
    """

    everywhere = False

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = list(pairs) if isinstance(pairs, Iterator) else pairs

    def held(self) -> list[Shard]:
        made: list[Shard] = []
        seen: set[str] = set()
        for pair in self._pairs:
            name, tensor = _checked(pair)
            if name in seen:
                raise WeightsError(f"{name} is there twice")
            seen.add(name)
            made += _local_parts(name, tensor) if isinstance(tensor, DTensor) else [_part(name, tensor)]
        return made


class _State:
    """What a module or pipeline holds at the time of asking: a step may have replaced a tensor."""

    def __init__(self, of: nn.Module | Pipeline) -> None:
        self._of = of

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self._of.state_dict().items():
            if not name.endswith("_extra_state"):
                yield name, value


def of_module(module: nn.Module) -> Tensors:
    """Parameters and persistent buffers, by the names of the state dict; of an FSDP2 module this rank's shards."""
    return Tensors(_State(module))


def of_pipeline(pipe: Pipeline) -> Tensors:
    """The parameters and persistent buffers of this rank's stages, by the names of the pipeline."""
    return Tensors(_State(pipe))


def as_source(given: Any) -> Source:
    """A source of whatever can be one: files, modules, pipelines, tensors by name, or a source."""
    if isinstance(given, nn.Module):
        return of_module(given)
    if isinstance(given, Pipeline):
        return of_pipeline(given)
    if hasattr(given, "held") and hasattr(given, "everywhere"):
        return cast("Source", given)
    if isinstance(given, str | os.PathLike):
        return Safetensors(given)
    if isinstance(given, Mapping):
        return Tensors(given.items())
    if isinstance(given, Sequence) and given and all(isinstance(path, str | os.PathLike) for path in given):
        return Safetensors(given)
    if isinstance(given, Iterable) and not isinstance(given, bytes | Tensor):
        return Tensors(given)
    raise WeightsError(
        f"{type(given).__name__} is no source of weights; give a path, a module, a pipeline, "
        "tensors by name, or an object with held() and everywhere"
    )


def _checked(pair: Any) -> tuple[str, Tensor]:
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
        raise WeightsError(f"a source of weights gives pairs of a name and a tensor (got {type(pair).__name__})")
    name, tensor = pair
    if not isinstance(tensor, Tensor):
        raise WeightsError(
            f"{name} is a {type(tensor).__name__}, not a tensor; leave it out, or give the tensors that are in it"
        )
    if _dtype(tensor) not in ITEM_BYTES or tensor.layout != torch.strided:
        raise WeightsError(f"{name} is a {tensor.layout} tensor of type {tensor.dtype}, which cannot be pushed")
    if tensor.is_meta:
        raise WeightsError(f"{name} is on the meta device and has no values yet; load or initialise it first")
    if not isinstance(tensor, DTensor) and not has_memory(tensor):
        raise WeightsError(f"{name} is a {type(tensor).__name__} without memory of its own, which cannot be pushed")
    return name, tensor


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _part(name: str, tensor: Tensor) -> Shard:
    return Shard.whole(name, tensor, tensor.detach)


def _local_parts(name: str, tensor: DTensor) -> Iterator[Shard]:
    """The boxes of a DTensor that are here: one, or several if its shards are interleaved."""
    entry = TensorSpec(name, _dtype(tensor), tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return
    for placement in tensor.placements:
        if type(placement) not in (ShardPlacement, _StridedShard, Replicate):
            raise WeightsError(f"{name} is placed as {placement!r}, which cannot be pushed; redistribute it first")
    # Of equal replicas the first is enough, and of nothing too.
    alike = [isinstance(placement, Replicate) or not entry.nbytes for placement in tensor.placements]
    if any(number and same for number, same in zip(coordinate, alike, strict=True)):
        return
    if not entry.nbytes:
        yield Shard(entry, whole(entry.shape), lambda: _local(tensor).view(entry.shape))
        return
    mesh = tuple(tensor.device_mesh.shape)
    runs = [_runs(name, size, dim, tensor.placements, mesh, coordinate) for dim, size in enumerate(entry.shape)]
    expected, there = tuple(sum(stop - start for start, stop in of) for of in runs), tuple(_local(tensor).shape)
    if there != expected and not (0 in there and 0 in expected):
        raise WeightsError(
            f"{name} has shape {there} on this rank, where {tensor.placements} of {entry.shape} over {mesh} "
            f"is {expected}; shard it as distribute_tensor does"
        )
    for box, place in _boxes(runs):
        yield Shard(entry, box, partial(_local, tensor, place))


def _local(tensor: DTensor, place: tuple[slice, ...] = ()) -> Tensor:
    with torch.no_grad():
        return tensor.to_local()[place].detach()


def _boxes(runs: Sequence[Runs]) -> Iterator[tuple[Region, tuple[slice, ...]]]:
    """Boxes of the whole tensor, and where each is in the local one."""
    ends = [list(accumulate(stop - start for start, stop in of)) for of in runs]
    local = [
        [slice(end - (stop - start), end) for (start, stop), end in zip(of, upto, strict=True)]
        for of, upto in zip(runs, ends, strict=True)
    ]
    yield from zip(product(*runs), product(*local), strict=True)


def _runs(
    name: str, size: int, dim: int, placements: Sequence[Placement], mesh: Shape, coordinate: Sequence[int]
) -> Runs:
    """The indices of a dimension that are here, in the order in which they are here."""
    cuts = [
        (count, number, int(placement.split_factor) if isinstance(placement, _StridedShard) else 1)
        for placement, count, number in zip(placements, mesh, coordinate, strict=True)
        if isinstance(placement, ShardPlacement | _StridedShard) and placement.dim == dim
    ]
    found = local_runs(size, cuts)
    # FSDP cuts what tensor parallelism has cut before it, and writes that as a strided shard, which says the same only
    # if all shards are of one size, or nearly.
    strided = next((cut for cut in cuts if cut[2] > 1), None)
    if strided is not None and strided[2] == prod(count for count, _, factor in cuts if factor == 1):
        others_first = [*(cut for cut in cuts if cut[2] == 1), (*strided[:2], 1)]
        if found != local_runs(size, others_first):
            raise WeightsError(
                f"{name} is {size} long in dimension {dim}, which {tuple(placements)} over {mesh} does not cut evenly "
                "enough to tell where its shards lie; pad it, or redistribute it first"
            )
    return found


def local_runs(size: int, cuts: Iterable[tuple[int, int, int]]) -> Runs:
    """What is left of a dimension after cuts, one after the other: into how many, which of them, and how interleaved.

    >>> local_runs(10, [(4, 1, 1)])
    [(3, 6)]
    >>> local_runs(8, [(2, 1, 2)])
    [(2, 4), (6, 8)]
    """
    runs: Runs = [(0, size)] if size else []
    for count, number, factor in cuts:
        groups = [_chunk(runs, factor, group) for group in range(factor)]
        runs = _joined(run for group in groups for run in _chunk(group, count, number))
    return runs


def _chunk(runs: Runs, count: int, number: int) -> Runs:
    """One of so many equal parts; the last ones may be smaller or empty."""
    step = -(-sum(stop - start for start, stop in runs) // count)
    first, last = number * step, (number + 1) * step
    found, at = [], 0
    for start, stop in runs:
        low, high = start + max(first - at, 0), min(start + last - at, stop)
        if low < high:
            found.append((low, high))
        at += stop - start
    return found


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    made: Runs = []
    for start, stop in runs:
        if made and made[-1][1] == start:
            made[-1] = made[-1][0], stop
        else:
            made.append((start, stop))
    return made
