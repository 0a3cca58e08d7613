"""Flags in memory shared by all processes and the device: how far the messages of each channel have got."""

import ctypes
import mmap

from stretto import cuda
from stretto.wire.memory import sealed_file, validate_sealed

RING = 256  # messages of a channel that may be in progress
_SENDER, _RECEIVER, _DONE = 0, RING, 2 * RING
_BLOCK = 2 * RING + 16  # words
BLOCKS = 8192
_BYTES = 4 * _BLOCK * BLOCKS
EVER = 2**31 - 1  # larger than any count


class Flags:
    """A block of 32-bit words for each channel; a channel leads from one rank to another in one group.

    Two rings hold a flag for each message in progress: the sender's and the receiver's stream write theirs when they
    reach the message. A third word, `done`, counts the messages that were copied. The words are host memory: the broker
    reads them without asking the device, and can release streams that wait for a dead process.
    """

    def __init__(self, file: int | None = None) -> None:
        """Map the flags in this file, or create a file for them."""
        if file is None:
            file = sealed_file("stretto-board", _BYTES)
        validate_sealed(file, _BYTES)
        self.file = file
        self._memory = mmap.mmap(file, _BYTES)
        self._words = memoryview(self._memory).cast("I")
        self._device: int | None = None

    @staticmethod
    def ready(block: int, number: int, *, sender: bool) -> int:
        """Return the index of the word that one side of a message writes."""
        return block * _BLOCK + (_SENDER if sender else _RECEIVER) + number % RING

    @staticmethod
    def done(block: int) -> int:
        """Return the index of the word that counts the messages copied."""
        return block * _BLOCK + _DONE

    def arrived(self, block: int) -> int:
        """Return how many messages of a channel were copied."""
        return self._words[block * _BLOCK + _DONE]

    def read(self, word: int) -> int:
        return self._words[word]

    def write(self, word: int, number: int) -> None:
        self._words[word] = number

    def clear(self, block: int) -> None:
        self._words[block * _BLOCK : (block + 1) * _BLOCK] = memoryview(bytes(4 * _BLOCK)).cast("I")

    def address(self, word: int) -> int:
        """Return the device address of a word."""
        if self._device is None:
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._device = cuda.register_host(start, _BYTES)
        return self._device + 4 * word
