"""A rank's side: it tells the broker where bytes lie, and knows how far its messages have got."""

import atexit
import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto import cuda
from stretto.onegpu import memory
from stretto.onegpu.allocations import Allocations
from stretto.onegpu_broker.flags import BLOCKS, EVER, RING, Flags
from stretto.onegpu_broker.link_model import SimulatedLink
from stretto.onegpu_broker.wire import (
    PROTOCOL,
    Bye,
    Failed,
    Freed,
    FromBroker,
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
    recv_from_broker,
    send_message,
)
from stretto.wire.frames import MalformedMessage
from stretto.wire.greeting import Greeting, Hello
from stretto.wire.peers import peer_user

_WINDOW = 64  # messages on the host that a channel's sender may be ahead of its receiver
_GREETING = 60.0  # seconds in which a broker has started
_ENDING = 5.0  # seconds in which a thread has ended
_BROKER = "the broker of this machine's ranks"


class GroupError(RuntimeError):
    """A group cannot go on: a rank is gone, stands still, or wants something else than the others."""


@dataclass(eq=False, slots=True)
class Message:
    """One side of a message."""

    engine: "Engine"
    block: int
    peer: int
    number: int
    sends: bool
    tensor: Tensor
    """Kept until the move has ended."""
    deadline: float = math.inf
    """From when the broker is told of it."""
    _ended: bool = False

    def end(self) -> None:
        self._ended = True

    @property
    def ended(self) -> bool:
        if not self._ended and self.tensor.is_cuda:
            flags = self.engine.flags
            self._ended = flags.read(flags.done(self.block)) > self.number
        return self._ended

    def hold_back(self) -> None:
        """Whatever comes next on the current stream waits for it."""
        if not self.ended:
            flags = self.engine.flags
            cuda.wait_value(_stream(self.tensor), flags.address(flags.done(self.block)), self.number + 1)


