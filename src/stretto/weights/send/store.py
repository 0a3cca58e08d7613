"""Versions in host memory: each sender has the buckets that it will send."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.execute.team import Team
from stretto.ir.errors import WeightsError
from stretto.weights.checksums import digest_of
from stretto.weights.host_memory import Arena, Arenas, threads
from stretto.weights.layout import Bucket, lay_out
from stretto.weights.manifest import Manifest
from stretto.weights.send.choose import bucket_bytes_for
from stretto.weights.send.push import SenderGroup
from stretto.weights.send.reshard import ShardMap, agree, read_bucket, spread
from stretto.weights.sources.shard import Shard, Source, confirm, identity_of


@dataclass(frozen=True, slots=True)
class Content:
    """What a version holds: a digest of all, and one of each of this sender's buckets."""

    digest: str
    buckets: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Version:
    """A version, ready to be pushed."""

    manifest: Manifest
    buckets: list[Bucket]
    bucket_bytes: int
    room: Callable[[int], Tensor]
    """Each of this sender's buckets in host memory."""
    content: Content
    """As it was found there."""
    arena: Arena


class Store:
    """Holds so many versions. Memory that was pinned once is used for the next version."""

    def __init__(
        self, team: Team, group: SenderGroup, device: torch.device, *, bucket_bytes: int | None, split: bool, keep: int
    ) -> None:
        if keep < 1:
            raise WeightsError(f"a sender keeps at least 1 version (got {keep})")
        self._team, self._group, self._device = team, group, device
        self._bucket_bytes, self.split, self._keep = bucket_bytes, split, keep
        self._arenas = Arenas(pinned=device.type == "cuda")
        self._versions: dict[str, Version] = {}
        self._dropped: set[str] = set()

    def get(self, version: str) -> Version:
        found = self._versions.get(version)
        if found is None:
            there = f"there is {', '.join(self._versions) or 'none'}"
            if version in self._dropped:
                raise WeightsError(f"{version} was dropped, and {there}; Sender(keep=2) holds two versions")
            raise WeightsError(f"{version} was not registered; {there}")
        return found

    def add(self, version: str, source: Source, held: Sequence[Shard], free: int) -> None:
        """Agree on what the version is, make room for it, and bring every bucket to its sender.

        What can go wrong for one sender alone is done jointly: then all raise.
        """
        on_device = self._team.jointly(lambda: not source.everywhere and all(it.read().is_cuda for it in held[:1]))
        holdings = agree(version, held, self._team, everywhere=source.everywhere, on_device=on_device)
        manifest = holdings.manifest
        bucket_bytes = self._bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = bucket_bytes_for(manifest, self._group.size, free, split=self.split)
        buckets = lay_out(manifest, bucket_bytes, split=self.split)
        while len(self._versions) >= self._keep or version in self._versions:
            self.drop(version if version in self._versions else next(iter(self._versions)))
        mine = range(self._group.rank, len(buckets), self._group.size)
        sums: dict[int, bytes] = {}
        with ExitStack() as failing, threads() as pool:  # what was taken is given back if it comes to nothing anywhere
            sizes = {k: buckets[k].nbytes for k in mine}
            arena, room = self._team.jointly(lambda: self._room(sizes, failing))

            def arrived(bucket: int) -> None:
                buckets[bucket].clear_gaps(room(bucket))
                sums[bucket] = digest_of(room(bucket), pool)

            device = (self._group.device, self._device)
            on = device if holdings.on_device else (self._group.host, torch.device("cpu"))
            on = (None, on[1]) if source.everywhere else on  # nothing is exchanged
            spread(buckets, holdings, held, room, self._team, *on, arrived)
            self._team.jointly(lambda: confirm(source))
            if source.everywhere:
                self._compare(sums, source, buckets, holdings, held)
            whole = hashlib.blake2b(manifest.digest.encode(), digest_size=16)
            said = self._team.gather(sums, dict[int, bytes])
            for number in range(len(buckets)):
                whole.update(said[number % self._group.size][number])
            failing.pop_all()
        content = Content(whole.hexdigest(), sums)
        self._versions[version] = Version(manifest, buckets, bucket_bytes, room, content, arena)

    def differing(self, version: str, alike: Sequence[Sequence[int]]) -> tuple[int, int] | None:
        """Of tensors that should be equal, by their places in the manifest, the first two that are not; all senders ask
        together."""
        found = self.get(version)
        asked = {place for places in alike for place in places}
        mine: list[tuple[int, int, bytes]] = []
        with threads() as pool:
            for number in range(self._group.rank, len(found.buckets), self._group.size):
                wanted = [piece for piece in found.buckets[number].pieces if piece.entry in asked]
                for piece in wanted:
                    part = digest_of(found.room(number)[piece.offset : piece.offset + piece.nbytes], pool)
                    mine.append((piece.entry, piece.start, part))
        said = self._team.gather(mine, list[tuple[int, int, bytes]])
        parts = sorted(part for rank in said for part in rank)
        held = {place: [part[1:] for part in parts if part[0] == place] for place in asked}
        pairs = ((places[0], place) for places in alike for place in places)
        return next(((one, other) for one, other in pairs if held[one] != held[other]), None)

    def _compare(
        self,
        sums: Mapping[int, bytes],
        source: Source,
        buckets: Sequence[Bucket],
        holdings: ShardMap,
        held: Sequence[Shard],
    ) -> None:
        """Ranks that each read all of a version must have read the same.

        Those that say by the same `identity` what they read, as ranks of one machine that read the same files, are one
        reader. Every reader sums every bucket, which its ranks share, and all are compared.
        """
        identities = self._team.gather(self._team.jointly(lambda: identity_of(source)), str)
        readers: dict[str, list[int]] = {}
        for rank, identity in enumerate(identities):
            readers.setdefault(identity or f"rank {rank}", []).append(rank)
        if len(readers) == 1:
            return
        here = next(ranks for ranks in readers.values() if self._group.rank in ranks)
        place, size = here.index(self._group.rank), self._group.size

        def read() -> dict[int, bytes]:
            found = dict(sums)
            with threads() as pool:
                for number, bucket in enumerate(buckets):
                    if number % size not in here and number % len(here) == place:
                        found[number] = digest_of(read_bucket(number, bucket, holdings, held), pool)
            confirm(source)
            return found

        said = self._team.gather(self._team.jointly(read), dict[int, bytes])
        for rank, theirs in enumerate(said):
            for number, total in theirs.items():
                if total != said[number % size][number]:
                    bucket = buckets[number]
                    mine = self._team.jointly(lambda: _each_piece(bucket, read_bucket(number, bucket, holdings, held)))  # noqa: B023
                    told = self._team.gather(mine, list[bytes])
                    one, other = told[number % size], told[rank]
                    odd = [piece.entry for piece, a, b in zip(bucket.pieces, one, other, strict=True) if a != b]
                    names = [holdings.manifest.entries[entry].name for entry in odd]
                    where = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names) or "a file"
                    raise WeightsError(
                        f"ranks {number % size} and {rank} read different values of {where} for "
                        f"{holdings.manifest.version}"
                    )

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
        self._dropped.add(version)
        self._arenas.give(found.arena)

    def close(self) -> None:
        for version in list(self._versions):
            self.drop(version)
        self._arenas.close()


def _each_piece(bucket: Bucket, room: Tensor) -> list[bytes]:
    with threads() as pool:
        return [digest_of(room[it.offset : it.offset + it.nbytes], pool) for it in bucket.pieces]
