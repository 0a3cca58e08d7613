"""What a group returns for messages and for collectives on a stream or in a thread."""

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from stretto.onegpu.member import Member
from stretto.onegpu.messages import Message

_Work: Any = c10d.Work
_ENDING = 5.0  # seconds for a thread to end


class Work(_Work):  # type: ignore[misc]
    """An operation that a group has begun. On a device, `wait` makes the current stream wait, not the host."""

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


class MessageWork(Work):
    """Sends and receives."""

    def __init__(self, member: Member, messages: list[Message], result: list[Tensor]) -> None:
        super().__init__(result)
        self._member, self._messages = member, messages

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        settle(self._member, self._messages)
        return True

    def is_completed(self) -> bool:
        ended = all(message.ended for message in self._messages)
        if any(message.gpu is not None for message in self._messages):
            self._member.check()  # after a failure, flags are up though nothing has arrived
        return ended


class StreamWork(Work):
    """A collective on the group's stream."""

    def __init__(self, member: Member, event: Any, result: list[Tensor]) -> None:
        super().__init__(result)
        self._member, self._event = member, event

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        self._member.check()
        self._event.wait()
        return True

    def is_completed(self) -> bool:
        ended = bool(self._event.query())
        self._member.check()  # after a failure, streams are released though nothing has arrived
        return ended


class ThreadWork(Work):
    """A collective in the group's thread."""

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


def settle(member: Member, messages: Sequence[Message]) -> None:
    """Make the current stream wait for messages on the device, and the host for the others."""
    for message in messages:
        if message.gpu is not None:
            member.check()
            message.wait_on_stream()
        else:
            member.wait(message)


class CombinedWork(Work):
    """Several operations at once."""

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
    """Return the mode in which these tensors can be written: inference mode if any was made in it."""
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else torch.no_grad()


class CollectiveThread:
    """A thread that runs collectives on the host one after the other."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[ThreadWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="stretto onecpu", daemon=True)
        self._thread.start()

    def put(self, work: ThreadWork) -> None:
        self._works.put(work)

    def end(self) -> None:
        """End the thread after its collectives; in a group that this rank has left, they end soon."""
        self._works.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_ENDING)

    def _serve(self) -> None:
        while (work := self._works.get()) is not None:
            work.run()
