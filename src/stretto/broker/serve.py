"""The process in the middle: it brings both sides of each message together and has the device copy it.

Ranks say where their bytes lie and let their streams raise a flag when they get there. The broker queues the copy, to
begin when both flags are up, and behind it a third flag that the ranks' streams wait for. It has its own context on the
device, so that nothing a rank's host does, such as the loading of a kernel that first waits for all its streams, can
keep a message from being moved.

A stream that waits can hold up others, once there are more of them than the device has queues. So only a few channels
at a time have a stream to wait on; for all others the broker looks at the flags itself, and queues what is ready.
"""

import contextlib
import os
import resource
import selectors
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from stretto.broker import driver
from stretto.broker.board import BLOCKS, EVER, RING, Board
from stretto.broker.model import LinkModel
from stretto.broker.wire import (
    Bye,
    Failed,
    Here,
    Join,
    Joined,
    Leave,
    Links,
    Message,
    Place,
    Taken,
    Welcome,
    hear,
    tell,
)

_LOOKS = 16  # at the flags, for each at what ranks say
_WAITING = 24  # streams that may wait; the device has 32 queues for a process that asks for them
_COPYING = 4  # streams that never wait


@dataclass(slots=True)
class _Channel:
    """From one rank of a group to another."""

    block: int
    sends: deque[tuple[Place, int]] = field(default_factory=deque)
    wants: deque[Place] = field(default_factory=deque)
    matched: deque[tuple[Place, Place]] = field(default_factory=deque)
    """On the device: both sides are known, but have not both raised their flags."""
    flying: deque[tuple[int, float]] = field(default_factory=deque)
    """Messages whose link takes time: their number, and when they may arrive."""
    stream: int = 0
    """The last one it was copied on, and if that waits, the number of messages it will have moved."""
    queued: int = 0


@dataclass(slots=True)
class _Group:
    size: int
    first: int
    members: dict[int, socket.socket] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    channels: dict[tuple[int, int], _Channel] = field(default_factory=dict)
    model: LinkModel | None = None
    failed: str = ""

    def channel(self, source: int, target: int) -> _Channel:
        return self.channels.setdefault((source, target), _Channel(self.first + source * self.size + target))


