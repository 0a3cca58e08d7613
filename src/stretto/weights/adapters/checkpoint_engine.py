"""Unmodified workers of checkpoint-engine (0.4 or later) as receivers, over their own wire."""

import contextlib
import importlib
import logging
import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from stretto.ir.errors import WeightsError
from stretto.weights.adapters import Asked, Http
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.messages import Assurance, InFlight
from stretto.weights.send.endpoint import Offer, Wanted
from stretto.wire.memory import demand_sealed

log = logging.getLogger(__name__)
_STEP = 0.1  # seconds between two looks at what else may have ended a wait
_FAREWELL = 1.0  # seconds in which a worker can be told to stop

Request = Callable[[list[tuple[str, str]]], object]
"""Makes an engine call `update_weights_from_ipc` with these sockets by device, and returns when that has returned."""


def vllm_request(base_url: str, *, seconds: float = 3600.0, key: str | None = None) -> Request:
    """By vLLM's HTTP side, of a server with VllmColocateWorkerExtension and VLLM_SERVER_DEV_MODE=1."""
    server = Http(base_url, key=key)

    def ask(sockets: list[tuple[str, str]]) -> object:
        body = {"method": "update_weights_from_ipc", "args": [dict(sockets)], "timeout": seconds}
        return server.post("/collective_rpc", body, seconds=seconds)

    return ask


