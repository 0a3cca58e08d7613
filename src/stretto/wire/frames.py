"""Message frames: a length, a MessagePack body, and attached file descriptors."""

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
_MOST_FILES = 253  # the kernel's limit per message; we must receive all files to be able to close them


class MalformedMessage(StrettoError, ValueError):  # noqa: N818 (it describes what the peer sent)
    """A message that violates the protocol. Its text completes a sentence that starts with "it sent"."""


def pack_message(message: object) -> bytes:
    return framed(msgspec.msgpack.encode(message))


def framed(body: bytes) -> bytes:
    return _HEADER.pack(len(body)) + body


def length_of(header: Buffer, limit: int) -> int:
    """Return the length of the body that follows; raise MalformedMessage if it exceeds `limit`."""
    length: int = _HEADER.unpack(header)[0]
    if length > limit:
        raise MalformedMessage(f"a message of {length} bytes, more than the {limit} allowed")
    return length


def unpack_message(body: Buffer, decoder: msgspec.msgpack.Decoder[M]) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"a malformed message ({error!s:.200})") from None


def send_bytes(stream: socket.socket, data: Buffer, files: Sequence[int] = ()) -> int:
    """Send as much as fits now; return the number of bytes sent."""
    return socket.send_fds(stream, [data], list(files)) if files else stream.send(data)


def recv_bytes(stream: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Return at most `most` bytes that have arrived, and the files attached to them."""
    data, files, flags, _ = socket.recv_fds(stream, most, _MOST_FILES)
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        close_files(files)
        if flags & socket.MSG_CTRUNC:
            raise MalformedMessage("a file that could not be opened: too many are open")
        raise MalformedMessage(f"a message of more than {most} bytes")
    return data, files


def close_files(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


class Reader(Generic[M]):
    """Decodes messages from a byte stream that arrives in chunks of any size."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], limit: int) -> None:
        self._decoder, self._limit, self._data = decoder, limit, bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Add a chunk; yield every message that is now complete."""
        self._data += data
        while len(self._data) >= HEADER_BYTES:
            end = HEADER_BYTES + length_of(self._data[:HEADER_BYTES], self._limit)
            if len(self._data) < end:
                return
            body = bytes(self._data[HEADER_BYTES:end])
            del self._data[:end]
            yield unpack_message(body, self._decoder)
