"""The versions that a sender holds in host memory: of each version the buckets that this sender will send."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.execute.host_memory import Arena, threads
from stretto.execute.team import Team
from stretto.ir.errors import WeightsError
from stretto.weights.checksums import digest_of
from stretto.weights.host_memory import Arenas
from stretto.weights.layout import Bucket, lay_out
from stretto.weights.manifest import Manifest
from stretto.weights.send.choose import bucket_bytes_for
from stretto.weights.send.reshard import ExchangeGroup, reshard
from stretto.weights.send.sender_group import SenderGroup
from stretto.weights.send.shard_map import ShardMap, gather_shard_map
from stretto.weights.send.shard_reader import read_bucket
from stretto.weights.sources.shard import Shard, Source, confirm, identity_of


@dataclass(frozen=True, slots=True)
class Content:
    """The digest of a whole version, and the checksum of each of this sender's buckets."""

    digest: str
    buckets: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Version:
    """A registered version, ready to push."""

    manifest: Manifest
    buckets: list[Bucket]
    bucket_bytes: int
    host_buffer: Callable[[int], Tensor]
    """Returns the host memory of one of this sender's buckets."""
    content: Content
    """Computed from the host memory."""
    arena: Arena


class Store:
    """Holds at most `max_versions` versions. A new version reuses the pinned memory of a dropped one."""

    def __init__(
        self,
        team: Team,
        group: SenderGroup,
        device: torch.device,
        *,
        bucket_bytes: int | None,
        split: bool,
        max_versions: int,
    ) -> None:
        if max_versions < 1:
            raise WeightsError(f"a sender keeps at least 1 version (got {max_versions})")
        self._team, self._group, self._device = team, group, device
        self._bucket_bytes, self.split, self._max_versions = bucket_bytes, split, max_versions
        self._arenas = Arenas(pinned=device.type == "cuda")
        self._versions: dict[str, Version] = {}
        self._dropped: set[str] = set()

    def get(self, version: str) -> Version:
        held = self._versions.get(version)
        if held is None:
            known = f"there is {', '.join(self._versions) or 'none'}"
            if version in self._dropped:
                raise WeightsError(f"{version} was dropped, and {known}; Sender(max_versions=2) holds two versions")
            raise WeightsError(f"{version} was not registered; {known}")
        return held

    def add(self, version: str, source: Source, shards: Sequence[Shard], free: int) -> None:
        """Agree with all senders on the shard map, allocate host memory, and bring every bucket to its sender.

        Steps that can fail on one sender alone run jointly, so that all senders raise.
        """
        on_device = self._team.jointly(
            lambda: not source.everywhere and all(shard.read().is_cuda for shard in shards[:1])
        )
        shard_map = gather_shard_map(version, shards, self._team, everywhere=source.everywhere, on_device=on_device)
        manifest = shard_map.manifest
        bucket_bytes = self._bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = bucket_bytes_for(manifest, self._group.size, free, split=self.split)
        buckets = lay_out(manifest, bucket_bytes, split=self.split)
        while len(self._versions) >= self._max_versions or version in self._versions:
            self.drop(version if version in self._versions else next(iter(self._versions)))
        mine = range(self._group.rank, len(buckets), self._group.size)
        checksums: dict[int, bytes] = {}
        with ExitStack() as on_failure, threads() as pool:  # gives the memory back if any sender fails
            sizes = {number: buckets[number].nbytes for number in mine}
            arena, host_buffer = self._team.jointly(lambda: self._allocate(sizes, on_failure))

            def arrived(bucket: int) -> None:
                buckets[bucket].clear_gaps(host_buffer(bucket))
                checksums[bucket] = digest_of(host_buffer(bucket), pool)

            exchange = self._exchange_group(shard_map, everywhere=source.everywhere)
            reshard(buckets, shard_map, shards, host_buffer, self._team, exchange, arrived)
            self._team.jointly(lambda: confirm(source))
            if source.everywhere:
                self._compare_readers(checksums, source, buckets, shard_map, shards)
            digest = hashlib.blake2b(manifest.digest.encode(), digest_size=16)
            all_checksums = self._team.gather(checksums, dict[int, bytes])
            for number in range(len(buckets)):
                digest.update(all_checksums[number % self._group.size][number])
            on_failure.pop_all()
        content = Content(digest.hexdigest(), checksums)
        self._versions[version] = Version(manifest, buckets, bucket_bytes, host_buffer, content, arena)

    def differing(self, version: str, alike: Sequence[Sequence[int]]) -> tuple[int, int] | None:
        """Return the first two tensors that differ within a group of `alike`, or None.

        Groups are lists of places in the manifest. All senders call this together.
        """
        held = self.get(version)
        compared = {place for places in alike for place in places}
        mine: list[tuple[int, int, bytes]] = []
        with threads() as pool:
            for number in range(self._group.rank, len(held.buckets), self._group.size):
                pieces = [piece for piece in held.buckets[number].pieces if piece.entry in compared]
                for piece in pieces:
                    checksum = digest_of(held.host_buffer(number)[piece.offset : piece.offset + piece.nbytes], pool)
                    mine.append((piece.entry, piece.start, checksum))
        all_ranks = self._team.gather(mine, list[tuple[int, int, bytes]])
        parts = sorted(part for rank in all_ranks for part in rank)
        checksums = {place: [part[1:] for part in parts if part[0] == place] for place in compared}
        pairs = ((places[0], place) for places in alike for place in places)
        return next(((one, other) for one, other in pairs if checksums[one] != checksums[other]), None)

    def _exchange_group(self, shard_map: ShardMap, *, everywhere: bool) -> ExchangeGroup:
        """Return the group to exchange shards in; without a process group if every rank holds everything."""
        if shard_map.on_device:
            group, device = self._group.device, self._device
        else:
            group, device = self._group.host, torch.device("cpu")
        return ExchangeGroup(None if everywhere else group, device)

    def _compare_readers(
        self,
        checksums: Mapping[int, bytes],
        source: Source,
        buckets: Sequence[Bucket],
        shard_map: ShardMap,
        shards: Sequence[Shard],
    ) -> None:
        """Raise WeightsError if ranks that each read a whole version have read different values.

        Ranks whose sources have the same `identity`, such as ranks of one machine that read the same files, count as
        one reader. Each reader computes the checksums of all buckets, shared among its ranks, and all are compared.
        """
        identities = self._team.gather(self._team.jointly(lambda: identity_of(source)), str)
        readers: dict[str, list[int]] = {}
        for rank, identity in enumerate(identities):
            readers.setdefault(identity or f"rank {rank}", []).append(rank)
        if len(readers) == 1:
            return
        same_reader = next(ranks for ranks in readers.values() if self._group.rank in ranks)
        place, size = same_reader.index(self._group.rank), self._group.size

        def read() -> dict[int, bytes]:
            computed = dict(checksums)
            with threads() as pool:
                for number, bucket in enumerate(buckets):
                    if number % size not in same_reader and number % len(same_reader) == place:
                        computed[number] = digest_of(read_bucket(number, bucket, shard_map, shards), pool)
            confirm(source)
            return computed

        all_ranks = self._team.gather(self._team.jointly(read), dict[int, bytes])
        for rank, computed in enumerate(all_ranks):
            for number, checksum in computed.items():
                if checksum != all_ranks[number % size][number]:
                    bucket = buckets[number]
                    mine = self._team.jointly(
                        lambda: _piece_checksums(bucket, read_bucket(number, bucket, shard_map, shards))  # noqa: B023
                    )
                    pieces = self._team.gather(mine, list[bytes])
                    one, other = pieces[number % size], pieces[rank]
                    different = [piece.entry for piece, a, b in zip(bucket.pieces, one, other, strict=True) if a != b]
                    names = [shard_map.manifest.entries[entry].name for entry in different]
                    where = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names) or "a file"
                    raise WeightsError(
                        f"ranks {number % size} and {rank} read different values of {where} for "
                        f"{shard_map.manifest.version}"
                    )

    def _allocate(self, sizes: dict[int, int], on_failure: ExitStack) -> tuple[Arena, Callable[[int], Tensor]]:
        """Take an arena for buckets of these sizes; return it and a function that returns each bucket's part of it."""
        arena = self._arenas.take(sum(sizes.values()))
        on_failure.callback(self._arenas.give, arena)
        starts, end = {}, 0
        for bucket, size in sizes.items():
            starts[bucket] = end
            end += size
        return arena, lambda bucket: arena.memory[starts[bucket] : starts[bucket] + sizes[bucket]]

    def drop(self, version: str) -> None:
        """Forget a version and keep its memory for the next one."""
        held = self._versions.pop(version, None)
        if held is None:
            return
        self._dropped.add(version)
        self._arenas.give(held.arena)

    def close(self) -> None:
        for version in list(self._versions):
            self.drop(version)
        self._arenas.close()


def _piece_checksums(bucket: Bucket, buffer: Tensor) -> list[bytes]:
    with threads() as pool:
        return [digest_of(buffer[piece.offset : piece.offset + piece.nbytes], pool) for piece in bucket.pieces]
