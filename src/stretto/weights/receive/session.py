"""A session: a receiver handles the updates of one sender, and moves from state to state as the sender directs."""

import logging
import time
from collections.abc import Callable

import torch

from stretto.execute.host_memory import threads
from stretto.ir.errors import WeightsError, named
from stretto.weights.checksums import digest_of
from stretto.weights.connection import Connection, PeerClosed, PeerTimeout, log_level
from stretto.weights.host_memory import uncollected
from stretto.weights.ipc_buffers import OpenedBuffers
from stretto.weights.manifest import Manifest
from stretto.weights.messages import (
    Abandon,
    Begin,
    Begun,
    Commit,
    End,
    Failed,
    Filled,
    Loaded,
    Message,
    Open,
    Pause,
    Paused,
    Ready,
    Serving,
    State,
    StatusRequest,
    Taken,
    Unknown,
)
from stretto.weights.receive.loaders import Loader
from stretto.weights.receive.state import Hooks, ReceiverState, no_hook
from stretto.wire import timing
from stretto.wire.frames import close_files

log = logging.getLogger(__name__)
_FOREVER = 1e9  # seconds; heartbeats bound the wait
_DECISION_SECONDS = 120.0  # for a sender to pause or abandon an update after it has opened it
_MAX_SECONDS = 7 * 24 * 3600.0  # the longest timeout that a sender may ask for


