"""A receiver's part in an update: from one state to the next, as its sender says. An error before the first write
leaves it serving what it did; one after it, dirty."""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from stretto.ir.errors import WeightsError, named
from stretto.weights.checksums import digest_of
from stretto.weights.connection import Connection, PeerClosed, PeerTimeout, log_level
from stretto.weights.host_memory import threads, uncollected
from stretto.weights.ipc_buffers import OpenedBuffers
from stretto.weights.manifest import Manifest
from stretto.weights.messages import (
    Abandon,
    Assurance,
    Begin,
    Begun,
    Commit,
    End,
    Failed,
    Filled,
    InFlight,
    Loaded,
    Message,
    Open,
    Pause,
    Paused,
    Ready,
    Serving,
    State,
    Status,
    StatusRequest,
    Taken,
    Unknown,
)
from stretto.weights.receive.loaders import Loader
from stretto.wire.connection import SILENCE
from stretto.wire.frames import close_files

log = logging.getLogger(__name__)
_EVER = 1e9  # seconds: signs of life bound the wait
_DECIDING = 120.0  # seconds for a sender that has opened to go on, or to say that it does not
_LONGEST = 7 * 24 * 3600.0  # seconds that a sender may ask for


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an engine does around an update. Each runs in the thread that serves."""

    pause: Callable[[InFlight], None] = _nothing
    """Stop generating; what is under way is waited for, aborted or kept for later. If the update then comes to nothing,
    `resume` is next."""
    begin: Callable[[], None] = _nothing
    """Get the engine's loading state ready, from whatever an earlier update has left. From here on an update that fails
    leaves the receiver dirty."""
    finish: Callable[[], None] = _nothing
    """All tensors are there: quantise, transpose, and so on."""
    flush_cache: Callable[[], None] = _nothing
    """Forget what was computed with the old weights."""
    resume: Callable[[], None] = _nothing


class ReceiverState:
    """A receiver's state, version and last error, as engines and senders are told of it."""

    def __init__(self, version: str, device: str) -> None:
        self._lock = threading.Lock()
        self._told = Status("serving", version, "", device, identity=secrets.token_hex(8))
        self.answering = False
        """Whether a sender waits for an answer."""
        self.opened = False
        """Whether a sender has been told that its version can come, and neither it nor its end has come."""

    @property
    def told(self) -> Status:
        with self._lock:
            return msgspec.structs.replace(self._told)

    @property
    def busy(self) -> bool:
        """Whether an update is under way."""
        return self.answering or self.opened

    def set(self, state: State, *, error: str = "") -> None:
        with self._lock:
            self._told.state, self._told.error = state, error
            if state == "dirty":  # it may hold anything
                self._told.assurance, self._told.content = None, ""

    def go_on_from(self, told: Status) -> None:
        with self._lock:
            state: State = "serving" if told.state == "serving" else "dirty"
            self._told = msgspec.structs.replace(told, state=state, identity=self._told.identity)

    def serve(self, version: str, content: str, assurance: Assurance) -> None:
        with self._lock:
            self._told.state, self._told.error = "serving", ""
            self._told.version, self._told.content, self._told.assurance = version, content, assurance


