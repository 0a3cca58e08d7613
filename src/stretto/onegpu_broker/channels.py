"""A channel from one rank to another: its messages, from the first side posted until the copy is queued."""

import fcntl
import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from stretto import cuda
from stretto.onegpu_broker.flags import RING
from stretto.onegpu_broker.link_clock import LinkClock
from stretto.onegpu_broker.wire import Place, Taken, close
from stretto.wire.frames import MalformedMessage


@dataclass(slots=True)
class Channel:
    source: int
    target: int
    block: int
    sends: deque[tuple[Place, int]] = field(default_factory=deque)
    """Sends without a matching receive, each with its file."""
    receives: deque[Place] = field(default_factory=deque)
    """Receives without a matching send."""
    unread: deque[int] = field(default_factory=deque)
    """On the host: messages whose file was passed to the receiver, which has not read it yet."""
    matched: deque[tuple[Place, Place]] = field(default_factory=deque)
    """On the device: both sides were posted, but not both flags are up."""
    link: LinkClock = field(default_factory=LinkClock)
    """Messages that a simulated link delays."""
    stream: int = 0
    """The stream that last copied a message of this channel."""
    queued: int = 0
    """How many messages will have arrived once the device has run all queued copies."""
    waited: int = 0
    """Once this many messages have arrived, the stream no longer waits for a rank."""
    next: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """The number of the next message, by whether the side sends."""

    def add(self, place: Place, file: int, *, arrived: int) -> None:
        """Add one side of a message, after `arrived` were copied on the device; raise MalformedMessage if it is bad."""
        if place.number != self.next[place.sends]:
            raise MalformedMessage(f"message {place.number} where message {self.next[place.sends]} is next")
        if place.device < 0:
            in_progress = len(self.unread) + len(self.sends if place.sends else self.receives)
            size = _memfd_size(file) if place.sends else place.count
            if size != place.count:
                raise MalformedMessage(f"a message of {place.count} bytes in a file of {size}")
        else:
            in_progress = place.number - arrived
            if place.count and (len(place.handle) != cuda.HANDLE_BYTES or place.offset + place.count > place.size):
                raise MalformedMessage(f"a place of {place.count} bytes that is not within its allocation")
        if in_progress >= RING:
            raise MalformedMessage(f"more than {RING} messages at a time")
        self.next[place.sends] += 1
        if place.sends:
            self.sends.append((place, os.dup(file) if file >= 0 else -1))
        else:
            self.receives.append(place)

    def mark_read(self, message: Taken) -> None:
        """Record that the receiver has read a file."""
        if not self.unread or self.unread[0] != message.number:
            raise MalformedMessage(f"that it has read message {message.number}, which it was not given")
        self.unread.popleft()

    def is_broken_by(self, leaving: int) -> bool:
        """Return whether a message can no longer complete once this rank leaves."""
        return bool(self.sends or self.receives or self.matched or (self.unread and leaving == self.target))

    def clear(self) -> None:
        """Drop all messages whose copy is not queued."""
        for _, file in self.sends:
            close(file)
        messages: deque[Any]
        for messages in (self.sends, self.receives, self.unread, self.matched):
            messages.clear()
        self.link.clear()


def _memfd_size(file: int) -> int:
    """Return the size of a memory file; raise MalformedMessage for any other file.

    Another kind of file could keep its sender's connection open, or make its readers fail.
    """
    try:
        fcntl.fcntl(file, fcntl.F_GET_SEALS)  # only memory files have seals
    except OSError:
        raise MalformedMessage("a file that does not lie in memory") from None
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise MalformedMessage("a file that is not open for reading and writing")
    return os.fstat(file).st_size
