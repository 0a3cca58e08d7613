"""Jobs of senders, for tests: versions made of a description, the same bytes in every process."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stretto.execute.host_memory import threads
from stretto.ir.errors import WeightsError
from stretto.weights.checksums import digest_of
from stretto.weights.layout import Bucket
from stretto.weights.manifest import TensorSpec
from stretto.weights.messages import InFlight
from stretto.weights.regions import inside, whole
from stretto.weights.send.endpoint import Endpoint
from stretto.weights.send.sender import Sender
from stretto.weights.sources.export import Export
from stretto.weights.sources.shard import Shard

Spec = Sequence[tuple[str, tuple[int, ...]]]
"""Types and shapes of tensors "t0", "t1", …"""


def until(reached: Callable[[], bool], seconds: float) -> None:
    """Wait for something that must come to be."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def begun(to: Endpoint, in_flight: InFlight = "wait", *, seconds: float) -> None:
    """A receiver that was offered a version is made ready to load."""
    to.pause(in_flight, patience=seconds, seconds=seconds)
    to.begin(seconds=seconds)


def tensors_of(spec: Spec, seed: int) -> dict[str, Tensor]:
    """Any bits, of any type."""
    made = {}
    for number, (dtype, shape) in enumerate(spec):
        kind: torch.dtype = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(1000 * seed + number)
        count = torch.Size(shape).numel() * kind.itemsize
        raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
        made[f"t{number}"] = raw.view(kind).view(shape)
    return made


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, whatever the bits mean."""
    raw = [it.contiguous().reshape(-1).view(torch.uint8).cpu() for it in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


def total_of(bucket: Bucket, buffer: Tensor) -> bytes:
    """The sum of a bucket that lies in a buffer."""
    with threads() as pool:
        return digest_of(buffer[: bucket.nbytes], pool)


@dataclass
class Sharded:
    """Every tensor that can be is cut along its first dimension over the ranks; others are dealt out."""

    tensors: dict[str, Tensor]
    rank: int
    size: int
    everywhere: bool = False

    def held(self) -> Iterator[Shard]:
        for number, (name, tensor) in enumerate(self.tensors.items()):
            entry = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            box = whole(entry.shape)
            if tensor.dim() and len(tensor) >= self.size and number % 3:
                edges = [len(tensor) * rank // self.size for rank in range(self.size + 1)]
                box = ((edges[self.rank], edges[self.rank + 1]), *box[1:])
            elif number % self.size != self.rank:
                continue
            yield Shard(entry, box, lambda tensor=tensor, box=box: tensor[inside(box, whole(tuple(tensor.shape)))])  # type: ignore[misc]


def push(
    mesh: DeviceMesh, spec: Spec, seeds: Sequence[int], addresses: Sequence[str], options: dict[str, Any]
) -> list[Any]:
    """Push versions one after the other; of each, its report or the error's text."""
    rank, size = mesh.get_local_rank(), mesh.size()
    found: list[Any] = []
    with Sender(mesh, **options.get("sender", {})) as sender:
        for seed in seeds:
            tensors = {name: it.to(options.get("on", "cpu")) for name, it in tensors_of(spec, seed).items()}
            try:
                sender.register(f"v{seed}", Sharded(tensors, rank, size))
                found.append(sender.push(f"v{seed}", addresses, **options.get("push", {})))
            except WeightsError as error:
                found.append(str(error))
    return found


def different(mesh: DeviceMesh, addresses: Sequence[str]) -> str:
    """Ranks that do not push the same."""
    with Sender(mesh, device="cpu", max_versions=2) as sender:
        for version in ("a", "b"):
            sender.register(version, {f"t{mesh.get_local_rank()}": torch.zeros(3)})
        try:
            sender.push("ab"[mesh.get_local_rank()], addresses)
        except WeightsError as error:
            return str(error)
    return "nothing happened"


def broken_buffer(mesh: DeviceMesh, spec: Spec, addresses: Sequence[str]) -> list[str]:
    """One rank fails once to copy a bucket into its own buffer."""
    found, left, copy = [], [mesh.get_local_rank() == 0], Tensor.copy_

    def failing(into: Tensor, *given: Any, **options: Any) -> Tensor:
        if left[0] and threading.current_thread().name == "stretto broadcast":
            left[0] = False
            raise RuntimeError("no")
        return copy(into, *given, **options)

    Tensor.copy_ = failing  # type: ignore[assignment,method-assign]
    try:
        with Sender(mesh, device="cpu", bucket_bytes=256) as sender:
            for seed in (1, 2):
                sender.register(f"v{seed}", Sharded(tensors_of(spec, seed), mesh.get_local_rank(), mesh.size()))
                try:
                    found.append(" ".join(sender.push(f"v{seed}", addresses).receivers.values()))
                except WeightsError as error:
                    found.append(str(error))
    finally:
        Tensor.copy_ = copy  # type: ignore[method-assign]
    return found


