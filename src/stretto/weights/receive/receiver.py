"""A receiver: inside an inference process, takes new weights from a sender next to it, or refuses to serve."""

import atexit
import contextlib
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

from stretto.ir.errors import WeightsError, named
from stretto.weights.checksums import digest_of
from stretto.weights.connection import Connection, PeerClosed, log_level
from stretto.weights.host_memory import threads
from stretto.weights.ipc_buffers import device_name, resolved
from stretto.weights.layout import lay_out
from stretto.weights.listener import Address, Listener, read_secret
from stretto.weights.manifest import ITEM_BYTES, Manifest, TensorSpec
from stretto.weights.messages import Abandon, Failed, Open, Status, StatusRequest
from stretto.weights.receive.loaders import CallbackLoader, Demands, InPlaceLoader, Load, Loader
from stretto.weights.receive.rows import reads_in_place
from stretto.weights.receive.session import Hooks, ReceiverState, Session
from stretto.wire.frames import close_files
from stretto.wire.peers import is_trusted, peer_user

log = logging.getLogger(__name__)
_MOST = 32  # connections at a time
_EVER = 1e9  # seconds: signs of life bound the wait
_ENDING = 2.0  # seconds for an update that is under way to end
_PARTING = 1.0  # seconds for the last word to who is sent away