class Session:
    """Handles the messages of one sender, over any number of updates, until it disconnects.

    An update that fails before the first write leaves the receiver serving its old version; one that fails after it
    leaves the receiver dirty.
    """

    def __init__(
        self,
        connection: Connection,
        state: ReceiverState,
        hooks: Hooks,
        device: torch.device,
        find_manifest: Callable[[Open], Manifest | None],
        make_loader: Callable[[Manifest, Open], Loader],
        start_answer: Callable[[], bool],
    ) -> None:
        """`find_manifest` returns the manifest of an offer, or None if the sender has to send it.

        `start_answer` marks the receiver as answering, and returns False if another sender has taken it over.
        """
        self._connection, self._state, self._hooks, self._device = connection, state, hooks, device
        self._find_manifest, self._make_loader, self._start_answer = find_manifest, make_loader, start_answer
        self._buffers: OpenedBuffers | None = None
        self._loader: Loader | None = None
        self._loader_key: tuple[str, int, bool, int] | None = None
        self._manifest: Manifest | None = None
        self._opening: Open | None = None
        self._patience = _DECISION_SECONDS
        self._state_before: State = "serving"
        self._touched = False  # whether this update may have changed the engine's weights
        self._fatal: BaseException | None = None  # such as SystemExit: raised once the sender has its answer
        self._pool = threads()

    def run(self, opening: Open, files: list[int]) -> None:
        """Answer the sender's messages until it disconnects."""
        self._connection.keep_beating(lambda: self._state.answering)  # while the sender waits for an answer
        try:
            message: Message = opening
            while True:
                if not self._start_answer():
                    close_files(files)
                    raise PeerClosed("gave way to another sender")
                self._answer(message, files)
                self._state.answering = False
                message, files = self._next_message()
        except PeerClosed as error:
            log.log(log_level(error), "the sender %s", error)
            self.fail(f"the sender {error}")
            if self._fatal is not None:
                raise self._fatal from None
        finally:
            self._state.answering = self._state.opened = False
            self._loader = None
            self._pool.shutdown()
            if self._buffers is not None:
                self._buffers.close()

    def _next_message(self) -> tuple[Message, list[int]]:
        """Return the sender's next message; during an update, raise PeerTimeout if it does not come in time."""
        if not self._state.opened:
            return self._connection.recv(seconds=_FOREVER)
        start = time.monotonic()
        try:
            return self._connection.recv(seconds=self._patience)
        except PeerTimeout as error:
            if time.monotonic() - start < self._patience:
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
                    answer = self._state.status
                case _:
                    raise WeightsError(f"did not expect {type(message).__name__}")
        except PeerClosed:
            raise
        except BaseException as error:
            why = str(error) if isinstance(error, WeightsError) else self._describe("an update failed", error)
            self.fail(why, own=True)
            answer = Failed(why, dirty=self._state.status.state == "dirty")
        finally:
            close_files(files)
        try:
            if answer is not None:
                self._connection.send(answer)
        finally:
            if self._fatal is not None:
                raise self._fatal

    def _expect(self, *states: State) -> None:
        state = self._state.status.state
        if state not in states:
            raise WeightsError(f"that cannot be while {state}")

    def fail(self, why: str, *, own: bool = False) -> None:
        """End an update that failed: resume an untouched engine; a touched one is dirty until a push succeeds.

        An error of the receiver's own (`own`) is recorded in any state.
        """
        self._state.opened = False
        state = self._state.status.state
        if state in ("paused", "loading", "loaded"):
            if self._touched or self._state_before == "dirty":
                self._state.set("dirty", error=why)
                return
            try:
                self._state.set("serving", error=why)
                self._resume()
            except Exception as error:
                self._state.set("dirty", error=f"{why}; and {error}")
        elif own:
            self._state.set(state, error=why)

    def _resume(self) -> None:
        """Call the resume hook, in which the engine may serve already; if the hook fails, the receiver is dirty."""
        self._state.engine_paused = False  # even if it fails: then nobody knows
        try:
            self._hooks.resume()
        except BaseException as error:
            why = self._describe("the engine did not resume", error)
            self._state.set("dirty", error=why)
            raise WeightsError(why) from error

    def _open(self, message: Open, files: list[int]) -> Message:
        self._expect("serving", "dirty")
        self._state.opened, self._patience, self._opening = True, _DECISION_SECONDS, None
        self._connection.silence = min(max(timing.SILENCE, message.silence), _MAX_SECONDS)
        if message.bucket_bytes > message.buffers.nbytes:
            raise WeightsError(
                f"a bucket of {message.bucket_bytes} bytes does not fit a buffer of {message.buffers.nbytes}"
            )
        self._manifest = self._find_manifest(message)
        if self._manifest is None:
            return Unknown()
        if self._buffers is None or self._buffers.number != message.buffers.number:
            self._loader = None  # it has views of the old buffers
            if self._buffers is not None:
                self._buffers.close()
                self._buffers = None
            self._buffers = OpenedBuffers(message.buffers, files, self._device)
        key = message.digest, message.bucket_bytes, message.split, self._buffers.number
        if self._loader is None or self._loader_key != key or not self._loader.holds():
            self._loader, self._loader_key = self._make_loader(self._manifest, message), key
            self._loader.prepare(self._buffers.tensors)
        self._opening = message
        return Ready(self._loader.skips, self._loader.alike)

    def _pause(self, message: Pause) -> Message:
        if self._loader is None or self._opening is None or not self._state.opened:
            raise WeightsError("nothing was opened")
        self._expect("serving", "dirty")
        self._state_before, self._touched = self._state.status.state, False
        self._patience = min(max(timing.SILENCE, message.patience), _MAX_SECONDS)
        self._state.set("paused")
        if not self._state.engine_paused:
            self._run_hook("pause", lambda: self._hooks.pause(message.in_flight))
            self._state.engine_paused = True
        self._run_hook("prepare", self._hooks.prepare)
        return Paused()

    def _begin(self) -> Message:
        self._expect("paused")
        assert self._loader is not None
        self._state.set("loading")
        self._run_changing_hook("begin", self._hooks.begin)
        hooks = self._hooks.pause, self._hooks.prepare, self._hooks.begin
        if hooks != (no_hook,) * 3 and not self._loader.holds():  # the engine has replaced live tensors
            assert self._manifest is not None
            assert self._opening is not None
            alike, self._loader = self._loader.alike, self._make_loader(self._manifest, self._opening)
            if self._loader.alike != alike:
                raise WeightsError("the engine has made other tensors one, and what is pushed may differ for them")
        self._loader.begin()
        return Begun()

    def _load(self, message: Filled) -> Message:
        self._expect("loading")
        assert self._buffers is not None
        assert self._loader is not None
        if not (0 <= message.bucket < len(self._loader.buckets) and message.slot in (0, 1)):
            raise WeightsError(f"there is no bucket {message.bucket} in buffer {message.slot}")
        bucket = self._loader.buckets[message.bucket]
        buffer = self._buffers.tensors[message.slot]
        if digest_of(buffer[: bucket.nbytes], self._pool) != message.sum:
            raise WeightsError(f"{self._named(message.bucket)} arrived changed")
        self._touched = True
        try:
            self._loader.load(message.bucket, buffer, self._pool)
        except WeightsError as error:
            raise WeightsError(f"{self._named(message.bucket)}: {error}") from error
        except BaseException as error:
            raise WeightsError(self._describe(f"the loader failed at {self._named(message.bucket)}", error)) from error
        # The checksum runs after all work on the stream, so after everything that the loader has started.
        if digest_of(buffer[: bucket.nbytes], self._pool) != message.sum:
            raise WeightsError(f"{self._named(message.bucket)} was changed while it was loaded")
        return Taken(message.bucket)

    def _run_hook(self, name: str, hook: Callable[[], None]) -> None:
        """Run a hook; an error names it."""
        try:
            hook()
        except BaseException as error:
            raise WeightsError(self._describe(f"the engine's {name} failed", error)) from error

    def _describe(self, what: str, error: BaseException) -> str:
        """Log an error and describe it for the sender.

        One that would end the process or thread, such as SystemExit, is raised again once the sender has its answer.
        """
        log.error("%s", what, exc_info=error)
        if not isinstance(error, Exception):
            self._fatal = error
        return f"{what}: {named(error)}"

    def _run_changing_hook(self, name: str, hook: Callable[[], None]) -> None:
        """Run a hook that may change the engine's weights."""
        self._touched = self._touched or hook is not no_hook
        self._run_hook(name, hook)

    def _bucket_of(self, name: str) -> str:
        assert self._manifest is not None
        assert self._loader is not None
        entries = self._manifest.entries
        numbers = (
            number
            for number, bucket in enumerate(self._loader.buckets)
            if any(entries[piece.entry].name == name for piece in bucket.pieces)
        )
        return f"bucket {next(numbers)}"

    def _named(self, bucket: int) -> str:
        """Describe a bucket by its number and its tensors."""
        assert self._manifest is not None
        assert self._loader is not None
        pieces = self._loader.buckets[bucket].pieces
        first, last = (self._manifest.entries[piece.entry].name for piece in (pieces[0], pieces[-1]))
        return f"bucket {bucket} ({first})" if len(pieces) == 1 else f"bucket {bucket} ({first} … {last})"

    def _end(self) -> Message:
        self._expect("loading")
        assert self._loader is not None
        missing = self._loader.missing()
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise WeightsError(f"the loader did not account for {missing[0]} of {self._bucket_of(missing[0])}{more}")
        if changed := self._loader.changed(self._pool):
            raise WeightsError(f"{changed} after it was loaded")
        self._run_changing_hook("finish", self._hooks.finish)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._state.set("loaded")
        return Loaded()

    def _commit(self) -> Message:
        self._expect("loaded")
        self._run_changing_hook("flush_cache", self._hooks.flush_cache)
        assert self._opening is not None
        assert self._loader is not None
        assurance = self._loader.assurance()
        hooks = self._hooks.finish, self._hooks.flush_cache
        if assurance == "verified" and hooks != (no_hook, no_hook) and self._loader.changed(self._pool):
            assurance = "delivered"  # the engine's hooks have changed its tensors
        self._state.serve(self._opening.version, self._opening.content, assurance)
        self._state.opened = False
        self._resume()
        return Serving(self._opening.version, assurance)
