"""The receiver, inside an inference process: takes new weights from a sender on the same machine."""

import atexit
import contextlib
import functools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from stretto.execute.host_memory import threads
from stretto.ir.errors import WeightsError, named
from stretto.weights.checksums import digest_of
from stretto.weights.connection import Connection, PeerClosed, log_level
from stretto.weights.ipc_buffers import device_name, resolved
from stretto.weights.layout import lay_out
from stretto.weights.listener import Address, Listener, read_secret
from stretto.weights.manifest import ITEM_BYTES, Manifest, TensorSpec
from stretto.weights.messages import Abandon, Failed, Open, Status, StatusRequest
from stretto.weights.receive.loaders import CallbackLoader, InPlaceLoader, Load, Loader, Validator
from stretto.weights.receive.rows import reads_in_place
from stretto.weights.receive.session import Session
from stretto.weights.receive.state import Hooks, ReceiverState
from stretto.wire.frames import close_files
from stretto.wire.peers import is_trusted, peer_user

log = logging.getLogger(__name__)
_MAX_CONNECTIONS = 32
_FOREVER = 1e9  # seconds; heartbeats bound the wait
_CLOSE_SECONDS = 2.0  # for an update in progress to end
_FAREWELL_SECONDS = 1.0  # to send the reason before disconnecting a peer
_BUSY_SECONDS = 1.0  # for an update to end before another sender is told that the receiver is busy


