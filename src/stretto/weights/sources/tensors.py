"""The tensors of a training process as a source: each rank describes its own shards, and nothing is gathered."""

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
"""Indices of one dimension as (start, stop) runs; more than one if the indices are not contiguous."""


class Tensors:
    """This rank's tensors by name: whole tensors, or the local shards of DTensors. They are referenced, not copied.

    `held` iterates over the pairs again each time; an iterator is consumed once, at construction.
    """

    everywhere = False

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = list(pairs) if isinstance(pairs, Iterator) else pairs

    def held(self) -> list[Shard]:
        shards: list[Shard] = []
        seen: set[str] = set()
        for pair in self._pairs:
            name, tensor = _checked(pair)
            if name in seen:
                raise WeightsError(f"{name} is there twice")
            seen.add(name)
            shards += _local_shards(name, tensor) if isinstance(tensor, DTensor) else [_whole_shard(name, tensor)]
        return shards


class _State:
    """The current state dict of a module or pipeline, read anew each time: a step may have replaced a tensor."""

    def __init__(self, owner: nn.Module | Pipeline) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self._owner.state_dict().items():
            if not name.endswith("_extra_state"):
                yield name, value


def of_module(module: nn.Module) -> Tensors:
    """Return a module's parameters and persistent buffers by their state-dict names; for FSDP2, this rank's shards."""
    return Tensors(_State(module))


def of_pipeline(pipe: Pipeline) -> Tensors:
    """Return the parameters and persistent buffers of this rank's stages, by the pipeline's names."""
    return Tensors(_State(pipe))


def as_source(value: Any) -> Source:
    """Return a source for files, a module, a pipeline, tensors by name, or a source itself."""
    if isinstance(value, nn.Module):
        return of_module(value)
    if isinstance(value, Pipeline):
        return of_pipeline(value)
    if hasattr(value, "held") and hasattr(value, "everywhere"):
        return cast("Source", value)
    if isinstance(value, str | os.PathLike):
        return Safetensors(value)
    if isinstance(value, Mapping):
        return Tensors(value.items())
    if isinstance(value, Sequence) and value and all(isinstance(path, str | os.PathLike) for path in value):
        return Safetensors(value)
    if isinstance(value, Iterable) and not isinstance(value, bytes | Tensor):
        return Tensors(value)
    raise WeightsError(
        f"{type(value).__name__} is no source of weights; give a path, a module, a pipeline, "
        "tensors by name, or an object with held() and everywhere"
    )


def _checked(pair: Any) -> tuple[str, Tensor]:
    """Return the name and the tensor; raise WeightsError if the tensor cannot be pushed."""
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


def _whole_shard(name: str, tensor: Tensor) -> Shard:
    return Shard.whole(name, tensor, tensor.detach)


def _local_shards(name: str, tensor: DTensor) -> Iterator[Shard]:
    """Yield this rank's shards of a DTensor: one, or several if its shards are interleaved."""
    entry = TensorSpec(name, _dtype(tensor), tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return
    for placement in tensor.placements:
        if type(placement) not in (ShardPlacement, _StridedShard, Replicate):
            raise WeightsError(f"{name} is placed as {placement!r}, which cannot be pushed; redistribute it first")
    # Only the first of equal replicas gives its shard, and only one rank gives an empty tensor.
    replicated = [isinstance(placement, Replicate) or not entry.nbytes for placement in tensor.placements]
    if any(number and is_replica for number, is_replica in zip(coordinate, replicated, strict=True)):
        return
    if not entry.nbytes:
        yield Shard(entry, whole(entry.shape), lambda: _local(tensor).view(entry.shape))
        return
    mesh = tuple(tensor.device_mesh.shape)
    runs = [_runs(name, size, dim, tensor.placements, mesh, coordinate) for dim, size in enumerate(entry.shape)]
    expected = tuple(sum(stop - start for start, stop in dim_runs) for dim_runs in runs)
    actual = tuple(_local(tensor).shape)
    if actual != expected and not (0 in actual and 0 in expected):
        raise WeightsError(
            f"{name} has shape {actual} on this rank, where {tensor.placements} of {entry.shape} over {mesh} "
            f"is {expected}; shard it as distribute_tensor does"
        )
    for region, index in _regions(runs):
        yield Shard(entry, region, partial(_local, tensor, index))


def _local(tensor: DTensor, index: tuple[slice, ...] = ()) -> Tensor:
    with torch.no_grad():
        return tensor.to_local()[index].detach()


def _regions(runs: Sequence[Runs]) -> Iterator[tuple[Region, tuple[slice, ...]]]:
    """Yield each region of the whole tensor with its index into the local tensor."""
    ends = [list(accumulate(stop - start for start, stop in dim_runs)) for dim_runs in runs]
    local = [
        [slice(end - (stop - start), end) for (start, stop), end in zip(dim_runs, dim_ends, strict=True)]
        for dim_runs, dim_ends in zip(runs, ends, strict=True)
    ]
    yield from zip(product(*runs), product(*local), strict=True)


def _runs(
    name: str, size: int, dim: int, placements: Sequence[Placement], mesh: Shape, coordinate: Sequence[int]
) -> Runs:
    """Return the indices of a dimension that this rank holds, in local order."""
    cuts = [
        (count, number, int(placement.split_factor) if isinstance(placement, _StridedShard) else 1)
        for placement, count, number in zip(placements, mesh, coordinate, strict=True)
        if isinstance(placement, ShardPlacement | _StridedShard) and placement.dim == dim
    ]
    runs = local_runs(size, cuts)
    # FSDP shards what tensor parallelism has sharded before, and describes that as a strided shard. The two agree only
    # if all shards have the same size, or nearly.
    strided = next((cut for cut in cuts if cut[2] > 1), None)
    if strided is not None and strided[2] == prod(count for count, _, factor in cuts if factor == 1):
        others_first = [*(cut for cut in cuts if cut[2] == 1), (*strided[:2], 1)]
        if runs != local_runs(size, others_first):
            raise WeightsError(
                f"{name} is {size} long in dimension {dim}, which {tuple(placements)} over {mesh} does not cut evenly "
                "enough to tell where its shards lie; pad it, or redistribute it first"
            )
    return runs


def local_runs(size: int, cuts: Iterable[tuple[int, int, int]]) -> Runs:
    """Return the indices of a dimension that remain after cuts, applied in order.

    A cut is (number of parts, index of the part to keep, number of interleaved groups).

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
    """Return part `number` of `count` equal parts; the last parts may be smaller or empty."""
    step = -(-sum(stop - start for start, stop in runs) // count)
    first, last = number * step, (number + 1) * step
    part, at = [], 0
    for start, stop in runs:
        low, high = start + max(first - at, 0), min(start + last - at, stop)
        if low < high:
            part.append((low, high))
        at += stop - start
    return part


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Merge adjacent runs."""
    joined: Runs = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined
