"""Versions in host memory: each sender has the buckets that it will send."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.execute.team import Team
from stretto.ir.errors import WeightsError
from stretto.weights.boxes import inside
from stretto.weights.choose import bucket_bytes_for
from stretto.weights.files import Safetensors
from stretto.weights.held import Held, Source
from stretto.weights.host import Arena, Arenas, Pinned, threads
from stretto.weights.layout import Bucket, lay_out
from stretto.weights.manifest import Manifest
from stretto.weights.push import Group, Sources
from stretto.weights.spread import Holdings, agree, moves_of, sampled, spread
from stretto.weights.sums import host_sum


@dataclass(frozen=True, slots=True)
class Version:
    """A version, ready to be pushed."""

    manifest: Manifest
    buckets: list[Bucket]
    bucket_bytes: int
    sources: Sources
    sums: Mapping[int, int]
    """Of this sender's buckets, as they are in host memory."""
    arena: Arena | None = None
    """Where it lies; or, if it lies in shared memory that is not ours, what was pinned and keeps it there."""
    pinned: Sequence[Pinned] = ()
    files: Safetensors | None = None

    def check(self) -> None:
        """Raise if what is pushed is not what was registered."""
        if self.files is not None:
            self.files.check()


class Store:
    """Holds so many versions. Memory that was pinned once is used for the next version."""

    def __init__(
        self, team: Team, group: Group, device: torch.device, *, bucket_bytes: int | None, split: bool, keep: int
    ) -> None:
        if keep < 1:
            raise WeightsError(f"a sender keeps at least 1 version (got {keep})")
        self._team, self._group, self._device = team, group, device
        self._bucket_bytes, self.split, self._keep = bucket_bytes, split, keep
        self._arenas = Arenas(pinned=device.type == "cuda")
        self._versions: dict[str, Version] = {}

    def get(self, version: str) -> Version:
        found = self._versions.get(version)
        if found is None:
            raise WeightsError(f"{version} was not registered; there is {', '.join(self._versions) or 'none'}")
        return found

    def add(self, version: str, source: Source, held: Sequence[Held], free: int) -> None:
        """Agree on what the version is, make room for it, and bring every bucket to its sender.

        What can go wrong for one sender alone is done jointly: then all raise.
        """
        on_device = self._team.jointly(lambda: not source.everywhere and all(it.read().is_cuda for it in held[:1]))
        sample = self._team.jointly(lambda: sampled(held) if source.everywhere and self._group.size > 1 else "")
        holdings = agree(version, held, self._team, everywhere=source.everywhere, on_device=on_device, sample=sample)
        manifest = holdings.manifest
        bucket_bytes = self._bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = bucket_bytes_for(manifest, self._group.size, free, split=self.split)
        buckets = lay_out(manifest, bucket_bytes, split=self.split)
        while len(self._versions) >= self._keep or version in self._versions:
            self.drop(version if version in self._versions else next(iter(self._versions)))
        mine = range(self._group.rank, len(buckets), self._group.size)
        with ExitStack() as failing:  # what was taken here is given back if it comes to nothing on any rank
            if isinstance(source, Safetensors) and source.in_shared_memory:
                maps = source.maps() if self._device.type == "cuda" else []
                pinned = self._team.jointly(lambda: [_pinned(memory, failing) for memory in maps])
                runs = self._team.jointly(lambda: {k: _runs(k, buckets[k], holdings, held) for k in mine})
                sums = self._team.jointly(lambda: _sums(mine, runs.__getitem__))
                made = Version(manifest, buckets, bucket_bytes, runs.__getitem__, sums, None, pinned, source)
            else:
                sizes = {k: buckets[k].nbytes for k in mine}
                arena, room = self._team.jointly(lambda: self._room(sizes, failing))
                device = (self._group.device, self._device)
                on = device if holdings.on_device else (self._group.host, torch.device("cpu"))
                on = (None, on[1]) if source.everywhere else on  # nothing is exchanged
                spread(buckets, holdings, held, room, self._team, *on)

                def sources(bucket: int) -> list[tuple[Tensor, int]]:
                    return [(room(bucket), 0)]

                sums = self._team.jointly(lambda: _sums(mine, sources))
                made = Version(manifest, buckets, bucket_bytes, sources, sums, arena)
            failing.pop_all()
        self._versions[version] = made

    def _room(self, sizes: dict[int, int], failing: ExitStack) -> tuple[Arena, Callable[[int], Tensor]]:
        """Memory for these buckets, one after the other."""
        arena = self._arenas.take(sum(sizes.values()))
        failing.callback(self._arenas.give, arena)
        starts, at = {}, 0
        for bucket, size in sizes.items():
            starts[bucket] = at
            at += size
        return arena, lambda bucket: arena.memory[starts[bucket] : starts[bucket] + sizes[bucket]]

    def drop(self, version: str) -> None:
        """Forget a version; its memory is used for the next one."""
        found = self._versions.pop(version, None)
        if found is None:
            return
        for pinned in found.pinned:
            pinned.close()
        if found.arena is not None:
            self._arenas.give(found.arena)

    def close(self) -> None:
        for version in list(self._versions):
            self.drop(version)
        self._arenas.close()


def _sums(buckets: Iterable[int], sources: Sources) -> dict[int, int]:
    with threads() as pool:
        return {bucket: host_sum(sources(bucket), pool) for bucket in buckets}


def _pinned(memory: Tensor, failing: ExitStack) -> Pinned:
    made = Pinned(memory)
    failing.callback(made.close)
    return made


def _runs(number: int, bucket: Bucket, holdings: Holdings, held: Sequence[Held]) -> list[tuple[Tensor, int]]:
    """A bucket's bytes where they lie in files, joined where they follow each other there as in the bucket."""
    found: list[tuple[Tensor, int]] = []
    for move in moves_of(number, bucket, holdings):
        tensor = held[move.holder.number].read()
        part = tensor if move.box is move.holder.box else tensor[inside(move.box, move.holder.box)]
        found.append((part.reshape(-1).view(torch.uint8), move.offset))
    return _joined(found)


def _joined(parts: Iterable[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
    joined: list[tuple[Tensor, int]] = []
    for part, offset in parts:
        if joined:
            before, start = joined[-1]
            end = before.data_ptr() + before.numel()
            if part.data_ptr() == end and offset == start + before.numel() and _same(before, part):
                joined[-1] = torch.as_strided(before, (before.numel() + part.numel(),), (1,)), start
                continue
        joined.append((part, offset))
    return joined


def _same(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
