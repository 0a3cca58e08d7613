"""A rank's side: it tells the broker where bytes lie, and knows how far its messages have got."""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.broker import driver
from stretto.broker.board import BLOCKS, EVER, RING, Board
from stretto.broker.model import LinkModel
from stretto.broker.wire import (
    Bye,
    Failed,
    Freed,
    FromBroker,
    FromRank,
    Here,
    Join,
    Joined,
    Leave,
    Links,
    MessageError,
    Place,
    Refused,
    Taken,
    Welcome,
    close,
    hear_broker,
    peer_user,
    tell,
)
from stretto.onegpu import memory
from stretto.onegpu.allocations import Allocations

_WINDOW = 64  # messages on the host that a channel's sender may be ahead of its receiver
_GREETING = 60.0  # seconds in which a broker has started
_BROKER = "the broker of this machine's ranks"


class GroupError(RuntimeError):
    """A group cannot go on: a rank is gone, stands still, or wants something else than the others."""


@dataclass(eq=False, slots=True)
class Move:
    """One side of a message."""

    engine: "Engine"
    block: int
    peer: int
    number: int
    sends: bool
    tensor: Tensor
    """Kept until the move has ended."""
    deadline: float
    _ended: bool = False

    def end(self) -> None:
        self._ended = True

    @property
    def ended(self) -> bool:
        if not self._ended and self.tensor.is_cuda:
            board = self.engine.board
            self._ended = board.read(board.done(self.block)) > self.number
        return self._ended

    def hold_back(self) -> None:
        """Whatever comes next on the current stream waits for it."""
        if not self.ended:
            board = self.engine.board
            stream = torch.cuda.current_stream().cuda_stream
            driver.wait_value(stream, board.address(board.done(self.block)), self.number + 1)