class Session:
    """With one sender, over any number of updates, until it leaves."""

    def __init__(
        self,
        connection: Connection,
        standing: ReceiverState,
        hooks: Hooks,
        device: torch.device,
        known: Callable[[Open], Manifest | None],
        loading: Callable[[Manifest, Open], Loader],
    ) -> None:
        """`known` gives the manifest of an offer, None if it has to be told; `loading` the way into the engine."""
        self._connection, self._standing, self._hooks, self._device = connection, standing, hooks, device
        self._known, self._made = known, loading
        self._buffers: OpenedBuffers | None = None
        self._loading: Loader | None = None
        self._laid: tuple[str, int, bool, int] | None = None
        self._manifest: Manifest | None = None
        self._opening: Open | None = None
        self._patience = _DECIDING
        self._before: State = "serving"
        self._touched = False
        self._ending: BaseException | None = None
        self._pool = threads()

    def hold(self, opening: Open, files: list[int]) -> None:
        self._connection.keep_beating(lambda: self._standing.answering)  # as long as the sender waits for an answer
        try:
            message: Message = opening
            while True:
                self._standing.answering = True
                self._answer(message, files)
                self._standing.answering = False
                message, files = self._heard()
        except PeerClosed as error:
            log.log(log_level(error), "the sender %s", error)
            self.fail(f"the sender {error}")
            if self._ending is not None:
                raise self._ending from None
        finally:
            self._standing.answering = self._standing.opened = False
            self._loading = None
            self._pool.shutdown()
            if self._buffers is not None:
                self._buffers.close()

    def _heard(self) -> tuple[Message, list[int]]:
        """What the sender says next; in the middle of an update it must say something, or leave us."""
        if not self._standing.opened:
            return self._connection.recv(seconds=_EVER)
        begun = time.monotonic()
        try:
            return self._connection.recv(seconds=self._patience)
        except PeerTimeout as error:
            if time.monotonic() - begun < self._patience:
                raise
            raise PeerTimeout(f"lives, but has not gone on for {self._patience:g} s") from error

    def _answer(self, message: Message, files: list[int]) -> None:
        answer: Message | None
        try:
            match message:
                case Open():
                    with uncollected():
                        answer = self._open(message, files)
                case Pause():
                    answer = self._pause(message)
                case Begin():
                    answer = self._begin()
                case Filled():
                    answer = self._load(message)
                case End():
                    answer = self._end()
                case Commit():
                    answer = self._commit()
                case Abandon():
                    self.fail(message.why)
                    answer = None
                case StatusRequest():
                    answer = self._standing.told
                case _:
                    raise WeightsError(f"did not expect {type(message).__name__}")
        except PeerClosed:
            raise
        except BaseException as error:
            why = str(error) if isinstance(error, WeightsError) else self._words("an update failed", error)
            self.fail(why, own=True)
            answer = Failed(why, dirty=self._standing.told.state == "dirty")
        finally:
            close_files(files)
        try:
            if answer is not None:
                self._connection.send(answer)
        finally:
            if self._ending is not None:
                raise self._ending

    def _expect(self, *states: State) -> None:
        state = self._standing.told.state
        if state not in states:
            raise WeightsError(f"that cannot be while {state}")

    def fail(self, why: str, *, own: bool = False) -> None:
        """What was not touched goes on; what was is dirty until a whole push has gone well.

        An error of this side's own is remembered in any state.
        """
        self._standing.opened = False
        state = self._standing.told.state
        if state in ("paused", "loading", "loaded"):
            if self._touched or self._before == "dirty":
                self._standing.set("dirty", error=why)
                return
            try:
                self._standing.set("serving", error=why)
                self._resume()
            except Exception as error:
                self._standing.set("dirty", error=f"{why}; and {error}")
        elif own:
            self._standing.set(state, error=why)

    def _resume(self) -> None:
        """An engine that resumes finds that it may serve; one that cannot is dirty."""
        try:
            self._hooks.resume()
        except BaseException as problem:
            why = self._words("the engine did not resume", problem)
            self._standing.set("dirty", error=why)
            raise WeightsError(why) from problem

    def _open(self, message: Open, files: list[int]) -> Message:
        self._expect("serving", "dirty")
        self._standing.opened, self._patience, self._opening = True, _DECIDING, None
        self._connection.silence = min(max(SILENCE, message.silence), _LONGEST)
        if message.bucket_bytes > message.buffers.nbytes:
            raise WeightsError(
                f"a bucket of {message.bucket_bytes} bytes does not fit a buffer of {message.buffers.nbytes}"
            )
        self._manifest = self._known(message)
        if self._manifest is None:
            return Unknown()
        if self._buffers is None or self._buffers.number != message.buffers.number:
            self._loading = None  # which has views of the old ones
            if self._buffers is not None:
                self._buffers.close()
                self._buffers = None
            self._buffers = OpenedBuffers(message.buffers, files, self._device)
        laid = message.digest, message.bucket_bytes, message.split, self._buffers.number
        if self._loading is None or self._laid != laid or not self._loading.holds():
            self._loading, self._laid = self._made(self._manifest, message), laid
            self._loading.prepare(self._buffers.tensors)
        self._opening = message
        return Ready(self._loading.skips, self._loading.alike)

    def _pause(self, message: Pause) -> Message:
        if self._loading is None or self._opening is None or not self._standing.opened:
            raise WeightsError("nothing was opened")
        self._expect("serving", "dirty")
        self._before, self._touched = self._standing.told.state, False
        self._patience = min(max(SILENCE, message.patience), _LONGEST)
        self._standing.set("paused")
        # A dirty one too, which may have been left in any state.
        self._hook("pause", lambda: self._hooks.pause(message.in_flight))
        return Paused()

    def _begin(self) -> Message:
        self._expect("paused")
        assert self._loading is not None
        self._standing.set("loading")
        self._change("begin", self._hooks.begin)
        told = self._hooks.pause, self._hooks.begin
        if told != (_nothing, _nothing) and not self._loading.holds():  # the engine has put others in their place
            assert self._manifest is not None
            assert self._opening is not None
            alike, self._loading = self._loading.alike, self._made(self._manifest, self._opening)
            if self._loading.alike != alike:
                raise WeightsError("the engine has made other tensors one, and what is pushed may differ for them")
        self._loading.begin()
        return Begun()

    def _load(self, message: Filled) -> Message:
        self._expect("loading")
        assert self._buffers is not None
        assert self._loading is not None
        if not (0 <= message.bucket < len(self._loading.buckets) and message.slot in (0, 1)):
            raise WeightsError(f"there is no bucket {message.bucket} in buffer {message.slot}")
        bucket = self._loading.buckets[message.bucket]
        buffer = self._buffers.tensors[message.slot]
        if digest_of(buffer[: bucket.nbytes], self._pool) != message.sum:
            raise WeightsError(f"{self._named(message.bucket)} arrived changed")
        self._touched = True
        try:
            self._loading.load(message.bucket, buffer, self._pool)
        except WeightsError as error:
            raise WeightsError(f"{self._named(message.bucket)}: {error}") from error
        except BaseException as error:
            raise WeightsError(self._words(f"the loader failed at {self._named(message.bucket)}", error)) from error
        # This waits for all that the stream was given, so for what the loader has begun too.
        if digest_of(buffer[: bucket.nbytes], self._pool) != message.sum:
            raise WeightsError(f"{self._named(message.bucket)} was changed while it was loaded")
        return Taken(message.bucket)

    def _hook(self, name: str, act: Callable[[], None]) -> None:
        """What an engine does, by its name if it fails."""
        try:
            act()
        except BaseException as error:
            raise WeightsError(self._words(f"the engine's {name} failed", error)) from error

    def _words(self, what: str, error: BaseException) -> str:
        """In words for the sender. What would end a process or thread does so once the sender has been told."""
        log.error("%s", what, exc_info=error)
        if not isinstance(error, Exception):
            self._ending = error
        return f"{what}: {named(error)}"

    def _change(self, name: str, act: Callable[[], None]) -> None:
        """What an engine does to its weights, or to what belongs to them."""
        self._touched = self._touched or act is not _nothing
        self._hook(name, act)

    def _bucket_of(self, name: str) -> str:
        assert self._manifest is not None
        assert self._loading is not None
        entries = self._manifest.entries
        found = (
            k for k, it in enumerate(self._loading.buckets) if any(entries[p.entry].name == name for p in it.pieces)
        )
        return f"bucket {next(found)}"

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
            raise WeightsError(f"the loader did not account for {missing[0]} of {self._bucket_of(missing[0])}{more}")
        if changed := self._loading.changed(self._pool):
            raise WeightsError(f"{changed} after it was loaded")
        self._change("finish", self._hooks.finish)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._standing.set("loaded")
        return Loaded()

    def _commit(self) -> Message:
        self._expect("loaded")
        self._change("flush_cache", self._hooks.flush_cache)
        assert self._opening is not None
        assert self._loading is not None
        assurance = self._loading.assurance()
        told = self._hooks.finish, self._hooks.flush_cache
        if assurance == "verified" and told != (_nothing, _nothing) and self._loading.changed(self._pool):
            assurance = "delivered"  # what an engine makes of its tensors in the end, nobody can vouch for
        self._standing.serve(self._opening.version, self._opening.content, assurance)
        self._standing.opened = False
        self._resume()
        return Serving(self._opening.version, assurance)
