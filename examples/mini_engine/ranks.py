"""The ranks of an engine: each a shard with a receiver of its own; rank 1 is a process that follows rank 0."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from mini_engine.gate import Gate
from mini_engine.model import Config, checkpoint, entries
from mini_engine.shard import BeforeLoad, Shard, Sum
from stretto.ir.errors import WeightsError
from stretto.weights.messages import InFlight
from stretto.weights.receive.receiver import Receiver
from stretto.weights.receive.state import Hooks

_SECONDS = 60.0  # for a rank to start, or to answer another


@dataclass(frozen=True, slots=True)
class Options:
    """What every rank is made of."""

    address: str
    config: Config
    tp: int
    seed: int
    device: str
    before_load: BeforeLoad
    flushes: bool


def addresses(address: str, tp: int) -> list[str]:
    """Where the ranks take new weights."""
    return [address] if tp == 1 else [f"{address}-{rank}" for rank in range(tp)]


class Other:
    """Rank 1's process, as rank 0 sees it: does what it is asked, and asks to pause and to resume."""

    def __init__(self, options: Options, gate: Gate, ended: threading.Event, meeting: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._asking, asked = context.Pipe()
        self._hooks, hooks = context.Pipe()
        self._meeting = meeting
        self._process = context.Process(target=_follow, args=(options, asked, hooks, self._meeting), daemon=True)
        self._process.start()
        asked.close()
        hooks.close()
        self._add: Sum | None = None
        threading.Thread(target=self._relay, args=(gate, ended), daemon=True).start()

    def await_ready(self) -> None:
        try:
            self._add = _summing(0, self._meeting)
            self._answer()
        except (OSError, EOFError, RuntimeError) as error:
            raise WeightsError(f"rank 1 did not start: {error}") from None

    def add(self, tensor: Tensor) -> Tensor:
        assert self._add is not None
        return self._add(tensor)

    @contextmanager
    def asked(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What it is asked it does at the same time as the caller; its answer is there afterwards."""
        answer: dict[str, Any] = {}
        self._asking.send_bytes(json.dumps(message).encode())
        yield answer
        answer |= self._answer()

    def _answer(self) -> dict[str, Any]:
        if not self._asking.poll(_SECONDS):
            self._process.kill()
            raise TimeoutError(f"no answer for {_SECONDS:g} s")
        answer: dict[str, Any] = json.loads(self._asking.recv_bytes())
        return answer

    def _relay(self, gate: Gate, ended: threading.Event) -> None:
        while True:
            try:
                asked = json.loads(self._hooks.recv_bytes())
            except (OSError, EOFError):
                return ended.set()
            error = ""
            try:
                gate.resume(1) if asked == "resume" else gate.pause(1, asked)
            except WeightsError as failed:
                error = str(failed)
            try:
                self._hooks.send_bytes(json.dumps(error).encode())
            except OSError:
                return ended.set()

    def close(self) -> None:
        self._asking.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()


def _follow(options: Options, asked: Connection, hooks: Connection, meeting: str) -> None:
    """Rank 1's process. It ends at once: gloo's threads do not outlive an interpreter that takes its time."""
    try:
        _following(options, asked, hooks, meeting)
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _following(options: Options, asked: Connection, hooks: Connection, meeting: str) -> None:
    """Until rank 0 leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it too, and ends this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(1)

    def tell(what: str) -> None:
        hooks.send_bytes(json.dumps(what).encode())
        if error := json.loads(hooks.recv_bytes()):
            raise WeightsError(error)

    shard = shard_of(options, 1, _summing(1, meeting))
    with receiver_of(
        options, 1, shard, lambda _, in_flight: tell(in_flight), lambda _: tell("resume")
    ).start() as receiver:
        asked.send_bytes(b"{}")
        while True:
            try:
                message = json.loads(asked.recv_bytes())
                if "tokens" in message:
                    shard.following(message["tokens"])
                asked.send_bytes(json.dumps(status_of(receiver)).encode())
            except (OSError, EOFError):
                return


def shard_of(options: Options, rank: int, add: Sum) -> Shard:
    device = options.device
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
    shard = Shard(options.config, rank=rank, ranks=options.tp, device=device, add=add)
    shard.load(list(checkpoint(options.config, options.seed).items()))
    shard.finish()
    shard.before_load = options.before_load
    return shard


def receiver_of(
    options: Options,
    rank: int,
    shard: Shard,
    pause: Callable[[int, InFlight], None],
    resume: Callable[[int], None],
) -> Receiver:
    hooks = Hooks(
        pause=lambda in_flight: pause(rank, in_flight),
        begin=shard.begin,
        finish=shard.finish,
        flush_cache=shard.flush if options.flushes else lambda: None,
        resume=lambda: resume(rank),
    )
    return Receiver(
        addresses(options.address, options.tp)[rank],
        load=shard.load,
        retains=True,  # views are kept until a layer is complete
        hooks=hooks,
        expects=entries(options.config),
        version=f"seed-{options.seed}",
        device=shard.embed.device,
    )


def _summing(rank: int, meeting: str) -> Sum:
    """Over gloo on loopback, in a group of its own, so that a process may have others."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=_SECONDS)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = dist.FileStore(str(Path(meeting) / "ranks"), 2)
    store.set_timeout(options._timeout)
    group = dist.ProcessGroupGloo(store, rank, 2, options)

    def add(tensor: Tensor) -> Tensor:
        host = tensor.cpu()
        group.allreduce([host]).wait()
        return host.to(tensor.device)

    return add


def status_of(receiver: Receiver) -> dict[str, Any]:
    status: dict[str, Any] = msgspec.to_builtins(receiver.status)
    return status
