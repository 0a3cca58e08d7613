"""A receiver: inside an inference process, takes new weights from a sender next to it, or refuses to serve."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.host import uncollected
from stretto.weights.layout import lay_out
from stretto.weights.loading import Handing, Load, Writing
from stretto.weights.manifest import Entry, Manifest
from stretto.weights.shared import OpenedBuffers, device_name, resolved
from stretto.weights.sums import place_sum
from stretto.weights.wire import (
    BEAT,
    Abandon,
    Address,
    Ask,
    Commit,
    Connection,
    End,
    Failed,
    Filled,
    Gone,
    InFlight,
    Loaded,
    Message,
    Open,
    Ready,
    Serving,
    Start,
    Started,
    State,
    Taken,
    Told,
    Unknown,
    close_files,
    listen,
    read_secret,
    same_user,
)

log = logging.getLogger(__name__)
_MOST = 32  # connections at a time
_EVER = 1e9  # seconds: signs of life bound the wait


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an engine does around an update. Each runs in the thread that serves."""

    pause: Callable[[InFlight], None] = _nothing
    """Stop generating; what is under way is waited for, aborted or kept for later."""
    begin: Callable[[], None] = _nothing
    """Get the engine's loading state ready, from whatever an earlier update has left."""
    finish: Callable[[], None] = _nothing
    """All tensors are there: quantise, transpose, and so on."""
    flush_cache: Callable[[], None] = _nothing
    """Forget what was computed with the old weights."""
    resume: Callable[[], None] = _nothing


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
        expects: Iterable[Entry] = (),
        retains: bool = False,
        hooks: Hooks = Hooks(),  # noqa: B008 (frozen)
        version: str = "initial",
        device: torch.device | str | None = None,
        secret_file: str | Path | None = None,
    ) -> None:
        """`expects` are tensors that a version must have; `retains` says that the loader keeps what it is handed."""
        if (load is None) == (into is None):
            raise WeightsError("a receiver takes either load, a function, or into, tensors by name")
        unknown = [name for name in slices or {} if name not in (into or {})]
        if unknown:
            raise WeightsError(f"a slice of {unknown[0]} is asked for, which is not among the tensors of into")
        self.address, self._load, self._into, self._slices = Address(address), load, into, slices or {}
        self._expects, self._retains, self._hooks = tuple(expects), retains, hooks
        if device is None and into:
            device = next(iter(into.values())).device
        self.device = resolved(device)
        self._secret = read_secret(secret_file)
        if self.device.type == "cuda":  # what is called for the first time takes its time
            place_sum(torch.zeros(1 << 20, dtype=torch.uint8, device=self.device)).item()
        self._server = listen(address, self._secret)
        self._lock = threading.Lock()
        self._state: State = "serving"
        self._version, self._error, self._attested = version, "", False
        self._asking: SimpleQueue[tuple[Connection, Open, list[int]] | None] = SimpleQueue()
        self._updating: Connection | None = None
        self._answering = False
        self._strangers: list[Connection] = []
        self._seats = threading.BoundedSemaphore(_MOST)
        self._known: dict[str, Manifest] = {}
        self._closed = False
        threading.Thread(target=self._accept, name="stretto receiver", daemon=True).start()

    # What an engine asks.

    @property
    def status(self) -> Told:
        with self._lock:
            return Told(
                self._state,
                self._version,
                self._error,
                device_name(self.device),
                self._into is not None,
                self._attested,
            )

    def ensure_serving(self) -> str:
        """The version being served; raises while there is none to serve."""
        status = self.status
        if status.state != "serving":
            raise WeightsError(f"not serving: {status.state}{': ' + status.error if status.error else ''}")
        return status.version

    def serve(self) -> None:
        """Take updates until closed."""
        while (asked := self._asking.get()) is not None:
            connection, opening, files = asked
            conversation = _Conversation(self, connection)
            try:
                conversation.hold(opening, files)
            except BaseException as error:
                conversation.fail(f"{type(error).__name__}: {error}")
                if not isinstance(error, Exception):
                    raise
                log.exception("%s: a conversation ended", self.address)
            finally:
                connection.close()
                with self._lock:
                    if self._updating is connection:
                        self._updating = None

    def start(self) -> "Receiver":
        """Serve in a thread of its own."""
        threading.Thread(target=self.serve, name="stretto updates", daemon=True).start()
        return self

    def close(self) -> None:
        """Take no more updates."""
        if not self._closed:
            self._closed = True
            self._asking.put(None)
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # which wakes who waits at the door
            self._server.close()
            with self._lock:
                if self._updating is not None:
                    self._updating.close()
            path = self.address.path
            if path is not None:
                path.unlink(missing_ok=True)

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Its door.

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream, _ = self._server.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("%s: cannot let anybody in: %s", self.address, error)
                time.sleep(0.1)
                continue
            if not same_user(stream):
                log.warning("%s: turned another user away", self.address)
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
        handed_on = seated = False
        try:
            connection.greet(self._secret, serves=True)
            with self._lock:
                self._strangers = [it for it in self._strangers if it is not connection]
            seated = self._seats.acquire(blocking=False)
            if not seated:
                raise WeightsError("came when all seats were taken")
            while not handed_on:
                message, files = connection.hear(seconds=_EVER)
                if isinstance(message, Ask):
                    close_files(files)
                    connection.tell(self.status)
                elif isinstance(message, Open) and self._claim(connection):
                    self._asking.put((connection, message, files))
                    handed_on = True
                else:
                    close_files(files)
                    busy = "is busy with another update" if isinstance(message, Open) else "did not expect that"
                    connection.tell(Failed(busy, dirty=False))
        except (Gone, WeightsError) as error:
            log.info("%s: the other side %s", self.address, error)
        finally:
            with self._lock:
                self._strangers = [it for it in self._strangers if it is not connection]
            if seated:
                self._seats.release()
            if not handed_on:
                connection.close()

    def _claim(self, connection: Connection) -> bool:
        """One sender at a time; one that is between two pushes is sent away when another comes."""
        with self._lock:
            if self._closed or (
                self._updating is not None and (self._answering or self._state not in ("serving", "dirty"))
            ):
                return False
            if self._updating is not None:
                self._updating.close()
            self._updating = connection
            return True

    # What an update changes.

    def _set(self, state: State, *, version: str | None = None, error: str = "", attested: bool | None = None) -> None:
        with self._lock:
            self._state, self._error = state, error
            self._version = self._version if version is None else version
            self._attested = self._attested if attested is None else attested

    def _manifest(self, opening: Open) -> Manifest | None:
        if opening.manifest is not None:
            opening.manifest.check()
            if opening.manifest.digest != opening.digest:
                raise WeightsError("the manifest is not the one that the version is named by")
            self._known = {opening.digest: opening.manifest}
        return self._known.get(opening.digest)

    def _loading(self, manifest: Manifest, opening: Open) -> Handing | Writing:
        if opening.split and self._into is None:
            raise WeightsError("tensors are in parts, which only receivers that write in place can take")
        buckets = lay_out(manifest, opening.bucket_bytes, split=opening.split)
        if self._into is not None:
            return Writing(self._into, self._slices, manifest, buckets)
        assert self._load is not None
        return Handing(self._load, manifest, buckets, retains=self._retains, expects=self._expects)


