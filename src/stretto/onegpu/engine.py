"""A rank's connection to the broker: it joins groups, and a thread handles what the broker sends."""

import atexit
import contextlib
import os
import socket
import threading
from collections.abc import Callable

from stretto.onegpu.allocations import Allocations
from stretto.onegpu.broker import BROKER, connect, start_broker
from stretto.onegpu.errors import GroupError
from stretto.onegpu.member import Member
from stretto.onegpu_broker.flags import BLOCKS
from stretto.onegpu_broker.wire import (
    Bye,
    Failed,
    Freed,
    FromBroker,
    FromRank,
    Here,
    Join,
    Joined,
    Leave,
    Refused,
    Taken,
    close,
    recv_from_broker,
    send_message,
)
from stretto.wire.frames import MalformedMessage
from stretto.wire.greeting import Hello

_ENDING = 5.0  # seconds for a thread to end


class Engine:
    """This process's connection to one broker."""

    _all: dict[str, "Engine"] = {}  # noqa: RUF012

    @classmethod
    def get(cls, address: str) -> "Engine":
        """Return the connection to the broker at this address; connect if there is none."""
        if address not in cls._all:
            cls._all[address] = Engine(address)
            atexit.register(cls._all[address].close)
        return cls._all[address]

    @classmethod
    def any_address(cls) -> str:
        """Return the address of a broker that this process is connected to, or of a new one."""
        return next((address for address, engine in cls._all.items() if not engine.lost), None) or start_broker()

    def __init__(self, address: str) -> None:
        self._connection, self.flags = connect(address)
        self.allocations = Allocations()
        self.changed = threading.Condition()
        """Notified when a message ends or a group fails."""
        self.lost = False
        """Whether the connection is over."""
        self._why_lost = f"this process has left {BROKER}"
        self._members: dict[str, Member] = {}
        self._answers: dict[str, Joined | Failed | None] = {}  # by name of the groups that this process is joining
        self._sending = threading.Lock()
        self._process, self._closing = os.getpid(), threading.Event()
        self.on_close: dict[Callable[[], None], None] = {}
        """Functions that end other threads that use this connection, in order."""
        self._threads = [
            threading.Thread(target=self._listen, name="stretto onegpu", daemon=True),
            threading.Thread(target=self._watch, name="stretto onegpu watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def join(self, name: str, rank: int, size: int, seconds: float) -> Member:
        """Join a group; raise GroupError if that fails or takes longer than `seconds`."""
        with self.changed:
            self._answers[name] = None
            self.send_message(Join(name, rank, size))
            self.changed.wait_for(lambda: self._answers[name] is not None or self.lost, seconds)
            match self._answers.pop(name):
                case Joined() if self.lost:  # it came after all groups were failed
                    why = self._why_lost
                case Joined(first=first) if first + size**2 <= BLOCKS:
                    self._members[name] = member = Member(self, name, rank, size, first, seconds)
                    return member
                case Joined():
                    self._lose(f"{BROKER} failed: it sent a place beyond its board")
                    why = self._why_lost
                case Failed(why=why):
                    pass
                case None:
                    why = self._why_lost if self.lost else f"{BROKER} has not answered for {seconds:g} s"
        self.send_message(Leave(name))  # the broker may have added this rank by now
        raise GroupError(why)

    def leave(self, *names: str) -> None:
        """Leave groups. This process leaves all of them before it tells the broker, which may then use their flags for
        other groups, and fail groups of the same fate.
        """
        with self.changed:
            members = [member for name in names if (member := self._members.pop(name, None))]
        for member in members:
            member.leave()
        for name in names:
            self.send_message(Leave(name))

    def send_message(self, message: FromRank) -> None:
        """Send a message to the broker, ignoring errors."""
        with contextlib.suppress(OSError):
            self.post(message)

    def post(self, message: FromRank, file: int = -1) -> None:
        """Send a message to the broker; raise OSError if that fails though the broker is alive."""
        with self._sending, contextlib.suppress(ConnectionError):  # the listening thread notices a lost connection
            if not self.lost:
                send_message(self._connection, message, file)

    def close(self) -> None:
        """Leave, and end all threads: none may run PyTorch code while the interpreter shuts down."""
        if self._process != os.getpid():  # a forked child
            return
        with self.changed:
            for member in self._members.values():
                member.leave()  # before the broker uses their flags for other groups
            self.send_message(Bye())
            self.lost = True
            on_close, self.on_close = list(self.on_close), {}
        self._closing.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        for end in on_close:
            end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_ENDING)

    @classmethod
    def forget_all(cls) -> None:
        """Drop all connections and groups in a forked child: they are the parent's, which may have held the locks."""
        for engine in cls._all.values():
            engine.lost, engine._why_lost = True, "this process was forked from the rank"
            engine._connection.close()
            engine._sending, engine.changed = threading.Lock(), threading.Condition()
            for member in engine._members.values():
                member.reset_after_fork(engine._why_lost)
        cls._all = {}

    def _listen(self) -> None:
        try:
            message, file = recv_from_broker(self._connection)
            while message is not None:
                try:
                    self._dispatch(message, file)
                finally:
                    close(file)
                if isinstance(message, Here | Taken) and (member := self._members.get(message.group)) is not None:
                    member.post_queued(message.peer, sends=isinstance(message, Taken))
                message, file = recv_from_broker(self._connection)
            self._lose(f"{BROKER} died")
        except MalformedMessage as error:
            self._lose(f"{BROKER} failed: it sent {error}")
        except Exception as error:
            self._lose(f"{BROKER} failed: what it sent could not be read ({error})")
        with self._sending:
            self._connection.close()

    def _dispatch(self, message: FromBroker, file: int) -> None:
        with self.changed:
            match message:
                case Refused():  # the broker has released the streams already
                    self._lose(f"{BROKER} disconnected this process: {message.why}", unblock=False)
                case Hello():
                    raise MalformedMessage("a second hello")
                case Joined() | Failed() if message.group in self._answers:
                    self._answers[message.group] = message
                case Failed() if message.group in self._members:
                    self._members[message.group].fail(message.why, announce=False)
                case Here() if message.group in self._members:
                    self._members[message.group].read(message.peer, message.number, file)
                case Taken() if message.group in self._members:
                    self._members[message.group].mark_taken(message.peer, message.number)
            self.changed.notify_all()

    def _lose(self, why: str, *, unblock: bool = True) -> None:
        """End the connection and fail all groups; the broker may still be alive."""
        with self.changed:
            if self.lost:
                return
            self.lost, self._why_lost = True, why
            self._closing.set()
            for member in list(self._members.values()):
                member.fail(why, announce=False)
                if unblock:  # before a broker that lives uses these flags for other groups
                    member.unblock()
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self.changed.notify_all()

    def _watch(self) -> None:
        while not self._closing.wait(0.1):
            for member in list(self._members.values()):
                member.watch()
            for allocation in self.allocations.take_freed():
                self.send_message(Freed(allocation.handle))


os.register_at_fork(after_in_child=Engine.forget_all)
