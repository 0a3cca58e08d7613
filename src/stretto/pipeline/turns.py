"""The turns that all ranks of a pipeline take together, such as steps; after one that failed, no more can run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from stretto.execute.team import Team
from stretto.ir.errors import PipelineError, named
from stretto.pipeline.transfers import Transfers


class Turns:
    """Runs the turns of a pipeline under its team's supervisor, and ends the pipeline if one fails."""

    def __init__(self, team: Team, transfers: Transfers, closing: Sequence[Callable[[], None]]) -> None:
        """`closing` are functions that close further connections."""
        self._team, self._transfers, self._closing = team, transfers, closing
        self._finished = ""  # why no turn can run any more

    @property
    def is_open(self) -> bool:
        """Whether turns can run."""
        return not self._finished

    def validate_open(self) -> None:
        """Raise PipelineError if no turn can run any more."""
        if self._finished:
            raise PipelineError(f"{self._finished}; make a new one")

    @contextmanager
    def guarding(self, label: str = "") -> Iterator[None]:
        """Guard a turn with this label, or more of the last one: tell all ranks of a failure, and end the pipeline."""
        try:
            with self._team.supervisor.guarding(label):
                try:
                    yield
                except RuntimeError as error:
                    # A collective inside a layer may fail too, because another rank has failed.
                    known = self._team.supervisor.has_failed or "gloo/" in str(error) or self._has_broken()
                    if not known:
                        raise
                    raise self._team.supervisor.explained(error, "the others") from error
        except BaseException as error:
            self._finished = f"this pipeline has failed and is finished ({named(error)})"
            self._team.end()
            self._close_links()
            raise

    def catch_up(self, needed: bool = True) -> None:
        """Make the host wait until the device has done all work queued so far."""
        if needed:
            self._team.catch_up("the device to end the step")

    def close(self) -> None:
        """Close all connections and threads."""
        self._finished = self._finished or "this pipeline was closed"
        self._team.close()
        self._close_links()

    def _close_links(self) -> None:
        self._transfers.close()
        for close in self._closing:
            close()

    def _has_broken(self) -> bool:
        """Return whether a nonblocking process group has failed."""
        try:
            self._team.check_groups()
        except RuntimeError:
            return True
        return False