class Member:
    """This process's part in a group."""

    def __init__(self, engine: "Engine", name: str, rank: int, size: int, first: int, seconds: float) -> None:
        self._engine, self.name, self.rank, self._size = engine, name, rank, size
        self._first, self._seconds = first, seconds
        self._counts: dict[tuple[int, bool], int] = {}
        self._under_way: deque[Message] = deque()
        self._waiting: dict[tuple[int, bool, int], Message] = {}
        """On the host: by peer, direction and number."""
        self._later: dict[tuple[int, bool], deque[tuple[Message, Place]]] = {}
        """On the host: messages that wait until fewer are under way."""
        self._ahead: dict[tuple[int, bool], int] = {}
        self._begin = threading.Lock()
        self.error: str | None = None
        self.turn = 0
        """The collective that messages belong to from now on. Ranks that are at different ones are out of step."""

    def check(self) -> None:
        if self.error is not None:
            raise GroupError(self.error)

    def send(self, tensor: Tensor, peer: int) -> Message:
        """Offer a tensor to a rank."""
        memory.demand_source(tensor)
        return self._moved(memory.plain(tensor), peer, sends=True)

    def receive(self, tensor: Tensor, peer: int) -> Message:
        """Take a tensor from a rank."""
        memory.demand_target(tensor)
        return self._moved(tensor, peer, sends=False)

    def wait(self, move: Message) -> None:
        """Until a move has ended, on the host."""
        with self._engine.changed:
            while not move.ended:
                self.check()
                self._engine.changed.wait(0.05)

    def model_links(self, model: SimulatedLink | None) -> None:
        self._engine.send_message(SetLink(self.name, model))

    def fail(self, why: str, *, announce: bool = True) -> None:
        """The group cannot go on; the first reason counts."""
        with self._engine.changed:
            if self.error is None:
                self.error = why
                if announce:
                    self._engine.send_message(Failed(self.name, why))
            self._engine.changed.notify_all()

    def leave(self) -> None:
        """Nothing of this member goes on."""
        self.fail(f"rank {self.rank} has left this group", announce=False)

    def let_go(self) -> None:
        """Let all streams go on that wait for a message, where the broker cannot."""
        for block in range(self._first, self._first + self._size**2):
            self._engine.flags.write(self._engine.flags.done(block), EVER)

    def watch(self) -> None:
        """Let go of what has ended, and give up on what has taken too long."""
        now = time.monotonic()
        with self._engine.changed:
            self._under_way = deque(move for move in self._under_way if not move.ended)
        for move in list(self._under_way):
            if self.error is None and now > move.deadline and not move.ended:
                verb = "take" if move.sends else "send"
                self.fail(
                    f"rank {self.rank} has waited {self._seconds:g} s for rank {move.peer} to {verb} "
                    f"message {move.number}"
                )

    def here(self, peer: int, number: int, file: int) -> None:
        """What a receive waits for lies in a file."""
        move = self._waiting.pop((peer, False, number), None)
        if move is None:
            return
        self._ahead[peer, False] -= 1
        try:
            memory.read(file, move.tensor)
        except OSError as error:
            self.fail(f"rank {self.rank} could not read message {number} from rank {peer}: {error}")
            return
        self._engine.send_message(Taken(self.name, peer, number))
        move.end()

    def taken(self, peer: int, number: int) -> None:
        move = self._waiting.pop((peer, True, number), None)
        if move is not None:
            self._ahead[peer, True] -= 1
            move.end()

    def _moved(self, tensor: Tensor, peer: int, *, sends: bool) -> Message:
        while (move := self._begun(tensor, peer, sends=sends)) is None:
            time.sleep(0.0002)
        return move

    def _begun(self, tensor: Tensor, peer: int, *, sends: bool) -> Message | None:
        """None while the board has no room for more messages on the device."""
        flags = self._engine.flags
        with self._begin:
            self.check()
            number = self._counts.get((peer, sends), 0)
            source, target = (self.rank, peer) if sends else (peer, self.rank)
            block = self._first + source * self._size + target
            if tensor.is_cuda and number - flags.read(flags.done(block)) >= RING - 1:
                return None
            move = Message(self._engine, block, peer, number, sends, tensor)
            place = Place(self.name, peer, number, sends, tensor.nbytes, turn=self.turn)
            if tensor.is_cuda:
                move.deadline = time.monotonic() + self._seconds
                self._on_device(move, place)
            else:
                self._later.setdefault((peer, sends), deque()).append((move, place))
                self._post_later(peer, sends=sends)
            self._counts[peer, sends] = number + 1
            self._keep(move)
            self.check()
        return move

    def _on_device(self, move: Message, place: Place) -> None:
        flags, tensor = self._engine.flags, move.tensor
        place.device = tensor.device.index
        if tensor.nbytes:
            allocation = self._engine.allocations.find(tensor.data_ptr())
            place.handle, place.size = allocation.handle, allocation.size
            place.offset = tensor.data_ptr() - allocation.base
        word = flags.address(flags.ready(move.block, move.number, sender=move.sends))
        self._hand_over(place)
        cuda.write_value(_stream(tensor), word, move.number + 1)

    def post_later(self, peer: int, *, sends: bool) -> None:
        """A message has ended: there is room for another."""
        with self._begin:
            self._post_later(peer, sends=sends)

    def _post_later(self, peer: int, *, sends: bool) -> None:
        """Messages on the host, in their order, as many as may be ahead of the other side."""
        later = self._later.get((peer, sends), ())
        while later and self._ahead.get((peer, sends), 0) < _WINDOW and self.error is None:
            move, place = later.popleft()
            with self._engine.changed:
                move.deadline = time.monotonic() + self._seconds
                self._ahead[peer, sends] = self._ahead.get((peer, sends), 0) + 1
                self._waiting[peer, sends, move.number] = move
            self._hand_over(place, move.tensor)

    def _hand_over(self, place: Place, tensor: Tensor | None = None) -> None:
        """Tell the broker of one side of a message; what it never hears of would put the two sides out of step."""
        file = -1
        try:
            if place.sends and tensor is not None:
                file = os.memfd_create("stretto-message")
                memory.write(file, tensor)
            self._engine.post(place, file)
        except OSError as error:
            self.fail(
                f"rank {self.rank} could not hand message {place.number} for rank {place.peer} to the broker: {error}"
            )
        finally:
            close(file)

    def _keep(self, move: Message) -> None:
        """Hold on to what is under way, and let go of what is not."""
        with self._engine.changed:
            while self._under_way and self._under_way[0].ended:
                self._under_way.popleft()
            self._under_way.append(move)


