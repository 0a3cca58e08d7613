"""Groups of ranks, and in each a channel from every rank to every other: what both sides of its messages have said."""

import fcntl
import os
from collections import deque
from dataclasses import dataclass, field

from stretto import cuda
from stretto.onegpu_broker.clients import Client
from stretto.onegpu_broker.flags import RING
from stretto.onegpu_broker.link_model import SimulatedLink
from stretto.onegpu_broker.wire import Place, Taken, close
from stretto.wire.frames import MalformedMessage


@dataclass(slots=True)
class Channel:
    source: int
    target: int
    block: int
    sends: deque[tuple[Place, int]] = field(default_factory=deque)
    """With their files; no side knows yet of the other."""
    wants: deque[Place] = field(default_factory=deque)
    handed: deque[int] = field(default_factory=deque)
    """On the host: messages whose file the receiver has, and has not yet read."""
    matched: deque[tuple[Place, Place]] = field(default_factory=deque)
    """On the device: both sides are known, but have not both raised their flags."""
    flying: deque[tuple[int, float]] = field(default_factory=deque)
    """Messages whose link takes time: their number, and when they may arrive."""
    stream: int = 0
    """The last one it was copied on, and if that waits, the number of messages it will have moved."""
    queued: int = 0
    waited: int = 0
    """As many messages will have arrived when its stream waits for no rank any more."""
    next: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """The number of the sender's next message, and of the receiver's."""

    def add(self, place: Place, file: int, *, arrived: int) -> None:
        """One side of a message, if it can be one; `arrived` messages were copied on the device before."""
        if place.number != self.next[place.sends]:
            raise MalformedMessage(f"message {place.number} where message {self.next[place.sends]} is next")
        if place.device < 0:
            under_way = len(self.handed) + len(self.sends if place.sends else self.wants)
            size = _size(file) if place.sends else place.count
            if size != place.count:
                raise MalformedMessage(f"a message of {place.count} bytes in a file of {size}")
        else:
            under_way = place.number - arrived
            if place.count and (len(place.handle) != cuda.HANDLE_BYTES or place.offset + place.count > place.size):
                raise MalformedMessage(f"a place of {place.count} bytes that is not within its allocation")
        if under_way >= RING:
            raise MalformedMessage(f"more than {RING} messages at a time")
        self.next[place.sends] += 1
        if place.sends:
            self.sends.append((place, os.dup(file) if file >= 0 else -1))
        else:
            self.wants.append(place)

    def take(self, message: Taken) -> None:
        """The receiver has read a file."""
        if not self.handed or self.handed[0] != message.number:
            raise MalformedMessage(f"that it has read message {message.number}, which it was not given")
        self.handed.popleft()

    def is_owed(self, leaving: int) -> bool:
        """Whether a side waits for the other, of which this one leaves."""
        return bool(self.sends or self.wants or self.matched or (self.handed and leaving == self.target))

    def clear(self) -> None:
        """Forget what was to be moved."""
        for _, file in self.sends:
            close(file)
        for waiting in (self.sends, self.wants, self.handed, self.matched, self.flying):
            waiting.clear()


@dataclass(slots=True)
class GroupState:
    name: str
    size: int
    first: int
    members: dict[int, Client] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    channels: dict[tuple[int, int], Channel] = field(default_factory=dict)
    model: SimulatedLink | None = None
    failed: str = ""

    @property
    def blocks(self) -> range:
        """Of the board: one for each channel."""
        return range(self.first, self.first + self.size**2)

    @property
    def is_abandoned(self) -> bool:
        """Whether all ranks have left that have come."""
        return len(self.left) == len(self.members)

    def rank_of(self, client: Client) -> int | None:
        """The rank that a client is here, until it leaves."""
        return next((rank for rank, it in self.members.items() if it is client and rank not in self.left), None)

    def channel(self, source: int, target: int) -> Channel:
        block = self.first + source * self.size + target
        return self.channels.setdefault((source, target), Channel(source, target, block))


def _size(file: int) -> int:
    """Of a file in memory. Any other could keep its sender's connection open, or fail those that read it."""
    try:
        fcntl.fcntl(file, fcntl.F_GET_SEALS)  # which only files in memory have
    except OSError:
        raise MalformedMessage("a file that does not lie in memory") from None
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise MalformedMessage("a file that is not open for reading and writing")
    return os.fstat(file).st_size