class Receiver:
    """Takes pushes at an address.

    Give either `load`, a function that takes [(name, tensor), …] and returns the names it has loaded; or `into`, live
    tensors by name, with `slices` for those that hold only a part of the pushed tensor.

    `serve` takes updates in the calling thread until `close`; `start` does so in a thread of its own. An engine calls
    `ensure_serving` before it generates: it raises if the last update failed and left the receiver dirty.
    """

    def __init__(
        self,
        address: str,
        load: Load | None = None,
        *,
        into: Mapping[str, Tensor] | None = None,
        slices: Mapping[str, tuple[slice, ...]] | None = None,
        expects: Iterable[TensorSpec] | Validator = (),
        retains: bool = False,
        hooks: Hooks = Hooks(),  # noqa: B008 (frozen)
        version: str = "initial",
        device: torch.device | str | None = None,
        secret_file: str | Path | None = None,
    ) -> None:
        """`expects` lists the tensors that a version must have, or is a function that describes the problems with a
        version's tensors; `retains` says that `load` keeps tensors after it returns, and so must get copies."""
        expects = expects if callable(expects) else tuple(expects)
        if (load is None) == (into is None):
            raise WeightsError("a receiver takes either load, a function, or into, tensors by name")
        if load is not None and not callable(load):
            raise WeightsError(f"load is a function that takes tensors (got {load!r:.60})")
        if into is not None and not isinstance(into, Mapping):
            raise WeightsError("into is tensors by name, such as model.state_dict()")
        if into is not None and not into:
            raise WeightsError("into has no tensors, so there is nothing to take")
        for name, tensor in (into or {}).items():
            if not isinstance(tensor, Tensor):
                raise WeightsError(f"{name} of into is a {type(tensor).__name__}, not a tensor")
        if into is not None and expects:
            raise WeightsError("expects is for load; a version must have all that is in into anyway")
        for name, part in (slices or {}).items():
            if not (isinstance(part, tuple) and all(isinstance(cut, slice) and cut.step in (None, 1) for cut in part)):
                raise WeightsError(f"the slice of {name} is a tuple of slices without steps (got {part!r:.60})")
        for entry in () if callable(expects) else expects:
            if not isinstance(entry, TensorSpec):
                raise WeightsError(f"expects are TensorSpec(name, dtype, shape) (got {entry!r:.60})")
            if entry.dtype not in ITEM_BYTES:
                raise WeightsError(f"{entry.name} is expected as {entry.dtype!r:.40}; types are named as in 'bfloat16'")
        if not isinstance(hooks, Hooks):
            raise WeightsError(f"hooks are Hooks(pause=…, resume=…) from stretto.weights (got {hooks!r:.60})")
        unknown = [name for name in slices or {} if name not in (into or {})]
        if unknown:
            raise WeightsError(f"a slice of {unknown[0]} is asked for, which is not among the tensors of into")
        self.address, self._load, self._into, self._slices = Address(address), load, into, slices or {}
        self._expects, self._retains, self._hooks = expects, retains, hooks
        if device is None and into:
            device = next(iter(into.values())).device
        self.device = resolved(device)
        self._secret = read_secret(secret_file)
        if self.device.type == "cuda":  # the first calls are slow: make them before any push
            with threads() as pool:
                digest_of(torch.zeros(1 << 20, dtype=torch.uint8, device=self.device), pool)
            if into is not None:
                reads_in_place(self.device)
        self._listener = Listener(address, self._secret)
        self._lock = threading.Lock()
        self._state = ReceiverState(version, device_name(self.device))
        self._requests: SimpleQueue[tuple[Connection, Open, list[int]] | None] = SimpleQueue()
        self._active: Connection | None = None
        self._waiting: Connection | None = None  # has claimed the receiver, and has no session yet
        self._unauthenticated: list[Connection] = []
        self._clients: list[Connection] = []  # may ask for the status, and open an update
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._manifests: dict[str, Manifest] = {}
        self._closed = self._started = False
        self._serving_thread: threading.Thread | None = None
        _receivers.add(self)
        threading.Thread(target=self._accept, name="stretto receiver", daemon=True).start()

    def go_on_from(self, previous: Status) -> None:
        """Take over the status of the engine's previous receiver, which this one replaces; call before `start`."""
        self._state.go_on_from(previous)

    # Called by the engine.

    @property
    def status(self) -> Status:
        """State, version, last error."""
        return self._state.status

    def ensure_serving(self) -> str:
        """Return the version being served; raise WeightsError if the engine must not serve now."""
        if self._closed:
            raise WeightsError("not serving: this receiver is closed")
        status = self.status
        if status.state != "serving":
            raise WeightsError(f"not serving: {status.state}{': ' + status.error if status.error else ''}")
        return status.version

    def serve(self) -> None:
        """Take updates until closed."""
        self._mark_started()
        try:
            self._serve()
        finally:
            self._started = False

    def start(self) -> "Receiver":
        """Take updates in a new thread, which continues whatever hooks and loaders raise."""
        self._mark_started()
        threading.Thread(target=self._serve_forever, name="stretto updates", daemon=True).start()
        return self

    def _serve_forever(self) -> None:
        while True:
            try:
                return self._serve()
            except BaseException as error:
                log.error("%s: %s ended a session", self.address, named(error))

    def _mark_started(self) -> None:
        """Raise WeightsError if the receiver is closed or serves already."""
        with self._lock:
            if self._closed or self._started:
                raise WeightsError("this receiver is closed" if self._closed else "this receiver serves already")
            self._started = True

    def _serve(self) -> None:
        self._serving_thread = threading.current_thread()
        while (request := self._requests.get()) is not None:
            connection, opening, files = request
            with self._lock:
                self._state.answering = True  # before `_waiting` is cleared, or another sender could claim the receiver
                self._waiting = None
            start_answer = functools.partial(self._start_answer, connection)
            session = Session(
                connection, self._state, self._hooks, self.device, self._find_manifest, self._make_loader, start_answer
            )
            on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
            try:
                with on_device:  # make it the current device for hooks and loader
                    session.run(opening, files)
            except BaseException as error:
                session.fail(named(error))
                if not isinstance(error, Exception):
                    raise
                log.exception("%s: a session failed", self.address)
            finally:
                connection.close()
                with self._lock:
                    if self._active is connection:
                        self._active = None

    def close(self) -> None:
        """Take no more updates."""
        self._stop()
        self._join(_CLOSE_SECONDS)

    def _stop(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._requests.put(None)
            for connection in (*self._clients, *([] if self._active is None else [self._active])):
                connection.close()  # so that senders connect to the next receiver at this address
        self._listener.close()

    def _join(self, seconds: float) -> None:
        """Wait until the serving thread ends, for at most `seconds`."""
        if self._serving_thread is not None and self._serving_thread is not threading.current_thread():
            self._serving_thread.join(seconds)

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Connections.

    def _accept(self) -> None:
        """Accept connections, and greet each in a thread of its own."""
        while not self._closed:
            try:
                stream = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("%s: cannot accept connections: %s", self.address, error)
                time.sleep(0.1)
                continue
            if stream.family == socket.AF_UNIX and not is_trusted(user := peer_user(stream)):
                log.warning("%s: refused a connection from user %d", self.address, user)
                stream.close()
                continue
            connection = Connection(stream)
            with self._lock:
                self._unauthenticated.append(connection)
                if len(self._unauthenticated) > _MAX_CONNECTIONS:  # drop the oldest for a peer that may authenticate
                    self._unauthenticated.pop(0).close()
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        """Authenticate a peer and answer status requests, until it opens an update or disconnects."""
        handed_on = greeted = has_slot = False
        try:
            connection.meet(self._secret, serves=True)
            greeted = True
            with self._lock:
                self._unauthenticated = [other for other in self._unauthenticated if other is not connection]
                if self._closed:
                    raise PeerClosed("came when it was closed")
                self._clients.append(connection)
            has_slot = self._slots.acquire(blocking=False)
            if not has_slot:
                raise WeightsError("came when all seats were taken")
            while not handed_on:
                message, files = connection.recv(seconds=_FOREVER)
                if isinstance(message, StatusRequest):
                    close_files(files)
                    connection.send(self.status)
                elif isinstance(message, Open) and self._claim_soon(connection, message, files):
                    handed_on = True
                elif isinstance(message, Abandon):  # of an update that was refused
                    close_files(files)
                else:
                    close_files(files)
                    busy = "is busy with another update" if isinstance(message, Open) else "did not expect that"
                    connection.send(Failed(busy, dirty=False))
        except (PeerClosed, WeightsError) as error:
            log.log(log_level(error), "%s: the peer %s", self.address, error)
            if greeted:
                with contextlib.suppress(PeerClosed):
                    connection.send(Failed(f"it says that this sender {error}", dirty=False), seconds=_FAREWELL_SECONDS)
        finally:
            with self._lock:
                self._unauthenticated = [other for other in self._unauthenticated if other is not connection]
                self._clients = [other for other in self._clients if other is not connection]
            if has_slot:
                self._slots.release()
            if not handed_on:
                connection.close()

    def _claim_soon(self, connection: Connection, opening: Open, files: list[int]) -> bool:
        """Claim the receiver, with a short wait: a sender that was answered may be back before the answer is done."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while not self._claim(connection, opening, files):
            if self._closed or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _claim(self, connection: Connection, opening: Open, files: list[int]) -> bool:
        """Give a connection the receiver, one at a time; a sender that is between two pushes is disconnected."""
        with self._lock:
            claimed = self._waiting is not None and not self._waiting.was_left
            if self._closed or claimed or (self._active is not None and self._state.busy):
                return False
            if self._active is not None:
                self._active.close()
            self._active = self._waiting = connection
            self._requests.put((connection, opening, files))
            return True

    # Called by the session.

    def _start_answer(self, connection: Connection) -> bool:
        """Mark the receiver as answering this connection; False if another has claimed it since the last answer."""
        with self._lock:
            if self._active is not connection:
                return False
            self._state.answering = True
            return True

    def _find_manifest(self, opening: Open) -> Manifest | None:
        if opening.manifest is not None:
            opening.manifest.check()
            if opening.manifest.digest != opening.digest:
                raise WeightsError("the manifest is not the one that the version is named by")
            self._manifests = {opening.digest: opening.manifest}
        return self._manifests.get(opening.digest)

    def _make_loader(self, manifest: Manifest, opening: Open) -> Loader:
        if opening.split and self._into is None:
            raise WeightsError("tensors are in parts, which only receivers that write in place can take")
        buckets = lay_out(manifest, opening.bucket_bytes, split=opening.split)
        if self._into is not None:
            return InPlaceLoader(self._into, self._slices, manifest, buckets)
        assert self._load is not None
        return CallbackLoader(self._load, manifest, buckets, retains=self._retains, expects=self._expects)


_receivers: "weakref.WeakSet[Receiver]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop all receivers: a thread that returns from a copy while Python shuts down would crash the process."""
    receivers = list(_receivers)
    for receiver in receivers:
        receiver._stop()
    deadline = time.monotonic() + _CLOSE_SECONDS
    for receiver in receivers:
        receiver._join(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_receivers.clear)  # a forked child must not close its parent's receivers