class Engine:
    """This process's connection to a broker."""

    _all: dict[str, "Engine"] = {}  # noqa: RUF012

    @classmethod
    def get(cls, address: str) -> "Engine":
        """The one with the broker at this address."""
        if address not in cls._all:
            cls._all[address] = Engine(address)
            atexit.register(cls._all[address].close)
        return cls._all[address]

    @classmethod
    def any_address(cls) -> str:
        """Of a broker that this process knows; of a new one if it knows none."""
        return next((address for address, engine in cls._all.items() if not engine.lost), None) or _start_broker()

    def __init__(self, address: str) -> None:
        self._connection, self.flags = _connect(address)
        self.allocations = Allocations()
        self.changed = threading.Condition()
        self.lost = False
        self._why_lost = f"this process has left {_BROKER}"
        self._members: dict[str, Member] = {}
        self._answers: dict[str, Joined | Failed | None] = {}  # of groups that this process is about to join
        self._telling = threading.Lock()
        self._process, self._closing = os.getpid(), threading.Event()
        self.enders: dict[Callable[[], None], None] = {}
        """What ends other threads that use this connection."""
        self._threads = [
            threading.Thread(target=self._listen, name="stretto onegpu", daemon=True),
            threading.Thread(target=self._watch, name="stretto onegpu watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def join(self, name: str, rank: int, size: int, seconds: float) -> Member:
        """Take part in a group."""
        with self.changed:
            self._answers[name] = None
            self.send_message(Join(name, rank, size))
            self.changed.wait_for(lambda: self._answers[name] is not None or self.lost, seconds)
            match self._answers.pop(name):
                case Joined(first=first) if first + size**2 <= BLOCKS:
                    self._members[name] = member = Member(self, name, rank, size, first, seconds)
                    return member
                case Joined():
                    self._lose(f"{_BROKER} failed: it sent a place beyond its board")
                    why = self._why_lost
                case Failed(why=why):
                    pass
                case None:
                    why = self._why_lost if self.lost else f"{_BROKER} has not answered for {seconds:g} s"
        self.send_message(Leave(name))  # it may have been let in by now
        raise GroupError(why)

    def leave(self, name: str) -> None:
        with self.changed:
            member = self._members.pop(name, None)
        self.send_message(Leave(name))
        if member is not None:
            member.leave()

    def send_message(self, message: FromRank) -> None:
        with contextlib.suppress(OSError):
            self.post(message)

    def post(self, message: FromRank, file: int = -1) -> None:
        """Raises if a broker that lives cannot be told."""
        with self._telling, contextlib.suppress(ConnectionError):  # which the listener notices
            if not self.lost:
                send_message(self._connection, message, file)

    def close(self) -> None:
        """Leave, and end all threads: PyTorch's code must not be running when the interpreter is taken down."""
        if self._process != os.getpid():  # a forked child
            return
        self.send_message(Bye())
        with self.changed:
            self.lost = True
            for member in self._members.values():
                member.leave()
            enders, self.enders = list(self.enders), {}
        self._closing.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        for end in enders:
            end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_ENDING)

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child: the connections and groups are its parent's, and locks may have been held there."""
        for engine in cls._all.values():
            engine.lost, engine._why_lost = True, "this process was forked from the rank"
            engine._connection.close()
            engine._telling, engine.changed = threading.Lock(), threading.Condition()
            for member in engine._members.values():
                member._begin = threading.Lock()
                member.error = member.error or engine._why_lost
        cls._all = {}

    def _listen(self) -> None:
        try:
            message, file = recv_from_broker(self._connection)
            while message is not None:
                try:
                    self._act(message, file)
                finally:
                    close(file)
                if isinstance(message, Here | Taken) and (member := self._members.get(message.group)) is not None:
                    member.post_later(message.peer, sends=isinstance(message, Taken))
                message, file = recv_from_broker(self._connection)
            self._lose(f"{_BROKER} died")
        except MalformedMessage as error:
            self._lose(f"{_BROKER} failed: it sent {error}")
        except Exception as error:
            self._lose(f"{_BROKER} failed: what it sent could not be read ({error})")
        with self._telling:
            self._connection.close()

    def _act(self, message: FromBroker, file: int) -> None:
        with self.changed:
            match message:
                case Refused():
                    self._lose(f"{_BROKER} disconnected this process: {message.why}", let_go=False)  # it has done so
                case Hello():
                    raise MalformedMessage("a second hello")
                case Joined() | Failed() if message.group in self._answers:
                    self._answers[message.group] = message
                case Failed() if message.group in self._members:
                    self._members[message.group].fail(message.why, announce=False)
                case Here() if message.group in self._members:
                    self._members[message.group].here(message.peer, message.number, file)
                case Taken() if message.group in self._members:
                    self._members[message.group].taken(message.peer, message.number)
            self.changed.notify_all()

    def _lose(self, why: str, *, let_go: bool = True) -> None:
        """Go on without a broker, which may still live."""
        with self.changed:
            if self.lost:
                return
            self.lost, self._why_lost = True, why
            self._closing.set()
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            for member in list(self._members.values()):
                member.fail(why, announce=False)
                if let_go:
                    member.let_go()
            self.changed.notify_all()

    def _watch(self) -> None:
        while not self._closing.wait(0.1):
            for member in list(self._members.values()):
                member.watch()
            for allocation in self.allocations.take_freed():
                self.send_message(Freed(allocation.handle))


os.register_at_fork(after_in_child=Engine.forget_all)


def _stream(tensor: Tensor) -> int:
    """The current stream of a tensor's device, for the driver: without an object for it, which takes longer."""
    return int(torch._C._cuda_getCurrentRawStream(tensor.device.index))


def _connect(address: str) -> tuple[socket.socket, Flags]:
    """A connection to a broker of this user, and its board."""
    connection, file = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), -1
    try:
        connection.connect(f"\0{address}")
        if (user := peer_user(connection)) != os.geteuid():
            raise ConnectionError(f"it belongs to user {user}, and this process to user {os.geteuid()}")
        connection.settimeout(_GREETING)
        message, file = recv_from_broker(connection)
        connection.settimeout(None)
        if message is None:
            raise ConnectionError("it does not answer")
        Greeting(PROTOCOL, None, serves=False).meet(message)
        return connection, Flags(file)
    except (OSError, ValueError) as error:
        connection.close()
        close(file)
        sent = "it sent " if isinstance(error, MalformedMessage) else ""
        raise GroupError(f"{_BROKER} cannot be used: {sent}{error}") from None


def _start_broker() -> str:
    """A broker of its own process, which ends when its last rank does; its address is a name in the kernel."""
    address = f"stretto-{uuid.uuid4().hex}"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(f"\0{address}")
    server.listen(64)
    # It has a share of the device of its own, whatever that of the ranks is, and as many queues as there are.
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    subprocess.Popen(
        [sys.executable, "-m", "stretto.onegpu_broker.serve", str(server.fileno())],
        pass_fds=[server.fileno()],
        env=environment,
        start_new_session=True,  # a Ctrl-C is for the ranks; it goes when they have
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # whoever reads what the ranks print must not wait for it
        stderr=subprocess.DEVNULL,
    )
    server.close()
    return address
