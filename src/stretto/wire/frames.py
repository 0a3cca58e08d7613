"""Messages between processes: MessagePack with a length in front, and files beside them."""

import array
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from stretto.ir.errors import StrettoError

M = TypeVar("M")
Buffer = bytes | bytearray | memoryview
_HEADER = struct.Struct("!Q")
HEADER_BYTES = _HEADER.size
_MOST_FILES = 253  # that the kernel lets a message have; all of them must be received to be closed
_CONTROL_BYTES = socket.CMSG_SPACE(_MOST_FILES * array.array("i").itemsize)


class Nonsense(StrettoError):  # noqa: N818 (it is what the other side says)
    """What no process of ours would say; it reads on after "it sent"."""


def packed(message: object) -> bytes:
    return framed(msgspec.msgpack.encode(message))


def framed(body: bytes) -> bytes:
    return _HEADER.pack(len(body)) + body


def length_of(header: Buffer, limit: int) -> int:
    """Of the body that follows."""
    length: int = _HEADER.unpack(header)[0]
    if length > limit:
        raise Nonsense(f"a message of {length} bytes, more than the {limit} allowed")
    return length


def unpacked(body: Buffer, decoder: msgspec.msgpack.Decoder[M]) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Nonsense(f"a malformed message ({error!s:.200})") from None


def send(stream: socket.socket, data: Buffer, files: Sequence[int] = ()) -> int:
    """As much as fits now; how much that was."""
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    return stream.sendmsg([data], attached)


def receive(stream: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """What has come, and the files with it."""
    data, attached, flags, _ = stream.recvmsg(most, _CONTROL_BYTES)
    files = array.array("i")
    for _, _, content in attached:
        files.frombytes(content[: len(content) - len(content) % files.itemsize])
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        close_files(files)
        if flags & socket.MSG_CTRUNC:
            raise Nonsense("a file that could not be opened: too many are open")
        raise Nonsense(f"a message of more than {most} bytes")
    return data, list(files)


def close_files(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


class Reader(Generic[M]):
    """Makes messages of what arrives, however that is cut."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], limit: int) -> None:
        self._decoder, self._limit, self._data = decoder, limit, bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """The messages that are complete with this."""
        self._data += data
        while len(self._data) >= HEADER_BYTES:
            end = HEADER_BYTES + length_of(self._data[:HEADER_BYTES], self._limit)
            if len(self._data) < end:
                return
            body = bytes(self._data[HEADER_BYTES:end])
            del self._data[:end]
            yield unpacked(body, self._decoder)
