"""The messages that senders and receivers exchange."""

from typing import Literal, TypeAlias

import msgspec

from stretto.weights.manifest import Manifest
from stretto.wire.connection import Beat
from stretto.wire.greeting import Hello, Proof

State: TypeAlias = Literal["serving", "paused", "loading", "loaded", "dirty"]
InFlight: TypeAlias = Literal["wait", "abort", "keep"]
Assurance: TypeAlias = Literal["verified", "delivered", "unaccounted"]
"""How certain it is that a receiver holds the pushed version.

- verified: delivered, and the receiver's live tensors hold exactly the bytes that were sent.
- delivered: the checksum of every buffer matched the sender's before and after loading, and the loader accounted for
  every tensor. The tensors that the loader made from them (fused or quantised, say) are not checked.
- unaccounted: the loader did not account for every tensor, or the engine does not support checksums.
"""


class StatusRequest(msgspec.Struct, tag=True):
    """Ask a receiver for its status."""


class Status(msgspec.Struct, tag=True):
    """The status of a receiver."""

    state: State
    version: str
    """The last version that was loaded completely."""
    error: str
    """Why the last update failed."""
    device: str
    """A GPU's UUID, or "cpu"."""
    content: str = ""
    """The digest of all values of the version; empty before the first push and while dirty."""
    assurance: Assurance | None = None
    """The assurance of the version; None before the first push and while dirty."""
    identity: str = ""
    """Identifies the receiver, even if it is reached at two addresses."""


class Buffers(msgspec.Struct):
    """Two buffers that both sides map: device memory, an attached file, or a file to open by its path."""

    number: int
    """Identifies the pair: a new pair has a new number."""
    nbytes: int
    """Size of each buffer."""
    handle: bytes = b""
    offset: int = 0
    """For device memory: the allocation's handle, and the offset of the buffers in the allocation."""
    path: str = ""


class Open(msgspec.Struct, tag=True):
    """Offer a version; the receiver only prepares. The manifest is left out if the receiver should know it already."""

    version: str
    digest: str
    """The digest of the manifest."""
    content: str
    """The digest of all values."""
    bucket_bytes: int
    split: bool
    buffers: Buffers
    silence: float
    """Seconds without a heartbeat after which each side considers the other stopped."""
    manifest: Manifest | None = None


class Unknown(msgspec.Struct, tag=True):
    """The receiver does not know the manifest: send `Open` again with it."""


class Ready(msgspec.Struct, tag=True):
    """The receiver can take the version."""

    skips: list[int] = []
    """Buckets that this receiver does not need."""
    alike: list[list[int]] = []
    """Groups of tensors, by their index in the manifest, that share one live tensor here and so must be equal."""


class Pause(msgspec.Struct, tag=True):
    """Stop serving; no weights change yet."""

    in_flight: InFlight
    patience: float
    """The longest time in seconds between two messages of this update."""


class Paused(msgspec.Struct, tag=True):
    pass


class Begin(msgspec.Struct, tag=True):
    """All receivers have paused: prepare to load."""


class Begun(msgspec.Struct, tag=True):
    pass


class Filled(msgspec.Struct, tag=True):
    """A bucket is in one of the buffers."""

    bucket: int
    slot: int
    sum: bytes


class Taken(msgspec.Struct, tag=True):
    """The receiver has loaded a bucket; its buffer may be filled again."""

    bucket: int


class End(msgspec.Struct, tag=True):
    """All buckets have been sent."""


class Loaded(msgspec.Struct, tag=True):
    """The receiver has loaded the whole version."""


class Commit(msgspec.Struct, tag=True):
    """All receivers have loaded: serve the new version."""


class Serving(msgspec.Struct, tag=True):
    version: str
    assurance: Assurance


class Abandon(msgspec.Struct, tag=True):
    """The sender gives this update up."""

    why: str


class Failed(msgspec.Struct, tag=True):
    """The receiver cannot continue this update."""

    why: str
    dirty: bool = True


Message: TypeAlias = (
    Hello
    | Proof
    | Beat
    | StatusRequest
    | Status
    | Open
    | Unknown
    | Ready
    | Pause
    | Paused
    | Begin
    | Begun
    | Filled
    | Taken
    | End
    | Loaded
    | Commit
    | Serving
    | Abandon
    | Failed
)
DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
