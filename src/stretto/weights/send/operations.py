"""Guards a sender's operations: one at a time, and none after a failure of the group or after `close`."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from stretto.execute.team import Team
from stretto.ir.errors import PeerError, WeightsError, named


class Operations:
    """Whether a sender can start an operation."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._broken, self._busy = "", threading.Lock()
        self.closed = False

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Raise WeightsError if another operation is running, or if the sender is broken or closed."""
        if self.closed:
            raise WeightsError("this sender is closed")
        if self._broken:
            raise WeightsError(f"this sender cannot go on: {self._broken}; start the senders again")
        if not self._busy.acquire(blocking=False):
            raise WeightsError("this sender is at work in another thread")
        try:
            with torch.inference_mode(False):  # memory that we keep is also used outside inference mode
                yield
        finally:
            self._busy.release()

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Break this sender if another sender fails, or if an unexpected error occurs here."""
        try:
            yield
        except WeightsError:
            raise
        except PeerError as error:
            self.break_off(str(error))
            raise WeightsError(f"{error}; start the senders again") from error
        except BaseException as error:
            self._broken = f"rank {self._team.rank}: {named(error)}"
            self._team.supervisor.fail(self._broken)
            self._team.end()
            raise

    def break_off(self, why: str) -> None:
        """Make this sender unusable and leave the group."""
        self._broken = why
        self._team.end()
