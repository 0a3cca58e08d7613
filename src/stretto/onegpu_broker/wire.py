"""What ranks and their broker tell each other: small messages over Unix sockets, with files attached.

A packet has one message, whole: so the broker, which must wait for nobody, never has half of one. The broker says hello
first, with its board attached; who is at the other end is known by its user."""

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

PROTOCOL = 1
_LARGEST = 65536

Name = Annotated[str, Meta(max_length=128)]
Reason = Annotated[str, Meta(max_length=1000)]
Handle = Annotated[bytes, Meta(max_length=HANDLE_BYTES)]
Rank = Annotated[int, Meta(ge=0, lt=BLOCKS)]
Number = Annotated[int, Meta(ge=0, lt=EVER)]
Bytes = Annotated[int, Meta(ge=0, lt=2**62)]


class Join(msgspec.Struct, tag=True):
    """A rank takes part in a group; the answer is Joined, or Failed if it cannot."""

    group: Name
    rank: Rank
    size: Annotated[int, Meta(ge=1, lt=2**31)]


class Joined(msgspec.Struct, tag=True):
    """Where the group's blocks on the board begin."""

    group: Name
    first: Annotated[int, Meta(ge=0, lt=BLOCKS)]


class Place(msgspec.Struct, tag=True):
    """One side of a message: the bytes to be sent, or the room for them.

    They lie in a device's allocation from an offset on; or, to be sent, in the attached file. A room on the host needs
    no place: the file is handed on.
    """

    group: Name
    peer: Rank
    """The other side."""
    number: Number
    """Which message of this channel it is."""
    sends: bool
    count: Bytes
    device: Annotated[int, Meta(ge=-1, lt=1024)] = -1
    handle: Handle = b""
    offset: Bytes = 0
    size: Bytes = 0
    """Of the whole allocation."""
    turn: Number = 0
    """Which collective of the group it is part of: both sides must be at the same."""


class Here(msgspec.Struct, tag=True):
    """What a rank wants lies in the attached file."""

    group: Name
    peer: Rank
    number: Number


class Taken(msgspec.Struct, tag=True):
    """What lay in a file has been copied by the receiver."""

    group: Name
    peer: Rank
    number: Number


class Failed(msgspec.Struct, tag=True):
    """A group cannot go on."""

    group: Name
    why: Reason


class Leave(msgspec.Struct, tag=True):
    """A rank has no more to do with a group."""

    group: Name


class SetLink(msgspec.Struct, tag=True):
    """Messages of a group are to take as long as on such links."""

    group: Name
    model: SimulatedLink | None


class Freed(msgspec.Struct, tag=True):
    """A rank has freed an allocation that it sent from or received into."""

    handle: Handle


class Bye(msgspec.Struct, tag=True):
    """The sender ends in peace."""


class Refused(msgspec.Struct, tag=True):
    """The broker's last word to a process that it disconnects."""

    why: Reason


FromRank: TypeAlias = Join | Place | Taken | Failed | Leave | SetLink | Freed | Bye
FromBroker: TypeAlias = Hello | Joined | Here | Taken | Failed | Refused
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_FROM_BROKER: msgspec.msgpack.Decoder[FromBroker] = msgspec.msgpack.Decoder(FromBroker)
_M = TypeVar("_M", FromRank, FromBroker)


def send_message(connection: socket.socket, message: FromRank | FromBroker, file: int = -1) -> None:
    send_bytes(connection, pack_message(message), [file] if file >= 0 else [])


def recv_from_rank(connection: socket.socket) -> tuple[FromRank | None, int]:
    """What a rank says and its file, −1 for none; no message once it is gone."""
    return _recv(connection, _FROM_RANK)


def recv_from_broker(connection: socket.socket) -> tuple[FromBroker | None, int]:
    """What the broker says and its file, −1 for none; no message once it is gone."""
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
    except ConnectionResetError:  # it has not read all that it was told, but may have said something before it left
        return recv_bytes(connection, _LARGEST)


def _has_file(message: FromRank | FromBroker) -> bool:
    match message:
        case Place():
            return message.sends and message.device < 0
        case _:
            return isinstance(message, Hello | Here)
