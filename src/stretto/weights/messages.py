"""What senders and receivers tell each other."""

from typing import Literal, TypeAlias

import msgspec

from stretto.weights.manifest import Manifest

State: TypeAlias = Literal["serving", "paused", "loading", "loaded", "dirty"]
InFlight: TypeAlias = Literal["wait", "abort", "keep"]


class Hello(msgspec.Struct, tag=True):
    protocol: int
    nonce: bytes


class Proof(msgspec.Struct, tag=True):
    """That one knows the secret: a keyed hash of both nonces."""

    digest: bytes


class Beat(msgspec.Struct, tag=True):
    """A sign of life."""


class Ask(msgspec.Struct, tag=True):
    """How are you?"""


class Told(msgspec.Struct, tag=True):
    """How a receiver is."""

    state: State
    version: str
    error: str
    device: str
    """A GPU's UUID, or "cpu"."""
    attested: bool


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
    bucket_bytes: int
    split: bool
    buffers: Buffers
    manifest: Manifest | None = None


class Unknown(msgspec.Struct, tag=True):
    """Tell me the manifest."""


class Ready(msgspec.Struct, tag=True):
    """The version can come."""

    skips: list[int] = []
    """Buckets of which nothing is needed."""


class Start(msgspec.Struct, tag=True):
    """Stop serving, and get ready to load."""

    in_flight: InFlight


class Started(msgspec.Struct, tag=True):
    pass


class Filled(msgspec.Struct, tag=True):
    """A bucket lies in one of the buffers."""

    bucket: int
    slot: int
    sum: int


class Taken(msgspec.Struct, tag=True):
    """A bucket was loaded; its buffer may be filled again."""

    bucket: int


class End(msgspec.Struct, tag=True):
    """That was the last bucket."""


class Loaded(msgspec.Struct, tag=True):
    """All is in place."""

    attested: bool


class Commit(msgspec.Struct, tag=True):
    """All receivers have loaded: serve the new version."""


class Serving(msgspec.Struct, tag=True):
    version: str


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
    | Ask
    | Told
    | Open
    | Unknown
    | Ready
    | Start
    | Started
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
