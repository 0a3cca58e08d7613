"""Runs collectives that reduce: on a stream of the group for device tensors, in a thread for host tensors."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto.ir.errors import named
from stretto.onegpu import memory
from stretto.onegpu.engine import Engine
from stretto.onegpu.member import Member
from stretto.onegpu.work import CollectiveThread, StreamWork, ThreadWork, Work, updating

_cuda: Any = torch.cuda


class Runner:
    """The stream and the thread of one group; each is created at its first use."""

    def __init__(self, engine: Engine, member: Member) -> None:
        self._engine, self._member = engine, member
        self._stream: Any = None
        self._held: deque[tuple[Any, object]] = deque()
        """Functions on the stream, each with the event that ends it."""
        self._thread: CollectiveThread | None = None

    def start(self, run: Callable[[], None], result: list[Tensor], *, turn: int) -> Work:
        """Run a collective behind the work on the current stream, or in the thread; an error fails the group."""
        member, like = self._member, result[0]
        member.check()
        for tensor in result:
            memory.validate_source(tensor)

        def run_whole() -> None:
            member.turn = turn
            try:
                with updating(result):
                    run()
            except BaseException as error:
                member.fail(f"rank {member.rank} failed within collective {turn}: {named(error)}")
                raise

        if not like.is_cuda:
            if self._thread is None:
                self._thread = CollectiveThread()
                self._engine.on_close[self._thread.end] = None
            work = ThreadWork(run_whole, result)
            self._thread.put(work)
            return work
        with torch.cuda.device(like.device):
            if self._stream is None:
                self._stream = _cuda.Stream(priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run_whole()
                event = _cuda.Event()
                event.record()
            self._held.append((event, run))  # keeps its tensors alive until the device has finished
            while self._held[0][0].query() and len(self._held) > 1:
                self._held.popleft()
        return StreamWork(member, event, result)

    def close(self) -> None:
        if self._thread is not None:
            self._engine.on_close.pop(self._thread.end, None)
            self._thread.end()
