"""The process in the middle: it brings both sides of each message together and has the device copy it.

Ranks say where their bytes lie and let their streams raise a flag when they get there. The broker queues the copy, to
begin when both flags are up, and behind it a third flag that the ranks' streams wait for. It has its own context on the
device, so that nothing a rank's host does, such as the loading of a kernel that first waits for all its streams, can
keep a message from being moved.

It serves the processes of its own user. One that sends nonsense or reads nothing is disconnected, and its groups fail;
nothing that a process says ends the broker or makes it wait.
"""

import os
import resource
import selectors
import socket
import sys
import time

from stretto import cuda
from stretto.onegpu_broker.clients import Client
from stretto.onegpu_broker.copies import Copies
from stretto.onegpu_broker.flags import BLOCKS, Flags
from stretto.onegpu_broker.groups import Channel, GroupState
from stretto.onegpu_broker.wire import (
    PROTOCOL,
    Bye,
    Failed,
    Freed,
    FromRank,
    Here,
    Join,
    Joined,
    Leave,
    Place,
    Refused,
    SetLink,
    Taken,
    close,
    recv_from_rank,
)
from stretto.wire.frames import MalformedMessage
from stretto.wire.greeting import Greeting
from stretto.wire.peers import peer_user

_LOOKS = 16  # at the flags, for each at what ranks say
_TIDY = 0.1  # seconds after which it looks for what is not needed any more
_GRACE = 60.0  # seconds in which ranks may come though none is there
_MOST_CLIENTS = 256
_AWAKE = 0.005  # seconds after a message on the device in which it does not sleep


