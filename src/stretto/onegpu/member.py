"""This process's membership in one group: it posts messages to the broker and tracks them."""

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

from stretto import cuda
from stretto.onegpu import memory
from stretto.onegpu.errors import GroupError
from stretto.onegpu.messages import Message, current_stream
from stretto.onegpu_broker.flags import EVER, RING
from stretto.onegpu_broker.link_model import SimulatedLink
from stretto.onegpu_broker.wire import Failed, Place, SetLink, ShareFate, Taken, close

if TYPE_CHECKING:
    from stretto.onegpu.engine import Engine

_NEWS = 5.0  # seconds for the broker's reason of a failure to come
_WINDOW = 64  # messages on the host that one side of a channel may be ahead of the other


class Member:
    def __init__(self, engine: "Engine", name: str, rank: int, size: int, first: int, seconds: float) -> None:
        """`first` is the group's first block of flags; a message may take `seconds`."""
        self._engine, self.name, self.rank, self._size = engine, name, rank, size
        self._first, self._seconds = first, seconds
        self._counts: dict[tuple[int, bool], int] = {}
        self._in_progress: deque[Message] = deque()
        self._posted: dict[tuple[int, bool, int], Message] = {}
        """Messages on the host that the broker knows, by peer, direction and number."""
        self._queued: dict[tuple[int, bool], deque[tuple[Message, Place]]] = {}
        """Messages on the host that wait until fewer are posted, by peer and direction."""
        self._ahead: dict[tuple[int, bool], int] = {}
        """How many messages on the host are posted, by peer and direction."""
        self._posting = threading.Lock()
        self.error: str | None = None
        self.turn = 0
        """The collective that new messages belong to. Ranks at different collectives are out of step."""

    def check(self) -> None:
        """Raise GroupError if the group has failed: then its messages have ended, though nothing has arrived."""
        if self.error is None and self._engine.flags.arrived(self._first) == EVER:
            with self._engine.changed:  # streams are released sooner than this process has read why
                self._engine.changed.wait_for(lambda: self.error is not None, _NEWS)
            self.fail("the broker has ended this group", announce=False)
        self._raise_error()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise GroupError(self.error)

    def send(self, tensor: Tensor, peer: int) -> Message:
        memory.validate_source(tensor)
        return self._start(memory.plain(tensor), peer, sends=True)

    def receive(self, tensor: Tensor, peer: int) -> Message:
        memory.validate_target(tensor)
        return self._start(tensor, peer, sends=False)

    def wait(self, message: Message) -> None:
        """Wait on the host until a message has ended."""
        with self._engine.changed:
            while not message.ended:
                self._raise_error()  # flags end no message on the host
                self._engine.changed.wait(0.05)

    def model_links(self, model: SimulatedLink | None) -> None:
        self._engine.send_message(SetLink(self.name, model))

    def share_fate(self, fate: str) -> None:
        """Fail as soon as another group of this fate does."""
        self._engine.send_message(ShareFate(self.name, fate))

    def fail(self, why: str, *, announce: bool = True) -> None:
        """Fail the group; the first reason counts."""
        with self._engine.changed:
            if self.error is None:
                self.error = why
                if announce:
                    self._engine.send_message(Failed(self.name, why))
            self._engine.changed.notify_all()

    def leave(self) -> None:
        """End all messages of this member with an error."""
        self.fail(f"rank {self.rank} has left this group", announce=False)

    def unblock(self) -> None:
        """Release all streams that wait for a message of this group, where the broker cannot."""
        for block in range(self._first, self._first + self._size**2):
            self._engine.flags.write(self._engine.flags.done(block), EVER)

    def reset_after_fork(self, why: str) -> None:
        """Fail without telling others, in a forked child; the parent may have held the lock."""
        self._posting = threading.Lock()
        self.error = self.error or why

    def watch(self) -> None:
        """Forget messages that have ended, and fail if one has taken too long."""
        now = time.monotonic()
        with self._engine.changed:
            self._in_progress = deque(message for message in self._in_progress if not message.ended)
        for message in list(self._in_progress):
            if self.error is None and now > message.deadline and not message.ended:
                verb = "take" if message.sends else "send"
                self.fail(
                    f"rank {self.rank} has waited {self._seconds:g} s for rank {message.peer} to {verb} "
                    f"message {message.number}"
                )

    def read(self, peer: int, number: int, file: int) -> None:
        """Read a message on the host from its file."""
        message = self._posted.pop((peer, False, number), None)
        if message is None:
            return
        self._ahead[peer, False] -= 1
        assert message.tensor is not None
        try:
            memory.read(file, message.tensor)
        except OSError as error:
            self.fail(f"rank {self.rank} could not read message {number} from rank {peer}: {error}")
            return
        self._engine.send_message(Taken(self.name, peer, number))
        message.end()

    def mark_taken(self, peer: int, number: int) -> None:
        """End a message on the host that its receiver has read."""
        message = self._posted.pop((peer, True, number), None)
        if message is not None:
            self._ahead[peer, True] -= 1
            message.end()

    def post_queued(self, peer: int, *, sends: bool) -> None:
        """Post queued messages after another one has ended."""
        with self._posting:
            self._post_queued(peer, sends=sends)

    def _start(self, tensor: Tensor, peer: int, *, sends: bool) -> Message:
        self.check()
        while (message := self._try_start(tensor, peer, sends=sends)) is None:
            time.sleep(0.0002)
            self.check()
        return message

    def _try_start(self, tensor: Tensor, peer: int, *, sends: bool) -> Message | None:
        """Start a message; return None while the flags of its channel are all in use."""
        flags = self._engine.flags
        with self._posting:  # which the thread that hears of failures takes too
            self._raise_error()
            number = self._counts.get((peer, sends), 0)
            source, target = (self.rank, peer) if sends else (peer, self.rank)
            block = self._first + source * self._size + target
            if tensor.is_cuda and number - flags.arrived(block) >= RING - 1:
                return None
            gpu = tensor.device.index if tensor.is_cuda else None
            stream = 0 if gpu is None else current_stream(gpu)
            message = Message(self._engine, block, peer, number, sends, tensor, gpu, stream)
            place = Place(self.name, peer, number, sends, tensor.nbytes, turn=self.turn)
            if tensor.is_cuda:
                message.deadline = time.monotonic() + self._seconds
                self._post_on_device(message, place, tensor)
            else:
                self._queued.setdefault((peer, sends), deque()).append((message, place))
                self._post_queued(peer, sends=sends)
            self._counts[peer, sends] = number + 1
            self._track(message)
            self._raise_error()
        return message

    def _post_on_device(self, message: Message, place: Place, tensor: Tensor) -> None:
        """Post one side of a message, and raise its flag when the current stream gets there."""
        flags = self._engine.flags
        place.device = tensor.device.index
        if tensor.nbytes:
            allocation = self._engine.allocations.find(tensor.data_ptr())
            place.handle, place.size = allocation.handle, allocation.size
            place.offset = tensor.data_ptr() - allocation.base
        word = flags.address(flags.ready(message.block, message.number, sender=message.sends))
        self._post(place)
        cuda.write_value(message.stream, word, message.number + 1)

    def _post_queued(self, peer: int, *, sends: bool) -> None:
        """Post queued messages on the host in order, at most `_WINDOW` ahead of the other side."""
        queued = self._queued.get((peer, sends), ())
        while queued and self._ahead.get((peer, sends), 0) < _WINDOW and self.error is None:
            message, place = queued.popleft()
            with self._engine.changed:
                message.deadline = time.monotonic() + self._seconds
                self._ahead[peer, sends] = self._ahead.get((peer, sends), 0) + 1
                self._posted[peer, sends, message.number] = message
            self._post(place, message.tensor)

    def _post(self, place: Place, tensor: Tensor | None = None) -> None:
        """Post one side of a message to the broker. If that fails, fail the group: its sides would be out of step."""
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

    def _track(self, message: Message) -> None:
        """Keep a message in progress alive, and forget those at the front that have ended."""
        with self._engine.changed:
            while self._in_progress and self._in_progress[0].ended:
                self._in_progress.popleft()
            self._in_progress.append(message)