class Broker:
    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._board = Board()
        self._groups: dict[str, _Group] = {}
        self._free: dict[int, list[int]] = {}
        self._blocks = 0
        self._idle: list[int] = []  # streams to wait on
        self._armed: dict[int, _Channel] = {}  # channels that have one, by their block
        self._copying: list[int] = []
        self._opened: dict[bytes, int] = {}
        self._watched: dict[int, tuple[str, _Group, _Channel]] = {}  # channels with flags or clocks to look at
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._connections: set[socket.socket] = set()

    def serve(self) -> None:
        """Until all ranks have gone, or none has come within a minute."""
        begin, met = time.monotonic(), False
        while self._connections or (not met and time.monotonic() - begin < 60):
            for key, _ in self._selector.select(0 if self._watched else 1.0):
                if key.fileobj is self._server:
                    connection, _ = self._server.accept()
                    self._say(connection, Welcome(), self._board.file)
                    self._selector.register(connection, selectors.EVENT_READ)
                    self._connections.add(connection)
                    met = True
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._hear(key.fileobj)
            for _ in range(_LOOKS):
                self._look()

    def _hear(self, connection: socket.socket) -> None:
        message, file = hear(connection)
        if message is None or isinstance(message, Bye):
            self._selector.unregister(connection)
            self._connections.discard(connection)
            connection.close()
            self._gone(connection, in_peace=message is not None)
        else:
            self._act(connection, message, file)

    def _act(self, connection: socket.socket, message: Message, file: int) -> None:
        if isinstance(message, Join):
            self._join(connection, message)
            return
        group = self._groups.get(message.group)  # type: ignore[union-attr]
        rank = next((rank for rank, it in group.members.items() if it is connection), -1) if group else -1
        if group is None or rank < 0:
            _close(file)
            return
        if isinstance(message, Leave):
            self._leave(message.group, group, rank)
            return
        if group.failed or getattr(message, "peer", 0) not in range(group.size):
            _close(file)
            return
        match message:
            case Place():
                self._place(message.group, group, rank, message, file)
            case Taken():
                if message.peer in group.members:
                    self._say(group.members[message.peer], Taken(message.group, rank, message.number))
            case Failed():
                self._fail(message.group, group, message.why)
            case Links():
                group.model = message.model

    def _join(self, connection: socket.socket, message: Join) -> None:
        group = self._groups.get(message.group)
        if group is None:
            first = self._allot(message.size)
            if first < 0:
                self._say(connection, Joined(message.group, first))
                return
            self._groups[message.group] = group = _Group(message.size, first)
        group.members[message.rank] = connection
        self._say(connection, Joined(message.group, group.first))
        if group.failed:
            self._say(connection, Failed(message.group, group.failed))

    def _allot(self, size: int) -> int:
        if self._free.get(size):
            return self._free[size].pop()
        if self._blocks + size * size > BLOCKS:
            return -1
        self._blocks += size * size
        return self._blocks - size * size

    def _place(self, name: str, group: _Group, rank: int, place: Place, file: int) -> None:
        if place.peer in group.left:
            _close(file)
            self._fail(name, group, f"rank {place.peer} has left")
            return
        channel = group.channel(rank, place.peer) if place.sends else group.channel(place.peer, rank)
        if place.sends:
            channel.sends.append((place, file))
        else:
            channel.wants.append(place)
        target = place.peer if place.sends else rank
        while channel.sends and channel.wants and not group.failed:
            (sent, file), wanted = channel.sends.popleft(), channel.wants.popleft()
            source = wanted.peer
            if sent.count != wanted.count or (sent.device < 0) != (wanted.device < 0):
                where = ["the device" if it.device >= 0 else "the host" for it in (sent, wanted)]
                self._fail(
                    name,
                    group,
                    f"rank {source} sent {sent.count} bytes on {where[0]} as message {sent.number} to rank {target}, "
                    f"which expected {wanted.count} on {where[1]}",
                )
            elif sent.device >= 0:
                channel.matched.append((sent, wanted))
                try:
                    self._begin(name, group, channel)
                except driver.DriverError as error:
                    self._fail(name, group, f"the broker could not move a message from rank {source}: {error}")
            else:
                self._say(group.members[target], Here(name, source, sent.number), file)
            _close(file)

    def _begin(self, name: str, group: _Group, channel: _Channel) -> None:
        """A message is known on both sides: queue it if its channel may wait on a stream, or else look at its flags."""
        if not self._copying:
            made = driver.make_streams(channel.matched[0][0].device, _WAITING + _COPYING)
            self._idle, self._copying = made[_COPYING:], made[:_COPYING]
        behind = len(channel.matched) > 1 or bool(channel.flying)
        if not behind and self._arm(channel, timed=group.model is not None):
            self._move(group, channel, waits=True)
        else:
            self._watched[channel.block] = name, group, channel

    def _arm(self, channel: _Channel, *, timed: bool) -> bool:
        """Whether a channel has a stream to wait on. One that is timed gets none, nor one that others still count."""
        if channel.block in self._armed:
            return True
        if timed or not self._is_done(channel):
            return False
        if not self._idle:
            for block, other in list(self._armed.items()):
                if self._is_done(other):
                    del self._armed[block]
                    self._idle.append(other.stream)
                    other.stream = 0
        if not self._idle:
            return False
        channel.stream = self._idle.pop()
        self._armed[channel.block] = channel
        return True

    def _is_done(self, channel: _Channel) -> bool:
        """Whether all that was queued has been copied."""
        return self._board.read(self._board.done(channel.block)) >= channel.queued

    def _look(self) -> None:
        """Copy what both sides are ready for, and let arrive what has had its link's time."""
        read, ready = self._board.read, self._board.ready
        for block, (name, group, channel) in list(self._watched.items()):
            while channel.matched and not group.failed:
                number = channel.matched[0][0].number
                if (
                    read(ready(block, number, sender=True)) <= number
                    or read(ready(block, number, sender=False)) <= number
                ):
                    break
                if block not in self._armed:
                    channel.stream = self._copying[block % _COPYING]
                try:
                    self._move(group, channel, waits=False)
                except driver.DriverError as error:
                    self._fail(name, group, f"the broker could not move a message: {error}")
            while channel.flying and not group.failed and time.perf_counter() >= channel.flying[0][1]:
                self._arrive(channel, channel.flying.popleft()[0])
            if not channel.matched and not channel.flying:
                self._watched.pop(block, None)

    def _move(self, group: _Group, channel: _Channel, *, waits: bool) -> None:
        """Queue the first message that is known on both sides."""
        sent, wanted = channel.matched.popleft()
        board, stream, number = self._board, channel.stream, sent.number
        if waits:
            for sender in (True, False):
                word = board.ready(channel.block, number, sender=sender)
                if board.read(word) <= number:
                    driver.wait_value(stream, board.address(word), number + 1)
        if sent.count:
            driver.copy(stream, self._open(wanted), self._open(sent), sent.count)
        if group.model is None:
            self._arrive(channel, number)
        else:
            begin = max(time.perf_counter(), channel.flying[-1][1] if channel.flying else 0.0)
            channel.flying.append((number, begin + group.model.seconds(sent.count)))

    def _arrive(self, channel: _Channel, number: int) -> None:
        channel.queued = number + 1
        board = self._board
        driver.write_value(channel.stream, board.address(board.done(channel.block)), number + 1)

    def _open(self, place: Place) -> int:
        found = self._opened.get(place.handle)
        if found is None:
            found = self._opened[place.handle] = driver.open_shared(place.handle)
        return found + place.offset

    def _fail(self, name: str, group: _Group, why: str) -> None:
        """Tell all members, and let go of every stream that waits."""
        if group.failed:
            return
        group.failed = why
        for connection in group.members.values():
            self._say(connection, Failed(name, why))
        blocks = range(group.first, group.first + group.size**2)
        for channel in group.channels.values():
            self._watched.pop(channel.block, None)
            self._drop(channel)
            if channel.block in self._armed:
                for number in range(RING):
                    self._board.write(self._board.ready(channel.block, number, sender=True), EVER)
                    self._board.write(self._board.ready(channel.block, number, sender=False), EVER)
        for channel in group.channels.values():  # only now, since one may be queued behind another
            if channel.stream:
                driver.synchronize(channel.stream)
        for block in blocks:
            self._board.write(self._board.done(block), EVER)

    def _drop(self, channel: _Channel) -> None:
        """Forget what a channel was to move."""
        for _, file in channel.sends:
            _close(file)
        for waiting in (channel.sends, channel.wants, channel.matched, channel.flying):
            waiting.clear()

    def _leave(self, name: str, group: _Group, rank: int) -> None:
        group.left.add(rank)
        owed = (
            channel.sends or channel.wants or channel.matched
            for ends, channel in group.channels.items()
            if rank in ends
        )
        if any(owed):
            self._fail(name, group, f"rank {rank} has left")
        if len(group.left) == group.size:
            for channel in group.channels.values():
                self._drop(channel)
                if channel.stream:
                    driver.synchronize(channel.stream)
            for block in range(group.first, group.first + group.size**2):
                self._board.clear(block)
                self._watched.pop(block, None)
                if block in self._armed:
                    self._idle.append(self._armed.pop(block).stream)
            self._free.setdefault(group.size, []).append(group.first)
            del self._groups[name]

    def _gone(self, connection: socket.socket, *, in_peace: bool) -> None:
        for name, group in list(self._groups.items()):
            for rank, it in list(group.members.items()):
                if it is connection:
                    if not in_peace:
                        self._fail(name, group, f"rank {rank} died")
                    self._leave(name, group, rank)

    def _say(self, connection: socket.socket, message: Message, file: int = -1) -> None:
        with contextlib.suppress(OSError):  # one that is gone will be found to be
            tell(connection, message, file)


def _close(file: int) -> None:
    if file >= 0:
        os.close(file)


def main() -> None:
    """The listening socket is handed down as a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # messages on the host are files until they are taken
    server = socket.socket(fileno=int(sys.argv[1]))
    Broker(server).serve()


if __name__ == "__main__":
    main()
