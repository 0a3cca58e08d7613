"""What a rank's tasks are in a step: forwards, backwards and transfers, as callables that a walk runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stretto.execute.record import Recorder
from stretto.execute.streams import Streams, StreamTicket
from stretto.execute.supervise import Supervisor
from stretto.execute.walk import Run, Tickets, Walk
from stretto.ir.errors import PipelineError
from stretto.program.program import Program
from stretto.program.task import WEIGHTS, Kind, Task
from stretto.runtime.links import Links
from stretto.runtime.losses import Losses
from stretto.runtime.rooms import Lent, Rooms, share_rooms
from stretto.runtime.segments import Grads
from stretto.runtime.stage import Stage
from stretto.runtime.structure import Room, Value, make_room, rooms_of


@dataclass(slots=True)
class _Arrival:
    """Something that was asked for; there once its tickets are done."""

    lent: Lent
    tickets: Tickets


class Passes:
    """A step, of training or of evaluation. Values and gradients wait between tasks, by stage and microbatch."""

    def __init__(
        self, program: Program, supervisor: Supervisor, stages: dict[int, Stage], links: Links, *, training: bool = True
    ) -> None:
        self._training = training
        self._program, self._stages, self._links = program, stages, links
        self._supervisor = supervisor
        self._last = program.placement.stages - 1
        self._inputs: list[Value] | None = None
        self._losses: Losses | None = None
        self._values: dict[tuple[int, int], Value | _Arrival] = {}
        self._grads: dict[tuple[int, int], Grads | _Arrival] = {}
        self._outputs: dict[tuple[int, int], Value] = {}
        self._sent: dict[tuple[int, int], list[Room | None]] = {}  # what was sent, of which gradients will come
        self._walk = Walk(program, supervisor)
        self.tasks = self._walk.tasks
        self._rooms = Rooms()
        self._room_of, after = ({}, {}) if links.varying else share_rooms(self.tasks)
        on_device = links.device.type == "cuda"
        self._streams = Streams(program, self.tasks, self._walk.places, after) if on_device else None
        keeps = self._streams is not None and (self._streams.keeps or links.varying)  # rooms for once are a lane's own
        self._used: list[object] | None = [] if keeps else None
        self._runs = self._walk.compile(self._compiled)

    def run(self, inputs: list[Value] | None, losses: Losses, recorder: Recorder | None = None) -> None:
        self._inputs, self._losses = inputs, losses
        started: Tickets | None = [] if recorder is not None else None
        self._links.started = started
        try:
            if self._streams is not None:
                for stage in self._stages.values():
                    stage.used = self._used
                self._walk.queue(self._runs, self._streams, self._used, recorder, started)
            else:
                self._walk.run(self._runs, recorder, started)
        finally:
            self._links.started = None
            self._values.clear()
            self._grads.clear()
            self._outputs.clear()
            self._sent.clear()
            for stage in self._stages.values():
                stage.forget()

    def _there(self, value: Any, what: Callable[[], str]) -> tuple[Any, Lent | None]:
        """Waits for what was asked for. What came from another device is lent."""
        if not isinstance(value, _Arrival):
            return value, None
        for ticket in value.tickets:
            if isinstance(ticket, StreamTicket):
                ticket.work.wait()  # the stream does; the host goes on
            else:
                self._supervisor.wait(ticket, what)
        return value.lent.value, value.lent

    def _compiled(self, at: int, task: Task) -> Run:
        stage, microbatch, part = task.stage, task.microbatch, task.part
        match task.kind:
            case Kind.F:
                return self._forward(stage, microbatch, part)
            case Kind.B | Kind.I:
                return self._backward(stage, microbatch, part)
            case Kind.PAIR:
                assert task.backward is not None
                forward, backward = self._forward(stage, microbatch, 0), self._backward(*task.backward, 0)

                def both() -> None:
                    forward()
                    backward()

                return both
            case kind if kind in WEIGHTS:
                of = self._stages[stage]
                return lambda: of.weight(microbatch, part)
            case Kind.SEND_F | Kind.RECV_F | Kind.SEND_B | Kind.RECV_B:
                assert task.lane.peer is not None
                return self._transfer(at, task.kind, stage, microbatch, task.lane.peer)
            case _:
                raise PipelineError(f"{task} cannot be run: a pipeline moves no activations to host memory")

    def _forward(self, stage: int, microbatch: int, part: int) -> Run:
        of, here = self._stages[stage], (stage, microbatch)
        run = of.forward if self._training else of.evaluate
        ends = part == len(self._program.anatomy.forward[stage]) - 1
        local = stage + 1 in self._stages and self._placed(stage + 1, microbatch) == self._placed(stage, microbatch)

        def forward() -> None:
            lent = None
            if part or stage:
                value, lent = self._there(self._values.pop(here), lambda: f"the output of {stage - 1}F{microbatch}")
            else:
                assert self._inputs is not None
                value = self._inputs[microbatch]
            if ends and stage == self._last:
                losses = self._losses
                assert losses is not None
                run(microbatch, part, value, lambda out: losses(out, microbatch))
                return
            out = run(microbatch, part, value)
            if lent is not None:
                out = lent.own(out)
            if self._used is not None:
                self._used += (value, out)
            if not ends:
                self._values[here] = out
            elif local:
                self._values[stage + 1, microbatch] = out
            else:
                self._outputs[here] = out

        return forward

    def _backward(self, stage: int, microbatch: int, part: int) -> Run:
        of, here = self._stages[stage], (stage, microbatch)
        ends = part == len(self._program.anatomy.forward[stage]) - 1

        def backward() -> None:
            if part == 0 and stage == self._last:
                assert self._losses is not None
                grads: Grads = [self._losses.seed(microbatch)]
                lent = None
            else:
                grads, lent = self._there(self._grads.pop(here), lambda: f"the gradient of {stage + 1}B{microbatch}")
            out = of.backward(microbatch, part, grads)
            if lent is not None:
                out = lent.own(out)
            if self._used is not None:
                self._used += (grads, out)
            if not ends:
                self._grads[here] = out
            elif stage:
                self._grads[stage - 1, microbatch] = out  # for that stage, or to be sent

        return backward

    def _placed(self, stage: int, microbatch: int) -> int:
        return self._program.placement.device(stage, microbatch)

    def _transfer(self, at: int, kind: Kind, stage: int, microbatch: int, peer: int) -> Run:
        links, here = self._links, (stage, microbatch)

        def send_value() -> None:
            value = self._outputs.pop(here)
            self._sent[here] = rooms_of(value)
            links.send(peer, value, stage)

        def receive_value() -> None:
            what = links.expect(peer, stage - 1)
            self._values[here] = self._receive(at, peer, lambda: make_room(what, links.device))

        def send_grads() -> None:
            grads = self._grads.pop((stage - 1, microbatch))
            assert not isinstance(grads, _Arrival)
            links.send_tensors(peer, [grad for grad in grads if grad is not None])

        def receive_grads() -> None:
            rooms = self._sent.pop(here)
            self._grads[here] = self._receive(at, peer, lambda: [room and room.empty() for room in rooms])

        return {
            Kind.SEND_F: send_value,
            Kind.RECV_F: receive_value,
            Kind.SEND_B: send_grads,
            Kind.RECV_B: receive_grads,
        }[kind]

    def _receive(self, at: int, peer: int, make: Callable[[], Value]) -> _Arrival:
        lent = self._rooms.take(self._room_of.get(at), make)
        return _Arrival(lent, self._links.receive(peer, lent.tensors))
