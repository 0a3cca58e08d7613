"""Unmodified workers of checkpoint-engine (0.4 or later) as receivers, over their own protocol."""

import contextlib
import importlib
import logging
import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from stretto.ir.errors import WeightsError
from stretto.weights.adapters.http import Http, failure_of, in_background, wait_for
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.messages import Assurance, InFlight
from stretto.weights.send.endpoint import Offer, Wanted
from stretto.wire.memory import validate_sealed

log = logging.getLogger(__name__)
_STEP = 0.1  # seconds between two checks for other reasons to end a wait
_FAREWELL_SECONDS = 1.0  # to tell a worker to stop

Request = Callable[[list[tuple[str, str]]], object]
"""Makes an engine call `update_weights_from_ipc` with (device UUID, socket) pairs; returns when that returns."""


def vllm_request(base_url: str, *, seconds: float = 3600.0, key: str | None = None) -> Request:
    """Return a request over HTTP to a vLLM server with VllmColocateWorkerExtension and VLLM_SERVER_DEV_MODE=1."""
    server = Http(base_url, key=key)

    def ask(sockets: list[tuple[str, str]]) -> object:
        body = {"method": "update_weights_from_ipc", "args": [dict(sockets)], "timeout": seconds}
        return server.post("/collective_rpc", body, seconds=seconds)

    return ask


