"""The broker process: it matches the two sides of each message and has the device copy it."""

import os
import resource
import selectors
import socket
import sys
import time

from stretto.onegpu_broker.clients import Client
from stretto.onegpu_broker.copies import Copies
from stretto.onegpu_broker.flags import Flags
from stretto.onegpu_broker.groups import GroupState
from stretto.onegpu_broker.matching import Matcher
from stretto.onegpu_broker.registry import GroupRegistry
from stretto.onegpu_broker.wire import (
    PROTOCOL,
    Bye,
    Failed,
    Freed,
    FromRank,
    Join,
    Leave,
    Place,
    Refused,
    SetLink,
    ShareFate,
    Taken,
    close,
    recv_from_rank,
)
from stretto.wire.frames import MalformedMessage
from stretto.wire.greeting import Greeting
from stretto.wire.peers import peer_user

_POLLS = 16  # polls of the flags for each poll of the sockets
_TIDY = 0.1  # seconds between two looks for clients and memory to drop
_GRACE = 60.0  # seconds to wait for ranks while there are none
_MOST_CLIENTS = 256
_AWAKE = 0.005  # seconds after a message on the device in which the broker does not sleep


class Broker:
    """The event loop: accepts clients, reads their messages, polls the flags, and drops clients.

    Ranks post where their bytes lie, and their streams raise a flag when they get there. The broker queues the copy to
    start when both flags are up, and behind it a third flag, which the ranks' streams wait for. The broker has its own
    context on the device. So nothing that a rank's host does can delay a copy, such as loading a kernel, which first
    waits for all streams of the rank.

    The broker serves only processes of its own user. It disconnects a process that sends malformed messages or stops
    reading, and fails the groups of that process; no message can end the broker or make it wait.
    """

    def __init__(self, server: socket.socket) -> None:
        server.setblocking(False)
        self._server = server
        self._flags = Flags()
        self._copies = Copies(self._flags)
        self._groups = GroupRegistry(self._copies)
        self._matcher = Matcher(self._groups, self._copies)
        self._clients: set[Client] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._had_ranks, self._until = False, time.monotonic() + _GRACE
        self._tidied = 0.0
        self._awake_until = 0.0

    def serve(self) -> None:
        """Serve until all ranks have gone, or none has come in time."""
        while self._is_needed():
            for key, events in self._selector.select(0 if self._is_awake() else _TIDY):
                if key.data is None:
                    self._accept()
                else:
                    self._serve_client(key.data, events)
            for _ in range(_POLLS if self._copies.watched else 0):
                for group, why in self._copies.poll():
                    self._groups.fail(group, why)
            if time.monotonic() >= self._tidied + _TIDY:
                self._tidy()
        for client in self._clients:
            client.close()

    def _is_awake(self) -> bool:
        """Return whether to poll without sleeping: waking a process is the largest cost of sending it a message."""
        return bool(self._copies.watched) or time.monotonic() < self._awake_until

    def _is_needed(self) -> bool:
        """Return whether a rank is connected or may still come; clients without a group count only for a while."""
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
        if peer_user(connection) != os.geteuid() or not self._make_place():
            connection.close()
            return
        client = Client(connection, self._selector)
        self._clients.add(client)
        client.send(Greeting(PROTOCOL, None, serves=True).hello, self._flags.file)

    def _make_place(self) -> bool:
        """Return whether another client can be accepted; disconnect the oldest that joined no group if there are too
        many.
        """
        if len(self._clients) < _MOST_CLIENTS:
            return True
        strangers = [client for client in self._clients if not client.has_joined]
        if strangers:
            oldest = min(strangers, key=lambda client: client.since)
            self._disconnect(oldest, "has joined no group, and others want to be let in")
        return bool(strangers)

    def _serve_client(self, client: Client, events: int) -> None:
        """Send to and read from one client; any error disconnects this client only."""
        if client not in self._clients:  # disconnected earlier in this round, for another client
            return
        try:
            if events & selectors.EVENT_WRITE:
                client.send_waiting()
            if events & selectors.EVENT_READ:
                message, file = recv_from_rank(client.connection)
                try:
                    self._dispatch(client, message, file)
                finally:
                    close(file)
        except MalformedMessage as error:
            self._disconnect(client, f"sent {error}")
        except Exception as error:
            self._disconnect(client, f"sent what the broker failed on ({type(error).__name__}: {error!s:.200})")

    def _disconnect(self, client: Client, why: str) -> None:
        self._remove(client, f"was disconnected by the broker: it {why}", Refused(f"it {why}"))

    def _remove(self, client: Client, why: str, last_message: Refused | None = None) -> None:
        """Remove a client that is gone; its groups fail if there is a reason `why`."""
        self._groups.remove(client, why)
        if last_message is not None:
            client.send(last_message)
        if client.has_joined:
            self._had_ranks, self._until = True, time.monotonic() + _GRACE
        client.close()
        self._clients.discard(client)
        self._copies.mappings.forget(client)

    def _dispatch(self, client: Client, message: FromRank | None, file: int) -> None:
        match message:
            case None:
                self._remove(client, "died")
            case Bye():
                self._remove(client, "")
            case Join():
                self._groups.join(client, message)
            case Freed():
                self._copies.mappings.freed(client, message.handle)
            case _:
                group = self._groups.by_name.get(message.group)
                rank = group.rank_of(client) if group is not None else None
                if group is not None and rank is not None:  # otherwise the client has left, or never joined
                    self._dispatch_in(group, rank, message, file)

    def _dispatch_in(
        self, group: GroupState, rank: int, message: Place | Taken | Failed | Leave | SetLink | ShareFate, file: int
    ) -> None:
        if isinstance(message, Leave):
            self._groups.leave(group, rank)
            return
        if isinstance(message, Place | Taken) and message.peer >= group.size:
            raise MalformedMessage(f"a message for rank {message.peer} of a group of {group.size}")
        if isinstance(message, SetLink) and message.model is not None and not message.model.is_possible:
            raise MalformedMessage("a link that no message can pass")
        if isinstance(message, ShareFate):  # also of a group that has failed: then the others do
            self._groups.share_fate(group, message.fate)
            return
        if group.failed:
            return
        match message:
            case Place():
                if message.device >= 0 and len(os.sched_getaffinity(0)) > len(self._clients):
                    self._awake_until = time.monotonic() + _AWAKE
                self._matcher.post(group, rank, message, file)
            case Taken():
                self._matcher.mark_read(group, rank, message)
            case Failed():
                self._groups.fail(group, message.why)
            case SetLink():
                group.model = message.model


def main() -> None:
    """Serve the listening socket whose file number is the first argument."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a message on the host is an open file until it is read
    server = socket.socket(fileno=int(sys.argv[1]))
    Broker(server).serve()


if __name__ == "__main__":
    main()
