"""Reads the shards that this rank holds."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.layout import Bucket
from stretto.weights.regions import extent, inside
from stretto.weights.send.shard_map import ShardCopy, ShardMap, shard_copies
from stretto.weights.sources.shard import Shard, Stored, has_memory


class ShardReader:
    """Reads boxes of shards. It remembers the last shard, since a tensor can be in several buckets.

    If a shard cannot be read, the reader returns zeros and keeps the first error, so that all ranks can go on with
    their exchanges and raise together at the end.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards, self._last = shards, (-1, torch.empty(0))
        self.error = ""

    def stored(self, copy: ShardCopy) -> Stored | None:
        """Return where the bytes are stored, if they are a whole tensor in one piece."""
        return self._shards[copy.holder.number].stored if copy.box is copy.run is copy.holder.box else None

    def read(self, copy: ShardCopy) -> Tensor:
        """Return the box to copy."""
        number = copy.holder.number
        if self._last[0] != number:
            self._last = number, self._read_shard(self._shards[number])
        tensor = self._last[1]
        return tensor if copy.box is copy.holder.box else tensor[inside(copy.box, copy.holder.box)]

    def _read_shard(self, shard: Shard) -> Tensor:
        dtype: torch.dtype = getattr(torch, shard.entry.dtype)
        shape = extent(shard.box)
        try:
            tensor = shard.read().detach()
            if tensor.is_meta or tensor.layout != torch.strided or not has_memory(tensor):
                raise WeightsError(f"is a {tensor.layout} tensor on {tensor.device}, and has no values to push")
            tensor = tensor.resolve_conj().resolve_neg()
            if tensor.dtype == dtype and tuple(tensor.shape) == shape:
                return tensor
            raise WeightsError(f"was {dtype}{list(shape)}, and has become {tensor.dtype}{list(tensor.shape)}")
        except Exception as error:
            self.error = self.error or f"{shard.entry.name}: {error}"
        return torch.zeros(shape, dtype=dtype, device="cpu")


def read_bucket(number: int, bucket: Bucket, shard_map: ShardMap, shards: Sequence[Shard]) -> Tensor:
    """Read a bucket of a version that this rank holds completely, with zeros between its tensors."""
    reader, buffer = ShardReader(shards), torch.zeros(bucket.nbytes, dtype=torch.uint8, device="cpu")
    for copy in shard_copies(number, bucket, shard_map):
        copy.target(buffer).copy_(reader.read(copy))
    if reader.error:
        raise WeightsError(reader.error)
    return buffer
