"""The protocol between ranks and their broker: small messages over Unix sockets, with files attached."""

# A packet holds one whole message: so the broker, which must never wait, never has half a message. The broker says
# hello first, with the file of its flags attached; each end checks the user of the other.

import os
import socket
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from stretto.cuda import HANDLE_BYTES
from stretto.onegpu_broker.flags import BLOCKS, EVER
from stretto.onegpu_broker.link_model import SimulatedLink
from stretto.wire.frames import (
    HEADER_BYTES,
    MalformedMessage,
    close_files,
    length_of,
    pack_message,
    recv_bytes,
    send_bytes,
    unpack_message,
)
from stretto.wire.greeting import Hello

PROTOCOL = 2
_LARGEST = 65536

Name = Annotated[str, Meta(max_length=128)]
Reason = Annotated[str, Meta(max_length=1000)]
Handle = Annotated[bytes, Meta(max_length=HANDLE_BYTES)]
Rank = Annotated[int, Meta(ge=0, lt=BLOCKS)]
Number = Annotated[int, Meta(ge=0, lt=EVER)]
Bytes = Annotated[int, Meta(ge=0, lt=2**62)]


class Join(msgspec.Struct, tag=True):
    """A rank joins a group; the broker answers Joined, or Failed."""

    group: Name
    rank: Rank
    size: Annotated[int, Meta(ge=1, lt=2**31)]


class Joined(msgspec.Struct, tag=True):
    """The broker has added a rank to a group, whose blocks of flags begin at `first`."""

    group: Name
    first: Annotated[int, Meta(ge=0, lt=BLOCKS)]


class Place(msgspec.Struct, tag=True):
    """One side of a message: the bytes to send, or the buffer to receive them.

    On a device, they lie at an offset in an allocation. On the host, the attached file holds the bytes to send, and the
    broker passes it on to the receiver.
    """

    group: Name
    peer: Rank
    """The rank of the other side."""
    number: Number
    """Counts the messages of this channel."""
    sends: bool
    count: Bytes
    device: Annotated[int, Meta(ge=-1, lt=1024)] = -1
    handle: Handle = b""
    offset: Bytes = 0
    size: Bytes = 0
    """Bytes of the whole allocation."""
    turn: Number = 0
    """Counts the collectives of the group: both sides must be at the same one."""


class Here(msgspec.Struct, tag=True):
    """The attached file holds a message for this rank."""

    group: Name
    peer: Rank
    number: Number


class Taken(msgspec.Struct, tag=True):
    """The receiver has read a message from its file."""

    group: Name
    peer: Rank
    number: Number


class Failed(msgspec.Struct, tag=True):
    """A group has failed."""

    group: Name
    why: Reason


class Leave(msgspec.Struct, tag=True):
    """A rank leaves a group."""

    group: Name


class SetLink(msgspec.Struct, tag=True):
    """Messages of a group take as long as on this link; None removes the delay."""

    group: Name
    model: SimulatedLink | None


class ShareFate(msgspec.Struct, tag=True):
    """A group fails as soon as another one of the same fate does."""

    group: Name
    fate: Annotated[str, Meta(min_length=1, max_length=128)]


class Freed(msgspec.Struct, tag=True):
    """A rank has freed an allocation that its messages used."""

    handle: Handle


class Bye(msgspec.Struct, tag=True):
    """A rank ends normally."""


class Refused(msgspec.Struct, tag=True):
    """The broker disconnects this process."""

    why: Reason


FromRank: TypeAlias = Join | Place | Taken | Failed | Leave | SetLink | ShareFate | Freed | Bye
FromBroker: TypeAlias = Hello | Joined | Here | Taken | Failed | Refused
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_FROM_BROKER: msgspec.msgpack.Decoder[FromBroker] = msgspec.msgpack.Decoder(FromBroker)
_M = TypeVar("_M", FromRank, FromBroker)


def send_message(connection: socket.socket, message: FromRank | FromBroker, file: int = -1) -> None:
    send_bytes(connection, pack_message(message), [file] if file >= 0 else [])


def recv_from_rank(connection: socket.socket) -> tuple[FromRank | None, int]:
    """Return a rank's next message and its file (−1 for none); the message is None if the rank is gone."""
    return _recv(connection, _FROM_RANK)


def recv_from_broker(connection: socket.socket) -> tuple[FromBroker | None, int]:
    """Return the broker's next message and its file (−1 for none); the message is None if the broker is gone."""
    return _recv(connection, _FROM_BROKER)


def close(file: int) -> None:
    if file >= 0:
        os.close(file)


def _recv(connection: socket.socket, decoder: msgspec.msgpack.Decoder[_M]) -> tuple[_M | None, int]:
    try:
        data, files = _receive(connection)
    except OSError:
        return None, -1
    try:
        if not data:
            return None, -1
        header, body = data[:HEADER_BYTES], data[HEADER_BYTES:]
        if len(header) < HEADER_BYTES or length_of(header, _LARGEST) != len(body):
            raise MalformedMessage("a message of another length than it says")
        message = unpack_message(body, decoder)
        if len(files) != _has_file(message):
            raise MalformedMessage(f"a {type(message).__name__} with {len(files)} files")
        return message, files.pop() if files else -1
    finally:
        close_files(files)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    try:
        return recv_bytes(connection, _LARGEST)
    except ConnectionResetError:  # the peer left without reading everything, but may have sent something before
        return recv_bytes(connection, _LARGEST)


def _has_file(message: FromRank | FromBroker) -> bool:
    match message:
        case Place():
            return message.sends and message.device < 0
        case _:
            return isinstance(message, Hello | Here)
