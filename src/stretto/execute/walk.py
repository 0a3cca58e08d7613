"""Walks a rank's part of a program: every task a callable, made once, run in program order."""

from collections.abc import Callable, Sequence

from stretto.execute.lanes import Ticket
from stretto.execute.record import Recorder
from stretto.execute.streams import Streams, StreamTicket
from stretto.execute.supervise import Supervisor
from stretto.program.program import Program
from stretto.program.task import Task

Run = Callable[[], None]
Tickets = list[Ticket | StreamTicket]


class Walk:
    """Of a training step or of a weight update: whoever walks brings a table of what each task is."""

    def __init__(self, program: Program, supervisor: Supervisor) -> None:
        self.places = [place for place, task in enumerate(program.tasks()) if task.device == supervisor.rank]
        """This rank's tasks, by their place in the program."""
        self.tasks = [program.task(place) for place in self.places]
        self._supervisor, self._at = supervisor, 0

    def compile(self, table: Callable[[int, Task], Run]) -> list[Run]:
        """A callable for each task."""
        return [table(at, task) for at, task in enumerate(self.tasks)]

    def run(self, runs: Sequence[Run], recorder: Recorder | None = None, started: Tickets | None = None) -> None:
        """On the host. With a recorder, `started` is where tasks put what they have started."""
        self._supervisor.task = self._doing
        if recorder is not None and started is not None:
            for at, run in enumerate(runs):
                self._at = at
                recorder.run(at, run, lambda: self._supervisor.waited, started)
            return
        for at, run in enumerate(runs):
            self._at = at
            run()

    def queue(
        self,
        runs: Sequence[Run],
        streams: Streams,
        used: list[object] | None,
        recorder: Recorder | None = None,
        started: Tickets | None = None,
    ) -> None:
        """On a device: tasks are queued and not waited for. What they have `used` is kept until the device has."""
        self._supervisor.task = self._doing
        streams.begin()
        for at, run in enumerate(runs):
            self._at = at
            self._supervisor.check()
            streams.run(at, run, None if recorder is None else recorder.events(at), started)
            if used is not None:
                streams.keep(at, used.copy(), self._supervisor.check)
                used.clear()
        streams.end()

    def _doing(self) -> str:
        return str(self.tasks[self._at])