class _Conversation:
    """With one sender, over any number of updates, until it leaves."""

    def __init__(self, receiver: Receiver, connection: Connection) -> None:
        self._receiver, self._connection, self._hooks = receiver, connection, receiver._hooks
        self._buffers: OpenedBuffers | None = None
        self._loading: Handing | Writing | None = None
        self._laid: tuple[str, int, bool, int] | None = None
        self._manifest: Manifest | None = None
        self._version = ""
        self._answering = False

    def hold(self, opening: Open, files: list[int]) -> None:
        over = threading.Event()
        beats = threading.Thread(target=self._beat, args=(over,), name="stretto beats", daemon=True)
        beats.start()
        try:
            message: Message = opening
            while True:
                self._receiver._answering = self._answering = True
                self._answer(message, files)
                self._receiver._answering = self._answering = False
                message, files = self._connection.hear(seconds=_EVER)
        except Gone as error:
            self.fail(f"the sender {error}")
        finally:
            self._receiver._answering = False
            over.set()
            self._loading = None
            beats.join()
            if self._buffers is not None:
                self._buffers.close()

    def _beat(self, over: threading.Event) -> None:
        """Signs of life, as long as the sender waits for an answer."""
        while not over.wait(BEAT):
            with contextlib.suppress(Gone):
                if self._answering:
                    self._connection.beat()

    def _answer(self, message: Message, files: list[int]) -> None:
        try:
            match message:
                case Open():
                    with uncollected():
                        answer = self._open(message, files)
                case Start():
                    answer = self._start(message.in_flight)
                case Filled():
                    answer = self._load(message)
                case End():
                    answer = self._end()
                case Commit():
                    answer = self._commit()
                case Abandon():
                    self.fail(message.why)
                    return
                case Ask():
                    answer = self._receiver.status
                case _:
                    raise WeightsError(f"did not expect {type(message).__name__}")
        except Gone:
            raise
        except Exception as error:
            why = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, WeightsError):
                log.exception("%s: an update failed", self._receiver.address)
            self.fail(why)
            answer = Failed(why, dirty=self._receiver.status.state == "dirty")
        finally:
            close_files(files)
        self._connection.tell(answer)

    def _expect(self, *states: State) -> None:
        state = self._receiver.status.state
        if state not in states:
            raise WeightsError(f"that cannot be while {state}")

    def fail(self, why: str) -> None:
        """What was not touched goes on; what was is dirty until a whole push has gone well."""
        state = self._receiver.status.state
        if state == "paused":
            try:
                self._serve(error=why)
            except Exception as error:
                self._receiver._set("dirty", error=f"{why}; and {error}")
        elif state in ("loading", "loaded"):
            self._receiver._set("dirty", error=why, attested=False)

    def _serve(self, *, version: str | None = None, error: str = "") -> None:
        """An engine that resumes finds that it may serve; one that cannot is dirty."""
        self._receiver._set("serving", version=version, error=error)
        try:
            self._hooks.resume()
        except Exception as problem:
            why = f"the engine did not resume: {type(problem).__name__}: {problem}"
            self._receiver._set("dirty", error=why)
            raise WeightsError(why) from problem

    def _open(self, message: Open, files: list[int]) -> Message:
        self._expect("serving", "dirty")
        if message.bucket_bytes > message.buffers.nbytes:
            raise WeightsError(
                f"a bucket of {message.bucket_bytes} bytes does not fit a buffer of {message.buffers.nbytes}"
            )
        self._manifest = self._receiver._manifest(message)
        if self._manifest is None:
            return Unknown()
        if self._buffers is None or self._buffers.number != message.buffers.number:
            self._loading = None  # which has views of the old ones
            if self._buffers is not None:
                self._buffers.close()
            self._buffers = OpenedBuffers(message.buffers, files, self._receiver.device)
        laid = message.digest, message.bucket_bytes, message.split, self._buffers.number
        if self._loading is None or self._laid != laid:
            self._loading, self._laid = self._receiver._loading(self._manifest, message), laid
        self._version = message.version
        return Ready(self._loading.skips)

    def _start(self, in_flight: InFlight) -> Message:
        if self._loading is None:
            raise WeightsError("nothing was opened")
        self._expect("serving", "dirty")
        if self._receiver.status.state == "serving":
            self._receiver._set("paused")
        self._hooks.pause(in_flight)  # of a dirty one too, which may have been left in any state
        self._receiver._set("loading")
        self._loading.begin()
        self._hooks.begin()
        return Started()

    def _load(self, message: Filled) -> Message:
        self._expect("loading")
        assert self._buffers is not None
        assert self._loading is not None
        if not (0 <= message.bucket < len(self._loading.buckets) and message.slot in (0, 1)):
            raise WeightsError(f"there is no bucket {message.bucket} in buffer {message.slot}")
        bucket = self._loading.buckets[message.bucket]
        buffer = self._buffers.tensors[message.slot]
        if int(place_sum(buffer[: bucket.nbytes])) != message.sum:
            raise WeightsError(f"{self._named(message.bucket)} arrived changed")
        try:
            self._loading.load(message.bucket, buffer)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise WeightsError(f"the loader failed at {self._named(message.bucket)}: {what}") from error
        # This waits for all that the stream was given, so for what the loader has begun too.
        if int(place_sum(buffer[: bucket.nbytes])) != message.sum:
            raise WeightsError(f"{self._named(message.bucket)} was changed while it was loaded")
        return Taken(message.bucket)

    def _named(self, bucket: int) -> str:
        """A bucket, for somebody who knows tensors."""
        assert self._manifest is not None
        assert self._loading is not None
        pieces = self._loading.buckets[bucket].pieces
        first, last = (self._manifest.entries[piece.entry].name for piece in (pieces[0], pieces[-1]))
        return f"bucket {bucket} ({first})" if len(pieces) == 1 else f"bucket {bucket} ({first} … {last})"

    def _end(self) -> Message:
        self._expect("loading")
        assert self._loading is not None
        missing = self._loading.missing()
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise WeightsError(f"the loader did not account for {missing[0]}{more}")
        self._hooks.finish()
        if self._receiver.device.type == "cuda":
            torch.cuda.current_stream(self._receiver.device).synchronize()
        self._receiver._set("loaded", attested=missing is not None)
        return Loaded(missing is not None)

    def _commit(self) -> Message:
        self._expect("loaded")
        self._hooks.flush_cache()
        self._serve(version=self._version)
        return Serving(self._version)
