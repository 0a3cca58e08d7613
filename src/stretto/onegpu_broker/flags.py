"""Numbers that all processes and the device see: how far the messages of each channel have got."""

import ctypes
import mmap

from stretto import cuda
from stretto.wire.memory import demand_sealed, sealed_file

RING = 256  # messages of a channel that may be under way
_SENDER, _RECEIVER, _DONE = 0, RING, 2 * RING
_BLOCK = 2 * RING + 16
BLOCKS = 8192
_BYTES = 4 * _BLOCK * BLOCKS
EVER = 2**31 - 1  # ahead of every count


class Flags:
    """It has a block of words for each channel, from one rank to another in one group.

    The two rings say of each message under way whether its sender's and its receiver's stream have come to it, and
    `done` how many have been copied. It is memory of the host: the broker sees flags go up without asking the device,
    and can let streams go that wait for one that is gone.
    """

    def __init__(self, file: int | None = None) -> None:
        if file is None:
            file = sealed_file("stretto-board", _BYTES)
        demand_sealed(file, _BYTES)
        self.file = file
        self._memory = mmap.mmap(file, _BYTES)
        self._words = memoryview(self._memory).cast("I")
        self._device: int | None = None

    @staticmethod
    def ready(block: int, number: int, *, sender: bool) -> int:
        """The word that one side of a message writes."""
        return block * _BLOCK + (_SENDER if sender else _RECEIVER) + number % RING

    @staticmethod
    def done(block: int) -> int:
        return block * _BLOCK + _DONE

    def read(self, word: int) -> int:
        return self._words[word]

    def write(self, word: int, number: int) -> None:
        self._words[word] = number

    def clear(self, block: int) -> None:
        self._words[block * _BLOCK : (block + 1) * _BLOCK] = memoryview(bytes(4 * _BLOCK)).cast("I")

    def address(self, word: int) -> int:
        """Where a word lies for the device."""
        if self._device is None:
            place = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._device = cuda.register_host(place, _BYTES)
        return self._device + 4 * word