class Broker:
    def __init__(self, server: socket.socket) -> None:
        server.setblocking(False)
        self._server = server
        self._flags = Flags()
        self._copies = Copies(self._flags)
        self._groups: dict[str, GroupState] = {}
        self._abandoned: dict[str, GroupState] = {}  # groups that all have left that have come
        self._taken = bytearray(BLOCKS)  # blocks of the board that groups have; 0 for a free one
        self._clients: set[Client] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._had_ranks, self._until = False, time.monotonic() + _GRACE
        self._tidied = 0.0
        self._awake_until = 0.0

    def serve(self) -> None:
        """Until all ranks have gone, or none has come in time."""
        while self._is_needed():
            for key, events in self._selector.select(0 if self._is_awake() else _TIDY):
                if key.data is None:
                    self._accept()
                else:
                    self._attend(key.data, events)
            for _ in range(_LOOKS if self._copies.watched else 0):
                for group, why in self._copies.look():
                    self._fail(group, why)
            if time.monotonic() >= self._tidied + _TIDY:
                self._tidy()
        for client in self._clients:
            client.close()

    def _is_awake(self) -> bool:
        """Whether to look out for words all the time. To wake a process costs whoever sends it a word more than
        anything else about a message.
        """
        return bool(self._copies.watched) or time.monotonic() < self._awake_until

    def _is_needed(self) -> bool:
        """Whether a rank is there, or may still come: processes that have joined nothing do not count for long."""
        if any(client.has_joined for client in self._clients):
            return True
        return time.monotonic() < self._until and (bool(self._clients) or not self._had_ranks)

    def _tidy(self) -> None:
        self._tidied = time.monotonic()
        for client in [client for client in self._clients if client.is_stuck]:
            self._disconnect(client, "does not read what it is told")
        self._copies.tidy()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # too many files are open
            return
        if peer_user(connection) != os.geteuid() or not self._has_place():
            connection.close()
            return
        client = Client(connection, self._selector)
        self._clients.add(client)
        client.say(Greeting(PROTOCOL, None, serves=True).hello, self._flags.file)

    def _has_place(self) -> bool:
        """Whether one more can be let in, for which the oldest of those that have joined nothing may have to go."""
        if len(self._clients) < _MOST_CLIENTS:
            return True
        strangers = [client for client in self._clients if not client.has_joined]
        if strangers:
            oldest = min(strangers, key=lambda client: client.since)
            self._disconnect(oldest, "has joined no group, and others want to be let in")
        return bool(strangers)

    def _attend(self, client: Client, events: int) -> None:
        """Whatever goes wrong here is this client's affair, and nobody else's."""
        if client not in self._clients:  # it had to go for another
            return
        try:
            if events & selectors.EVENT_WRITE:
                client.send_waiting()
            if events & selectors.EVENT_READ:
                message, file = recv_from_rank(client.connection)
                try:
                    self._act(client, message, file)
                finally:
                    close(file)
        except MalformedMessage as error:
            self._disconnect(client, f"sent {error}")
        except Exception as error:
            self._disconnect(client, f"sent what the broker failed on ({type(error).__name__}: {error!s:.200})")

    def _disconnect(self, client: Client, why: str) -> None:
        self._gone(client, f"was disconnected by the broker: it {why}", Refused(f"it {why}"))

    def _gone(self, client: Client, why: str, last_word: Refused | None = None) -> None:
        """A client has ended; in peace, if there is nothing to be said about it."""
        for group in list(self._groups.values()):
            rank = group.rank_of(client)
            if rank is not None:
                if why:
                    self._fail(group, f"rank {rank} {why}")
                self._leave(group, rank)
        if last_word is not None:
            client.say(last_word)
        if client.has_joined:
            self._had_ranks, self._until = True, time.monotonic() + _GRACE
        client.close()
        self._clients.discard(client)
        self._copies.mappings.gone(client)

    def _act(self, client: Client, message: FromRank | None, file: int) -> None:
        match message:
            case None:
                self._gone(client, "died")
            case Bye():
                self._gone(client, "")
            case Join():
                self._join(client, message)
            case Freed():
                self._copies.mappings.freed(client, message.handle)
            case _:
                group = self._groups.get(message.group)
                rank = group.rank_of(client) if group is not None else None
                if group is not None and rank is not None:  # otherwise it has left, or never was there
                    self._act_in(group, rank, message, file)

    def _act_in(
        self, group: GroupState, rank: int, message: Place | Taken | Failed | Leave | SetLink, file: int
    ) -> None:
        if isinstance(message, Leave):
            self._leave(group, rank)
            return
        if isinstance(message, Place | Taken) and message.peer >= group.size:
            raise MalformedMessage(f"a message for rank {message.peer} of a group of {group.size}")
        if isinstance(message, SetLink) and message.model is not None and not message.model.is_possible:
            raise MalformedMessage("a link that no message can pass")
        if group.failed:
            return
        match message:
            case Place():
                if message.device >= 0 and len(os.sched_getaffinity(0)) > len(self._clients):
                    self._awake_until = time.monotonic() + _AWAKE
                self._place(group, rank, message, file)
            case Taken():
                group.channel(message.peer, rank).take(message)
                if message.peer not in group.left:
                    group.members[message.peer].say(Taken(group.name, rank, message.number))
            case Failed():
                self._fail(group, message.why)
            case SetLink():
                group.model = message.model

    def _join(self, client: Client, message: Join) -> None:
        rank, size = message.rank, message.size
        if rank >= size:
            raise MalformedMessage(f"a Join as rank {rank} of {size}")
        group = self._groups.get(message.group)
        if group is None:
            first = self._room_for(size)
            if first is None:
                client.say(Failed(message.group, "too many groups: the broker has no room for more"))
                return
            self._groups[message.group] = group = GroupState(message.group, size, first)
            self._taken[first : first + size**2] = b"x" * size**2
        if size != group.size:
            raise MalformedMessage(f"a Join as rank {rank} of {size} to a group of {group.size}")
        if rank in group.members or client in group.members.values():
            raise MalformedMessage(f"a Join as rank {rank} to a group that has this rank or process already")
        client.has_joined = True
        if group.failed:
            client.say(Failed(group.name, group.failed))
            return
        group.members[rank] = client
        self._abandoned.pop(group.name, None)
        client.say(Joined(group.name, group.first))

    def _room_for(self, size: int) -> int | None:
        """The first of enough blocks in a row; groups that all have left make room for those that are needed."""
        if size**2 > BLOCKS:
            return None
        free = bytes(size**2)
        if free not in self._taken:
            for group in list(self._abandoned.values()):
                self._end(group)
        first = self._taken.find(free)
        return first if first >= 0 else None

    def _place(self, group: GroupState, rank: int, place: Place, file: int) -> None:
        if place.peer in group.left:
            self._fail(group, f"rank {place.peer} has left")
            return
        channel = group.channel(rank, place.peer) if place.sends else group.channel(place.peer, rank)
        channel.add(place, file, arrived=self._copies.arrived(channel.block))
        while channel.sends and channel.wants and not group.failed:
            self._match(group, channel)

    def _match(self, group: GroupState, channel: Channel) -> None:
        """The two sides of a channel's next message have met."""
        (sent, file), wanted = channel.sends.popleft(), channel.wants.popleft()
        try:
            if sent.count != wanted.count or (sent.device < 0) != (wanted.device < 0):
                where = ["the device" if place.device >= 0 else "the host" for place in (sent, wanted)]
                self._fail(
                    group,
                    f"rank {channel.source} sent {sent.count} bytes on {where[0]} as message {sent.number} "
                    f"to rank {channel.target}, which expected {wanted.count} on {where[1]}",
                )
            elif sent.turn != wanted.turn:
                self._fail(
                    group,
                    f"rank {channel.source} is at collective {sent.turn} and rank {channel.target} at {wanted.turn}: "
                    f"one of them has left out or was refused a collective that the other has begun",
                )
            elif sent.device >= 0:
                channel.matched.append((sent, wanted))
                self._copies.begin(group, channel)
            else:
                channel.handed.append(sent.number)
                group.members[channel.target].say(Here(group.name, channel.source, sent.number), file)
        except cuda.DriverError as error:
            self._fail(group, f"the broker could not move a message from rank {channel.source}: {error}")
        finally:
            close(file)

    def _fail(self, group: GroupState, why: str) -> None:
        """Tell all members, and let go of every stream that waits."""
        if group.failed:
            return
        group.failed = why
        for rank, client in group.members.items():
            if rank not in group.left:
                client.say(Failed(group.name, why))
        self._copies.stop(group)
        self._copies.let_go(group)

    def _leave(self, group: GroupState, rank: int) -> None:
        group.left.add(rank)
        if any(channel.is_owed(rank) for ends, channel in group.channels.items() if rank in ends):
            self._fail(group, f"rank {rank} has left")
        if len(group.left) == group.size:
            self._end(group)
        elif group.is_abandoned:
            self._abandoned[group.name] = group

    def _end(self, group: GroupState) -> None:
        """All have left."""
        self._copies.stop(group)
        self._copies.release(group)
        self._taken[group.first : group.first + group.size**2] = bytes(group.size**2)
        del self._groups[group.name]
        self._abandoned.pop(group.name, None)


def main() -> None:
    """The listening socket is handed down as a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # messages on the host are files until they are taken
    server = socket.socket(fileno=int(sys.argv[1]))
    Broker(server).serve()


if __name__ == "__main__":
    main()
