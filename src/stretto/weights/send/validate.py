"""Checks of the arguments of `Sender.register` and `Sender.push`."""

from collections.abc import Sequence
from typing import get_args

from stretto.ir.errors import WeightsError
from stretto.weights.manifest import is_possible, is_text
from stretto.weights.messages import InFlight
from stretto.weights.send.endpoint import MEMBERS, Endpoint
from stretto.weights.send.push import Progress
from stretto.weights.sources.shard import Shard


def validate_version(version: str) -> None:
    if not is_text(version):
        raise WeightsError(f"a version needs a name (got {version!r:.40})")


def validate_shard(shard: Shard) -> None:
    if not is_text(shard.entry.name):
        raise WeightsError(f"a tensor needs a name (got {shard.entry.name!r:.80})")
    if not is_possible(shard.entry.shape):
        raise WeightsError(f"{shard.entry.name} has shape {shard.entry.shape}, which no tensor can have")


def validate_push(receivers: Sequence[str | Endpoint], in_flight: str, progress: Progress | None) -> None:
    if isinstance(receivers, str):
        raise WeightsError(f"receivers are a list: push(…, [{receivers!r}])")
    for receiver in receivers:
        if isinstance(receiver, str) and not is_text(receiver):
            raise WeightsError(f"{receiver!r:.100} is no address")
        missing = [name for name in MEMBERS if not isinstance(receiver, str) and not hasattr(receiver, name)]
        if missing:
            raise WeightsError(f"{receiver!r:.100} is no address, and no endpoint: it has no {', '.join(missing)}")
    if in_flight not in get_args(InFlight):
        raise WeightsError(f"in_flight is one of {', '.join(get_args(InFlight))} (got {in_flight!r:.40})")
    if progress is not None and not callable(progress):
        raise WeightsError(f"progress is a function of buckets loaded and their number (got {progress!r:.40})")
