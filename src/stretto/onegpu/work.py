"""What a group has begun: moves between ranks, and collectives on a stream or in a thread."""

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from stretto.onegpu.engine import Member, Message

_Work: Any = c10d.Work
_ENDING = 5.0  # seconds in which a thread has ended


class Work(_Work):  # type: ignore[misc]
    """What a group has begun. On a device, `wait` lets the current stream wait, and the host goes on."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self._result = result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future

    def result(self) -> list[Tensor]:
        return self._result


class Moves(Work):
    """Sends and receives."""

    def __init__(self, member: Member, moves: list[Message], result: list[Tensor]) -> None:
        super().__init__(result)
        self._member, self._moves = member, moves

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        settle(self._member, self._moves)
        return True

    def is_completed(self) -> bool:
        if any(move.tensor.is_cuda for move in self._moves):
            self._member.check()  # where streams were let go, nothing has arrived
        return all(move.ended for move in self._moves)


class OnStream(Work):
    """A collective on the group's own stream."""

    def __init__(self, member: Member, event: Any, result: list[Tensor]) -> None:
        super().__init__(result)
        self._member, self._event = member, event

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        self._member.check()
        self._event.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


class InThread(Work):
    """A collective in the group's own thread."""

    def __init__(self, run: Callable[[], None], result: list[Tensor]) -> None:
        super().__init__(result)
        self._run, self._ended = run, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()


def settle(member: Member, moves: Sequence[Message]) -> None:
    """Go no further, on the current stream or on the host, until the moves have ended."""
    for move in moves:
        if move.tensor.is_cuda:
            member.check()
            move.hold_back()
        else:
            member.wait(move)


class All(Work):
    """Several at once."""

    def __init__(self, works: list[Any], result: list[Tensor]) -> None:
        super().__init__(result)
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def updating(tensors: Sequence[Tensor]) -> Any:
    """The mode in which these can be written to: those of inference mode only within it."""
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else torch.no_grad()


class Server:
    """A thread that runs collectives one after the other."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[InThread | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="stretto onecpu", daemon=True)
        self._thread.start()

    def put(self, work: InThread) -> None:
        self._works.put(work)

    def end(self) -> None:
        """Once what was put has ended; nothing of a group that this rank has left takes long."""
        self._works.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_ENDING)

    def _serve(self) -> None:
        while (work := self._works.get()) is not None:
            work.run()