class CheckpointEngineWorkers:
    """The worker on one device, as an endpoint.

    For an engine on several devices, each sender has one of these. All get the UUIDs of all `devices`; one gets the
    `request`, the others None. Each push opens all of them, so that they agree on the number in the sockets' names.

    Limits of these workers:
    - Their receive has no deadline. If the sender is killed, they wait until their engine is restarted. A sender that
      gives up tells them to stop, which they do after the bucket they are loading.
    - They load in place and keep no state. A failed update leaves mixed weights, and only a server that stays paused
      keeps the engine from serving them (see `Served`). The next complete push repairs them.
    - They compute no checksums and do not report which names they loaded: a push is always unaccounted.
    - Two of them cannot share a device: the socket's address contains its UUID.

    Their protocol is pickle. We only send pickles and never load any: an answer is bytes, empty or the text of an
    error. The socket has no file and so no permissions; only our user and root can connect. Tested only against the
    package's own worker function, never against an engine.
    """

    def __init__(
        self, uuid: str, request: Request | None, *, devices: Sequence[str] = (), device: str | None = None
    ) -> None:
        """`device` is "cpu" for a worker that was adapted to run there, as in tests."""
        self.name, self.device = f"checkpoint-engine worker on {uuid}", device or uuid
        self._uuid, self._request, self._devices = uuid, request, tuple(devices) or (uuid,)
        if uuid not in self._devices:
            raise WeightsError(f"{uuid} is not among the engine's devices {', '.join(self._devices)}")
        self._zmq = _zmq()
        self._context = self._zmq.Context()
        self._exchange_lock = threading.Lock()
        self._number = 0
        self._offer: Offer | None = None
        self._socket: Any = None
        self._monitor: Any = None
        self._drop_reason = ""
        self._update_call: Future[Any] | None = None

    def open(self, offer: Offer, *, seconds: float) -> Wanted:  # noqa: ARG002 (nothing to wait for)
        if offer.split:
            raise WeightsError(f"{self.name} takes only whole tensors")
        self._drop("another push began")
        self._offer, self._drop_reason, self._update_call = offer, "", None
        self._number += 1
        return Wanted(set())

    def pause(self, in_flight: InFlight, *, patience: float, seconds: float) -> None:
        """Do nothing: the server pauses the engine (see `Served`)."""

    def begin(self, *, seconds: float) -> None:
        offer = self._opened()
        self._socket = self._bound(self._path(self._uuid))
        if self._request is not None:
            sockets = [(uuid, self._path(uuid)) for uuid in self._devices]
            self._update_call = in_background(partial(self._request, sockets))
        self._exchange(_handle(offer.shared), "the buffers", seconds)

    def load(self, bucket: int, slot: int, total: bytes, *, seconds: float) -> None:  # noqa: ARG002 (workers compute no checksums)
        offer = self._opened()
        entries = offer.manifest.entries
        tensors = [
            {
                "name": entries[piece.entry].name,
                "shape": torch.Size(entries[piece.entry].shape),
                "dtype": getattr(torch, entries[piece.entry].dtype),
                "offset": slot * offer.shared.nbytes + piece.offset,
            }
            for piece in offer.buckets[bucket].pieces
        ]
        self._exchange(tensors, f"bucket {bucket} ({tensors[0]['name']} … {tensors[-1]['name']})", seconds)

    def end(self, *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._exchange(None, "the end, and let go of the buffers", seconds)
        self._exchange(None, "its post-load hook", deadline - time.monotonic())
        with self._exchange_lock:
            self._close()
        if self._update_call is not None:
            wait_for(self._update_call, f"{self.name} has loaded all, and its engine", deadline - time.monotonic())

    def commit(self, *, seconds: float) -> Assurance:  # noqa: ARG002 (nothing to wait for)
        """Return the assurance; the engine serves already, unless a server keeps it paused."""
        return "unaccounted"

    def abandon(self, why: str) -> None:
        self._drop(why or "abandoned")

    def close(self) -> None:
        self._drop("the sender closed")
        self._context.term()

    # The protocol: one message, one answer.

    def _exchange(self, message: object, what: str, seconds: float) -> None:
        """Send a message and wait for the answer; raise WeightsError if it is an error or does not come in time."""
        with self._exchange_lock:
            if self._socket is None:
                raise WeightsError(f"{self.name}: {self._drop_reason or 'nothing was started'}")
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
        """Wait until the socket is ready.

        Raise WeightsError if the worker is gone, its engine failed, the update was dropped, or the deadline has passed.
        """
        poller = self._zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._monitor, self._zmq.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = dict(poller.poll(1000 * max(0.0, min(left, _STEP))))
            if self._socket in ready:
                return
            if self._monitor in ready:
                raise WeightsError(f"{self.name} is gone; it {otherwise}")
            if (error := failure_of(self._update_call)) is not None:
                raise WeightsError(f"{self.name}: its engine was asked to update, and: {error}")
            if self._drop_reason:
                raise WeightsError(f"{self.name} was abandoned: {self._drop_reason}")
            if left <= 0:
                raise WeightsError(f"{self.name} {otherwise} in time")

    def _drop(self, why: str) -> None:
        """Tell the worker to stop, and close the socket."""
        self._drop_reason = why
        with self._exchange_lock:
            if self._socket is None:
                return
            # Relaxed, so that we may send although an answer is due; that answer is lost with the connection.
            self._socket.setsockopt(self._zmq.REQ_RELAXED, 1)
            with contextlib.suppress(self._zmq.ZMQError):
                self._socket.setsockopt(self._zmq.SNDTIMEO, int(1000 * _FAREWELL_SECONDS))
                self._socket.send(pickle.dumps(RuntimeError(f"the update was abandoned: {why[:1000]}")))
            self._close(linger=int(1000 * _FAREWELL_SECONDS))

    def _close(self, *, linger: int = 0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger)
        self._socket = None

    def _bound(self, path: str) -> Any:
        zmq = self._zmq
        socket = self._context.socket(zmq.REQ)
        for user in {os.getuid(), 0}:
            socket.setsockopt(zmq.IPC_FILTER_UID, user)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.bind(path)
        except zmq.ZMQError as error:
            self._monitor.close(linger=0)
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
    """Return the function and arguments from which a worker rebuilds the buffers; it replaces the seventh argument by
    its own index of the device."""
    if shared.whole.is_cuda:
        handle: tuple[Callable[..., Tensor], tuple[Any, ...]] = reduce_tensor(shared.whole)  # type: ignore[no-untyped-call]
        return handle
    path = shared.described(local=False)[0].path
    return open_host_buffers, (path, len(shared.whole), None, None, None, None, None)


def open_host_buffers(path: str, nbytes: int, *_: object) -> Tensor:
    """Open buffers in host memory; runs in the worker's process."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        validate_sealed(file, nbytes)
        return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
    finally:
        os.close(file)


def _zmq() -> Any:
    try:
        return importlib.import_module("zmq")
    except ImportError:
        raise WeightsError("checkpoint-engine's wire needs pyzmq: pip install 'stretto[adapters]'") from None
