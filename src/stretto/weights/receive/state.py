"""What a receiver's session works with: the engine's hooks, and the receiver's status."""

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from stretto.weights.messages import Assurance, InFlight, State, Status


def no_hook(*_: Any) -> None:
    """Do nothing: the hook of an engine that gives none."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an engine does around an update. All hooks run in the receiver's serving thread.

    `pause` and `resume` alternate: after an update that failed once it had begun, the engine stays paused, and the next
    update does not call `pause` again. Only if `pause` or `resume` itself has failed, which leaves the engine in an
    unknown state, is `pause` called again before `resume`.
    """

    pause: Callable[[InFlight], None] = no_hook
    """Stop generating, and wait for, abort or keep the requests in flight: when it returns, nothing reads the weights
    any more. If the update is then abandoned, or if `pause` fails, `resume` is called next."""
    prepare: Callable[[], None] = no_hook
    """Called in each update while the engine is paused, before anything is changed. If it fails, the engine is as it
    was."""
    begin: Callable[[], None] = no_hook
    """Prepare the engine for loading, whatever state an earlier update has left it in. If the update fails after this,
    the receiver is dirty."""
    finish: Callable[[], None] = no_hook
    """All tensors are loaded: quantise, transpose, and so on."""
    flush_cache: Callable[[], None] = no_hook
    """Drop everything that was computed with the old weights."""
    resume: Callable[[], None] = no_hook


class ReceiverState:
    """The status of a receiver, shared by its threads."""

    def __init__(self, version: str, device: str) -> None:
        self._lock = threading.Lock()
        self._status = Status("serving", version, "", device, identity=secrets.token_hex(8))
        self.answering = False
        """Whether a sender waits for an answer."""
        self.opened = False
        """Whether a sender has opened an update that has not ended."""
        self.engine_paused = False
        """Whether the engine's `pause` has succeeded since its last `resume`."""

    @property
    def status(self) -> Status:
        with self._lock:
            return msgspec.structs.replace(self._status)

    @property
    def busy(self) -> bool:
        """Whether an update is in progress."""
        return self.answering or self.opened

    def set(self, state: State, *, error: str | None = None) -> None:
        """Change the state; the error of the last update stays unless another is given."""
        with self._lock:
            self._status.state = state
            self._status.error = self._status.error if error is None else error
            if state == "dirty":  # the content is unknown
                self._status.assurance, self._status.content = None, ""

    def go_on_from(self, previous: Status) -> None:
        """Take over the status of a closed receiver, but not its identity."""
        with self._lock:
            state: State = "serving" if previous.state == "serving" else "dirty"
            self._status = msgspec.structs.replace(previous, state=state, identity=self._status.identity)

    def serve(self, version: str, content: str, assurance: Assurance) -> None:
        with self._lock:
            self._status.state, self._status.error = "serving", ""
            self._status.version, self._status.content, self._status.assurance = version, content, assurance