class Receiver:
    """Takes pushes at an address. Give `load`, a function that takes [(name, tensor), …] and returns the names it has
    taken care of; or `into`, live tensors by name, with `slices` of those that are only a part of the pushed one.

    `serve` takes updates in the calling thread until `close`; `start` does so in a thread of its own. An engine asks
    `ensure_serving` before it generates: a receiver whose last update failed is dirty and raises.
    """

    def __init__(
        self,
        address: str,
        load: Load | None = None,
        *,
        into: Mapping[str, Tensor] | None = None,
        slices: Mapping[str, tuple[slice, ...]] | None = None,
        expects: Iterable[TensorSpec] | Demands = (),
        retains: bool = False,
        hooks: Hooks = Hooks(),  # noqa: B008 (frozen)
        version: str = "initial",
        device: torch.device | str | None = None,
        secret_file: str | Path | None = None,
    ) -> None:
        """`expects` are tensors that a version must have, or a function that says what is wrong with those of one;
        `retains` says that the loader keeps what it is handed."""
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
            if not (isinstance(part, tuple) and all(isinstance(it, slice) and it.step in (None, 1) for it in part)):
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
        if self.device.type == "cuda":  # what is called for the first time takes its time
            with threads() as pool:
                digest_of(torch.zeros(1 << 20, dtype=torch.uint8, device=self.device), pool)
            if into is not None:
                reads_in_place(self.device)
        self._listener = Listener(address, self._secret)
        self._lock = threading.Lock()
        self._standing = ReceiverState(version, device_name(self.device))
        self._asking: SimpleQueue[tuple[Connection, Open, list[int]] | None] = SimpleQueue()
        self._updating: Connection | None = None
        self._waiting: Connection | None = None  # has been let in, and is not served yet
        self._strangers: list[Connection] = []
        self._guests: list[Connection] = []  # who ask how it is, and may want to update
        self._seats = threading.BoundedSemaphore(_MOST)
        self._known: dict[str, Manifest] = {}
        self._closed = self._begun = False
        self._serving: threading.Thread | None = None
        _receivers.add(self)
        threading.Thread(target=self._accept, name="stretto receiver", daemon=True).start()

    def go_on_from(self, told: Status) -> None:
        """Be as another receiver of the same engine was, which this one replaces; before it starts."""
        self._standing.go_on_from(told)

    # What an engine asks.

    @property
    def status(self) -> Status:
        """State, version, last error."""
        return self._standing.told

    def ensure_serving(self) -> str:
        """The version being served; raises while there is none to serve."""
        if self._closed:
            raise WeightsError("not serving: this receiver is closed")
        status = self.status
        if status.state != "serving":
            raise WeightsError(f"not serving: {status.state}{': ' + status.error if status.error else ''}")
        return status.version

    def serve(self) -> None:
        """Take updates until closed."""
        self._demand_idle()
        try:
            self._serve()
        finally:
            self._begun = False

    def start(self) -> "Receiver":
        """Serve in a thread of its own, which goes on whatever hooks and loaders raise."""
        self._demand_idle()
        threading.Thread(target=self._serve_on, name="stretto updates", daemon=True).start()
        return self

    def _serve_on(self) -> None:
        while True:
            try:
                return self._serve()
            except BaseException as error:
                log.error("%s: %s ended a conversation", self.address, named(error))

    def _demand_idle(self) -> None:
        with self._lock:
            if self._closed or self._begun:
                raise WeightsError("this receiver is closed" if self._closed else "this receiver serves already")
            self._begun = True

    def _serve(self) -> None:
        self._serving = threading.current_thread()
        while (asked := self._asking.get()) is not None:
            connection, opening, files = asked
            with self._lock:
                self._standing.answering = True  # so that there is no moment in which another could be let in
                self._waiting = None
            session = Session(connection, self._standing, self._hooks, self.device, self._manifest, self._loading)
            here = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
            try:
                with here:  # hooks and loader find their device
                    session.hold(opening, files)
            except BaseException as error:
                session.fail(named(error))
                if not isinstance(error, Exception):
                    raise
                log.exception("%s: a conversation ended", self.address)
            finally:
                connection.close()
                with self._lock:
                    if self._updating is connection:
                        self._updating = None

    def close(self) -> None:
        """Take no more updates."""
        self._leave()
        self._join(_ENDING)

    def _leave(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._asking.put(None)
            for connection in (*self._guests, *([] if self._updating is None else [self._updating])):
                connection.close()  # another receiver may be at this address soon
        self._listener.close()

    def _join(self, seconds: float) -> None:
        """Let the thread that serves end, that long at most."""
        if self._serving is not None and self._serving is not threading.current_thread():
            self._serving.join(seconds)

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Its door.

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("%s: cannot let anybody in: %s", self.address, error)
                time.sleep(0.1)
                continue
            if stream.family == socket.AF_UNIX and not is_trusted(user := peer_user(stream)):
                log.warning("%s: turned user %d away", self.address, user)
                stream.close()
                continue
            connection = Connection(stream)
            with self._lock:
                self._strangers.append(connection)
                if len(self._strangers) > _MOST:  # who has not said who it is makes room for who might
                    self._strangers.pop(0).close()
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        """Answer questions, until the other side wants to update or leaves."""
        handed_on = greeted = seated = False
        try:
            connection.meet(self._secret, serves=True)
            greeted = True
            with self._lock:
                self._strangers = [it for it in self._strangers if it is not connection]
                if self._closed:
                    raise PeerClosed("came when it was closed")
                self._guests.append(connection)
            seated = self._seats.acquire(blocking=False)
            if not seated:
                raise WeightsError("came when all seats were taken")
            while not handed_on:
                message, files = connection.recv(seconds=_EVER)
                if isinstance(message, StatusRequest):
                    close_files(files)
                    connection.send(self.status)
                elif isinstance(message, Open) and self._claim(connection, message, files):
                    handed_on = True
                elif isinstance(message, Abandon):  # of what it was not let do
                    close_files(files)
                else:
                    close_files(files)
                    busy = "is busy with another update" if isinstance(message, Open) else "did not expect that"
                    connection.send(Failed(busy, dirty=False))
        except (PeerClosed, WeightsError) as error:
            log.log(log_level(error), "%s: the other side %s", self.address, error)
            if greeted:
                with contextlib.suppress(PeerClosed):
                    connection.send(Failed(f"it says that this sender {error}", dirty=False), seconds=_PARTING)
        finally:
            with self._lock:
                self._strangers = [it for it in self._strangers if it is not connection]
                self._guests = [it for it in self._guests if it is not connection]
            if seated:
                self._seats.release()
            if not handed_on:
                connection.close()

    def _claim(self, connection: Connection, opening: Open, files: list[int]) -> bool:
        """One sender at a time; one that is between two pushes is sent away when another comes."""
        with self._lock:
            expected = self._waiting is not None and not self._waiting.was_left
            if self._closed or expected or (self._updating is not None and self._standing.busy):
                return False
            if self._updating is not None:
                self._updating.close()
            self._updating = self._waiting = connection
            self._asking.put((connection, opening, files))
            return True

    # What it takes.

    def _manifest(self, opening: Open) -> Manifest | None:
        if opening.manifest is not None:
            opening.manifest.check()
            if opening.manifest.digest != opening.digest:
                raise WeightsError("the manifest is not the one that the version is named by")
            self._known = {opening.digest: opening.manifest}
        return self._known.get(opening.digest)

    def _loading(self, manifest: Manifest, opening: Open) -> Loader:
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
    """A thread that comes back from a copy while Python ends would take the process down."""
    there = list(_receivers)
    for receiver in there:
        receiver._leave()
    deadline = time.monotonic() + _ENDING
    for receiver in there:
        receiver._join(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_receivers.clear)  # a child has no part in its parent's
