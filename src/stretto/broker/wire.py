"""What ranks and their broker tell each other: small messages over Unix sockets, with files attached."""

import array
import os
import socket
from typing import TypeAlias

import msgspec

from stretto.broker.model import LinkModel

_LARGEST = 65536


class Welcome(msgspec.Struct, tag=True):
    """The broker's first word; its board is attached."""


class Join(msgspec.Struct, tag=True):
    """A rank takes part in a group."""

    group: str
    rank: int
    size: int


class Joined(msgspec.Struct, tag=True):
    """Where the group's blocks on the board begin."""

    group: str
    first: int


class Place(msgspec.Struct, tag=True):
    """One side of a message: the bytes to be sent, or the room for them.

    They lie in a device's allocation from an offset on; or, to be sent, in the attached file. A room on the host needs
    no place: the file is handed on.
    """

    group: str
    peer: int
    """The other side."""
    number: int
    """Which message of this channel it is."""
    sends: bool
    count: int
    device: int = -1
    handle: bytes = b""
    offset: int = 0


class Here(msgspec.Struct, tag=True):
    """What a rank wants lies in the attached file."""

    group: str
    peer: int
    number: int


class Taken(msgspec.Struct, tag=True):
    """What lay in a file has been copied by the receiver."""

    group: str
    peer: int
    number: int


class Failed(msgspec.Struct, tag=True):
    """A group cannot go on."""

    group: str
    why: str


class Leave(msgspec.Struct, tag=True):
    """A rank has no more to do with a group."""

    group: str


class Links(msgspec.Struct, tag=True):
    """Messages of a group are to take as long as on such links."""

    group: str
    model: LinkModel | None


class Bye(msgspec.Struct, tag=True):
    """The sender ends in peace."""


Message: TypeAlias = Welcome | Join | Joined | Place | Here | Taken | Failed | Leave | Links | Bye
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def tell(connection: socket.socket, message: Message, file: int = -1) -> None:
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))] if file >= 0 else []
    connection.sendmsg([msgspec.msgpack.encode(message)], files)


def hear(connection: socket.socket) -> tuple[Message | None, int]:
    """A message and its file, −1 for none; no message once the other side is gone, or talks nonsense."""
    file = -1
    try:
        data, attached, flags, _ = connection.recvmsg(_LARGEST, socket.CMSG_SPACE(array.array("i").itemsize))
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):  # a file was lost: too many are open
            return None, -1
        file = next((array.array("i", bytes(what)[:4])[0] for _, _, what in attached), -1)
        return (_DECODER.decode(data) if data else None), file
    except (OSError, msgspec.DecodeError):
        if file >= 0:
            os.close(file)
        return None, -1