def other_files(mesh: DeviceMesh, paths: Sequence[str]) -> str:
    """Each rank has its own file, under one name."""
    with Sender(mesh, device="cpu") as sender:
        try:
            sender.register("v", paths[mesh.get_local_rank()])
        except WeightsError as error:
            return str(error)
    return "registered"


def without_room(mesh: DeviceMesh, addresses: Sequence[str]) -> list[str]:
    """One rank cannot make room for a version; the next time it can."""
    found = []
    with Sender(mesh, device="cpu") as sender:
        take = sender._store._arenas.take
        if mesh.get_local_rank() == 1:
            sender._store._arenas.take = None  # type: ignore[method-assign,assignment]
        for version in ("a", "b"):
            try:
                sender.register(version, {f"t{mesh.get_local_rank()}": torch.ones(3)})
                found.append(str(sender.push(version, addresses).receivers))
            except WeightsError as error:
                found.append(str(error))
                assert len(sender._store._arenas._free) == (mesh.get_local_rank() == 0)  # what was taken is given back
            sender._store._arenas.take = take  # type: ignore[method-assign]
    return found


def odd_parts(mesh: DeviceMesh, boxes: Sequence[tuple[int, int]]) -> str:
    """Each rank holds a part of one tensor."""
    tensor, (start, stop) = torch.arange(4), boxes[mesh.get_local_rank()]
    entry = TensorSpec("t", "int64", (4,))

    class Parts:
        everywhere = False

        def held(self) -> list[Shard]:
            return [Shard(entry, ((start, stop),), lambda: tensor[start:stop])]

    with Sender(mesh, device="cpu") as sender:
        try:
            sender.register("v", Parts())
        except WeightsError as error:
            return str(error)
    return "registered"


def moves(mesh: DeviceMesh, spec: Spec, addresses: Sequence[str], bucket_bytes: int) -> list[tuple[str, int]]:
    """How this rank took part in moving buckets, each by its number of bytes, in a push after the first."""
    found: list[tuple[str, int]] = []

    def noted(act: Any) -> Any:
        def noting(group: Any, tensors: list[Tensor], *given: Any) -> Any:
            if tensors[0].dtype == torch.uint8 and tensors[0].numel() >= 256:  # and no word
                found.append((act.__name__, tensors[0].numel()))
            return act(group, tensors, *given)

        return noting

    with Sender(mesh, device="cpu", bucket_bytes=bucket_bytes) as sender, ExitStack() as noting:
        sender.register("v1", Sharded(tensors_of(spec, 1), mesh.get_local_rank(), mesh.size()))
        sender.push("v1", addresses)  # before it, a few broadcasts are measured
        for act in ("broadcast", "send", "recv"):
            plain = getattr(dist.ProcessGroup, act)
            noting.enter_context(mock.patch.object(dist.ProcessGroup, act, noted(plain)))
        sender.push("v1", addresses)
    return found


def tied(mesh: DeviceMesh, address: str, equal: bool, split: bool) -> str:
    """Three tensors, of which two should be equal."""
    tensors = tensors_of([("float32", (600,))] * 3, 1)
    tensors["t2"] = tensors["t0"].clone()
    tensors["t2"][599] += not equal
    with Sender(mesh, device="cpu", bucket_bytes=1024 if split else 4096, split=split) as sender:
        sender.register("v", Sharded(tensors, mesh.get_local_rank(), mesh.size()))
        try:
            return sender.push("v", [address]).receivers[address]
        except WeightsError as error:
            return str(error)


def read(mesh: DeviceMesh, paths: Sequence[str], exported: bool) -> str:
    """Each rank reads its own file, one tensor to a bucket."""
    path = paths[mesh.get_local_rank()]
    with Sender(mesh, device="cpu", bucket_bytes=1024 if exported else 2048) as sender:
        try:
            return sender.register("v", Export(dtype=torch.bfloat16)(path) if exported else path)
        except WeightsError as error:
            return str(error)


def renamed(mesh: DeviceMesh, path: str) -> str:
    """One rank gives two tensors each other's names."""
    swaps = {"b": "c", "c": "b"} if mesh.get_local_rank() else {}
    with Sender(mesh, device="cpu", bucket_bytes=2048) as sender:
        try:
            return sender.register("v", Export(rename=lambda name: swaps.get(name, name))(path))
        except WeightsError as error:
            return str(error)