class CheckpointEngineWorkers:
    """The worker on one device, as an endpoint.

    An engine on several devices has one of these in each sender. All are given the UUIDs of all `devices`; one is given
    the `request`, the others None. Each push opens all of them, so that they agree on the number in the sockets' names.

    What such workers cannot do, whoever feeds them:
    - Their receive has no deadline. A sender that is killed leaves them waiting until their engine is restarted. One
      that gives up tells them to stop, which they do once they are done with the bucket they have.
    - They load in place and know no state. An update that failed leaves mixed weights, and nothing keeps the engine
      from serving them but a server that stays paused (see `Served`). The next whole push repairs them.
    - They know no sums, and do not say which names they took: a push is always unaccounted.
    - Two of them cannot share a device: the address is made of its UUID.

    Their wire is pickle. We only ever send pickles: an answer is bytes, none or the text of an error. The socket has no
    file and so no permissions; only our user and root are let in. Never run against an engine: only against the
    package's own worker function.
    """

    def __init__(
        self, uuid: str, request: Request | None, *, devices: Sequence[str] = (), device: str | None = None
    ) -> None:
        """`device` is "cpu" for a worker that was made to run there, as in tests."""
        self.name, self.device = f"checkpoint-engine worker on {uuid}", device or uuid
        self._uuid, self._request, self._devices = uuid, request, tuple(devices) or (uuid,)
        if uuid not in self._devices:
            raise WeightsError(f"{uuid} is not among the engine's devices {', '.join(self._devices)}")
        self._zmq = _zmq()
        self._context = self._zmq.Context()
        self._talking = threading.Lock()
        self._number = 0
        self._offer: Offer | None = None
        self._socket: Any = None
        self._leaving: Any = None
        self._why = ""
        self._asked: Asked | None = None

    def open(self, offer: Offer, *, seconds: float) -> Wanted:  # noqa: ARG002 (nothing to wait for)
        if offer.split:
            raise WeightsError(f"{self.name} takes only whole tensors")
        self._drop("another push began")
        self._offer, self._why, self._asked = offer, "", None
        self._number += 1
        return Wanted(set())

    def pause(self, in_flight: InFlight, *, patience: float, seconds: float) -> None:
        """Its server pauses: see Served."""

    def begin(self, *, seconds: float) -> None:
        offer = self._opened()
        self._socket = self._bound(self._path(self._uuid))
        if self._request is not None:
            sockets = [(uuid, self._path(uuid)) for uuid in self._devices]
            self._asked = Asked(partial(self._request, sockets))
        self._exchange(_handle(offer.shared), "the buffers", seconds)

    def load(self, bucket: int, slot: int, total: bytes, *, seconds: float) -> None:  # noqa: ARG002 (it knows no sums)
        offer = self._opened()
        entries = offer.manifest.entries
        told = [
            {
                "name": entries[piece.entry].name,
                "shape": torch.Size(entries[piece.entry].shape),
                "dtype": getattr(torch, entries[piece.entry].dtype),
                "offset": slot * offer.shared.nbytes + piece.offset,
            }
            for piece in offer.buckets[bucket].pieces
        ]
        self._exchange(told, f"bucket {bucket} ({told[0]['name']} … {told[-1]['name']})", seconds)

    def end(self, *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._exchange(None, "the end, and let go of the buffers", seconds)
        self._exchange(None, "its post-load hook", deadline - time.monotonic())
        with self._talking:
            self._close()
        if self._asked is not None:
            self._asked.wait(f"{self.name} has loaded all, and its engine", deadline - time.monotonic())

    def commit(self, *, seconds: float) -> Assurance:  # noqa: ARG002 (nothing to wait for)
        """Its engine serves already, unless a server keeps it paused."""
        return "unaccounted"

    def abandon(self, why: str) -> None:
        self._drop(why or "abandoned")

    def close(self) -> None:
        self._drop("the sender closed")
        self._context.term()

    # The conversation: one message, one answer.

    def _exchange(self, message: object, what: str, seconds: float) -> None:
        with self._talking:
            if self._socket is None:
                raise WeightsError(f"{self.name}: {self._why or 'nothing was started'}")
            deadline = time.monotonic() + seconds
            self._wait(self._zmq.POLLOUT, f"did not connect for {what}", deadline)
            self._socket.send(pickle.dumps(message))
            self._wait(self._zmq.POLLIN, f"did not answer to {what}", deadline)
            answer = self._socket.recv()
        if answer:
            text = answer.decode(errors="replace").strip()
            log.error("%s failed at %s:\n%s", self.name, what, text)
            raise WeightsError(f"{self.name} failed at {what}: {text.splitlines()[-1]:.500}")

    def _wait(self, event: int, otherwise: str, deadline: float) -> None:
        poller = self._zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._leaving, self._zmq.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = dict(poller.poll(1000 * max(0.0, min(left, _STEP))))
            if self._socket in ready:
                return
            if self._leaving in ready:
                raise WeightsError(f"{self.name} is gone; it {otherwise}")
            if self._asked is not None and self._asked.error is not None:
                raise WeightsError(f"{self.name}: its engine was asked to update, and: {self._asked.error}")
            if self._why:
                raise WeightsError(f"{self.name} was abandoned: {self._why}")
            if left <= 0:
                raise WeightsError(f"{self.name} {otherwise} in time")

    def _drop(self, why: str) -> None:
        """Tell the worker to stop, whatever it is doing, and leave."""
        self._why = why
        with self._talking:
            if self._socket is None:
                return
            # Relaxed, so that we may speak although an answer is due; it is for the connection that is then cut.
            self._socket.setsockopt(self._zmq.REQ_RELAXED, 1)
            with contextlib.suppress(self._zmq.ZMQError):
                self._socket.setsockopt(self._zmq.SNDTIMEO, int(1000 * _FAREWELL))
                self._socket.send(pickle.dumps(RuntimeError(f"the update was abandoned: {why[:1000]}")))
            self._close(linger=int(1000 * _FAREWELL))

    def _close(self, *, linger: int = 0) -> None:
        self._socket.disable_monitor()
        self._leaving.close(linger=0)
        self._socket.close(linger=linger)
        self._socket = None

    def _bound(self, path: str) -> Any:
        zmq = self._zmq
        socket = self._context.socket(zmq.REQ)
        for user in {os.getuid(), 0}:
            socket.setsockopt(zmq.IPC_FILTER_UID, user)
        self._leaving = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.bind(path)
        except zmq.ZMQError as error:
            self._leaving.close(linger=0)
            socket.close(linger=0)
            raise WeightsError(f"{self.name}: cannot listen at {path}: {error}; is there another sender?") from None
        return socket

    def _path(self, uuid: str) -> str:
        return f"ipc://@checkpoint-engine-{uuid}-{self._number}.sock"

    def _opened(self) -> Offer:
        if self._offer is None:
            raise WeightsError(f"{self.name}: nothing was opened")
        return self._offer


def _handle(shared: SharedBuffers) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """What a worker rebuilds the buffers from: a function and its arguments, the seventh of which it replaces by the
    number that the device has for it."""
    if shared.whole.is_cuda:
        made: tuple[Callable[..., Tensor], tuple[Any, ...]] = reduce_tensor(shared.whole)  # type: ignore[no-untyped-call]
        return made
    path = shared.described(local=False)[0].path
    return open_host_buffers, (path, len(shared.whole), None, None, None, None, None)


def open_host_buffers(path: str, nbytes: int, *_: object) -> Tensor:
    """Buffers in host memory, in the worker's process."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        demand_sealed(file, nbytes)
        return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
    finally:
        os.close(file)


def _zmq() -> Any:
    try:
        return importlib.import_module("zmq")
    except ImportError:
        raise WeightsError("checkpoint-engine's wire needs pyzmq: pip install 'stretto[adapters]'") from None