class Member:
    """This process's part in a group."""

    def __init__(self, engine: "Engine", name: str, rank: int, size: int, first: int, seconds: float) -> None:
        self._engine, self.name, self.rank, self._size = engine, name, rank, size
        self._first, self._seconds = first, seconds
        self._counts: dict[tuple[int, bool], int] = {}
        self._under_way: deque[Move] = deque()
        self._waiting: dict[tuple[int, bool, int], Move] = {}
        """On the host: by peer, direction and number."""
        self._begin = threading.Lock()
        self.error: str | None = None
        self.turn = 0
        """The collective that messages belong to from now on. Ranks that are at different ones are out of step."""

    def check(self) -> None:
        if self.error is not None:
            raise GroupError(self.error)

    def send(self, tensor: Tensor, peer: int) -> Move:
        """Offer a tensor to a rank."""
        memory.demand_source(tensor)
        return self._moved(memory.plain(tensor), peer, sends=True)

    def receive(self, tensor: Tensor, peer: int) -> Move:
        """Take a tensor from a rank."""
        memory.demand_target(tensor)
        return self._moved(tensor, peer, sends=False)

    def wait(self, move: Move) -> None:
        """Until a move has ended, on the host."""
        with self._engine.changed:
            while not move.ended:
                self.check()
                self._engine.changed.wait(0.05)

    def model_links(self, model: LinkModel | None) -> None:
        self._engine.tell(Links(self.name, model))

    def fail(self, why: str, *, tell: bool = True) -> None:
        """The group cannot go on; the first reason counts."""
        with self._engine.changed:
            if self.error is None:
                self.error = why
                if tell:
                    self._engine.tell(Failed(self.name, why))
            self._engine.changed.notify_all()

    def let_go(self) -> None:
        """Let all streams go on that wait for a message, where the broker cannot."""
        for block in range(self._first, self._first + self._size**2):
            self._engine.board.write(self._engine.board.done(block), EVER)

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
        try:
            memory.read(file, move.tensor)
        except OSError as error:
            self.fail(f"rank {self.rank} could not read message {number} from rank {peer}: {error}")
            return
        self._engine.tell(Taken(self.name, peer, number))
        move.end()

    def taken(self, peer: int, number: int) -> None:
        move = self._waiting.pop((peer, True, number), None)
        if move is not None:
            move.end()

    def _moved(self, tensor: Tensor, peer: int, *, sends: bool) -> Move:
        with self._begin:
            self.check()
            number = self._counts.get((peer, sends), 0)
            source, target = (self.rank, peer) if sends else (peer, self.rank)
            block = self._first + source * self._size + target
            move = Move(self._engine, block, peer, number, sends, tensor, time.monotonic() + self._seconds)
            place = Place(self.name, peer, number, sends, tensor.nbytes, turn=self.turn)
            if tensor.is_cuda:
                self._on_device(move, place)
            else:
                self._on_host(move, place)
            self._counts[peer, sends] = number + 1
            self._keep(move)
        return move

    def _on_device(self, move: Move, place: Place) -> None:
        board, tensor = self._engine.board, move.tensor
        while move.number - board.read(board.done(move.block)) >= RING - 1:
            self.check()
            time.sleep(0.0002)
        place.device = tensor.device.index
        if tensor.nbytes:
            allocation = self._engine.allocations.find(tensor.data_ptr())
            place.handle, place.size = allocation.handle, allocation.size
            place.offset = tensor.data_ptr() - allocation.base
        word = board.address(board.ready(move.block, move.number, sender=move.sends))
        self._engine.tell(place)
        driver.write_value(torch.cuda.current_stream(tensor.device.index).cuda_stream, word, move.number + 1)

    def _on_host(self, move: Move, place: Place) -> None:
        with self._engine.changed:
            while sum(peer == move.peer and sends == move.sends for peer, sends, _ in self._waiting) >= _WINDOW:
                self.check()
                self._engine.changed.wait(0.05)
            self._waiting[move.peer, move.sends, move.number] = move
        file = os.memfd_create("stretto-message") if move.sends else -1
        try:
            if file >= 0:
                memory.write(file, move.tensor)
            self._engine.tell(place, file)
        finally:
            if file >= 0:
                os.close(file)

    def _keep(self, move: Move) -> None:
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
        self._connection, self.board = _connect(address)
        self.allocations = Allocations()
        self.changed = threading.Condition()
        self.lost = False
        self._why_lost = f"this process has left {_BROKER}"
        self._members: dict[str, Member] = {}
        self._answers: dict[str, Joined | Failed | None] = {}  # of groups that this process is about to join
        self._telling = threading.Lock()
        threading.Thread(target=self._listen, name="stretto onegpu", daemon=True).start()
        threading.Thread(target=self._watch, name="stretto onegpu watch", daemon=True).start()

    def join(self, name: str, rank: int, size: int, seconds: float) -> Member:
        """Take part in a group."""
        with self.changed:
            self._answers[name] = None
            self.tell(Join(name, rank, size))
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
        self.tell(Leave(name))  # it may have been let in by now
        raise GroupError(why)

    def leave(self, name: str) -> None:
        with self.changed:
            self._members.pop(name, None)
        self.tell(Leave(name))

    def tell(self, message: FromRank, file: int = -1) -> None:
        with self._telling, contextlib.suppress(OSError):
            tell(self._connection, message, file)

    def close(self) -> None:
        self.lost = True
        self.tell(Bye())

    def _listen(self) -> None:
        try:
            message, file = hear_broker(self._connection)
            while message is not None:
                try:
                    self._act(message, file)
                finally:
                    close(file)
                message, file = hear_broker(self._connection)
            self._lose(f"{_BROKER} died")
        except MessageError as error:
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
                case Welcome():
                    raise MessageError("a second Welcome")
                case Joined() | Failed() if message.group in self._answers:
                    self._answers[message.group] = message
                case Failed() if message.group in self._members:
                    self._members[message.group].fail(message.why, tell=False)
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
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            for member in list(self._members.values()):
                member.fail(why, tell=False)
                if let_go:
                    member.let_go()
            self.changed.notify_all()

    def _watch(self) -> None:
        while not self.lost:
            time.sleep(0.1)
            for member in list(self._members.values()):
                member.watch()
            for allocation in self.allocations.take_freed():
                self.tell(Freed(allocation.handle))


def _connect(address: str) -> tuple[socket.socket, Board]:
    """A connection to a broker of this user, and its board."""
    connection, file = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), -1
    try:
        connection.connect(f"\0{address}")
        if (user := peer_user(connection)) != os.geteuid():
            raise ConnectionError(f"it belongs to user {user}, and this process to user {os.geteuid()}")
        connection.settimeout(_GREETING)
        message, file = hear_broker(connection)
        connection.settimeout(None)
        if not isinstance(message, Welcome):
            raise ConnectionError("it does not answer")
        return connection, Board(file)
    except (OSError, ValueError) as error:
        connection.close()
        close(file)
        sent = "it sent " if isinstance(error, MessageError) else ""
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
        [sys.executable, "-m", "stretto.broker.serve", str(server.fileno())],
        pass_fds=[server.fileno()],
        env=environment,
        start_new_session=True,  # a Ctrl-C is for the ranks; it goes when they have
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # whoever reads what the ranks print must not wait for it
        stderr=subprocess.DEVNULL,
    )
    server.close()
    return address
