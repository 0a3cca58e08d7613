"""What senders and receivers tell each other."""

from typing import Literal, TypeAlias

import msgspec

from stretto.weights.manifest import Manifest
from stretto.wire.connection import Beat
from stretto.wire.greeting import Hello, Proof

State: TypeAlias = Literal["serving", "paused", "loading", "loaded", "dirty"]
InFlight: TypeAlias = Literal["wait", "abort", "keep"]
Assurance: TypeAlias = Literal["verified", "delivered", "unaccounted"]
"""How sure it is that a receiver has what was pushed.

- verified: delivered, and its live tensors hold exactly what was sent.
- delivered: every byte of every buffer was the sender's, before and after loading, and the loader accounted for every
  tensor. What it has made of them, fused or quantised, is not looked at.
- unaccounted: its loader did not say that it took every tensor, or it knows no sums.
"""


class StatusRequest(msgspec.Struct, tag=True):
    """How are you?"""


class Status(msgspec.Struct, tag=True):
    """How a receiver is."""

    state: State
    version: str
    """The last that it had whole."""
    error: str
    """Why its last update failed."""
    device: str
    """A GPU's UUID, or "cpu"."""
    content: str = ""
    """The digest of all values of the version; nothing before the first push, and while dirty."""
    assurance: Assurance | None = None
    """Of the version; None before the first push, and while dirty."""
    identity: str = ""
    """A receiver's own, whatever its address is spelled like."""


class Buffers(msgspec.Struct):
    """Two buffers that both sides see: of a device, in an attached file, or in one to be opened."""

    number: int
    """Another number is another pair."""
    nbytes: int
    """Of each."""
    handle: bytes = b""
    offset: int = 0
    """On a device: the allocation's handle, and where in it they begin."""
    path: str = ""


class Open(msgspec.Struct, tag=True):
    """A version is to come; nothing happens yet. Without a manifest if the receiver should know it."""

    version: str
    digest: str
    """Of the manifest."""
    content: str
    """The digest of all values."""
    bucket_bytes: int
    split: bool
    buffers: Buffers
    silence: float
    """Seconds without a sign of life, after which each side takes the other to be stopped."""
    manifest: Manifest | None = None


class Unknown(msgspec.Struct, tag=True):
    """Tell me the manifest."""


class Ready(msgspec.Struct, tag=True):
    """The version can come."""

    skips: list[int] = []
    """Buckets of which nothing is needed."""
    alike: list[list[int]] = []
    """Tensors, by their places in the manifest, that are one here, and so must be equal."""


class Pause(msgspec.Struct, tag=True):
    """Stop serving; nothing is touched yet."""

    in_flight: InFlight
    patience: float
    """Seconds in which something comes next, until the update is over."""


class Paused(msgspec.Struct, tag=True):
    pass


class Begin(msgspec.Struct, tag=True):
    """All receivers have paused: get ready to load."""


class Begun(msgspec.Struct, tag=True):
    pass


class Filled(msgspec.Struct, tag=True):
    """A bucket lies in one of the buffers."""

    bucket: int
    slot: int
    sum: bytes


class Taken(msgspec.Struct, tag=True):
    """A bucket was loaded; its buffer may be filled again."""

    bucket: int


class End(msgspec.Struct, tag=True):
    """That was the last bucket."""


class Loaded(msgspec.Struct, tag=True):
    """All is in place."""


class Commit(msgspec.Struct, tag=True):
    """All receivers have loaded: serve the new version."""


class Serving(msgspec.Struct, tag=True):
    version: str
    assurance: Assurance


class Abandon(msgspec.Struct, tag=True):
    """This update came to nothing."""

    why: str


class Failed(msgspec.Struct, tag=True):
    """The receiver cannot go on with this update."""

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
