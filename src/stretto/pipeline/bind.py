"""What a rank's tasks are in a step: forwards, backwards and transfers, as callables for the executor."""

from collections.abc import Callable, Collection, Hashable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from stretto.execute.device_lanes import DeviceLanes
from stretto.execute.executor import Act, Executor, HostLanes, Lanes
from stretto.execute.host_lanes import Work
from stretto.execute.recorder import Recorder
from stretto.execute.supervisor import Supervisor
from stretto.ir.errors import PipelineError
from stretto.pipeline.descriptions import Description
from stretto.pipeline.losses import Losses
from stretto.pipeline.pytree import LEAF, Tree, Value, demand_unchanged, entering
from stretto.pipeline.recv_buffers import RecvBuffer, RecvBuffers, share_recv_buffers
from stretto.pipeline.rng import RngKey
from stretto.pipeline.segments import Grads
from stretto.pipeline.shape_cache import Messages, ShapeCache
from stretto.pipeline.stage import Stage
from stretto.pipeline.transfers import Arrival, Channel, Transfers
from stretto.program.program import Program
from stretto.program.task import WEIGHTS, Kind, Task
from stretto.program.wgrads import joined_ends


class StepBinding:
    """A step, of training or of evaluation. Values and gradients wait between tasks, by stage and microbatch."""

    def __init__(
        self,
        program: Program,
        supervisor: Supervisor,
        stages: dict[int, Stage],
        transfers: Transfers,
        *,
        reduce: Callable[[tuple[int, ...]], Work | None] | None = None,
        shape_cache: ShapeCache | None = None,
    ) -> None:
        """With `reduce`, which sums the gradients of stages over ranks, a step of training. Without `precedents` every
        message is described.
        """
        self._shape_cache = shape_cache
        self._known: Messages | None = None  # if it is known how the messages of this step look
        self._described: dict[int, Description | Arrival] = {}  # how they look, as far as it was told
        self._transfer_count = 0
        self._training, self._reduce = reduce is not None, reduce
        self._program, self._stages, self._transfers = program, stages, transfers
        self._last = program.placement.stages - 1
        self._inputs: list[Value] | None = None
        self._rows = 0  # of the whole batch of inputs, 0 if nobody has told
        self._losses: Losses | None = None
        self._differentiated: dict[int, list[Any]] = {}  # the leaves of inputs that require gradients
        self._input_grads: list[tuple[Tensor, Tensor]] = []
        self._values: dict[tuple[int, int], Tree | Arrival] = {}
        self._versions: dict[tuple[int, int], list[int]] = {}  # of values that wait here for the next stage
        self._grads: dict[tuple[int, int], Grads | Arrival] = {}
        self._outputs: dict[tuple[int, int], Tree] = {}
        self._executor = Executor(program, supervisor)
        self.tasks = self._executor.tasks
        self._recv_buffers = RecvBuffers(transfers.device)
        ends = joined_ends(self.tasks, program.anatomy.wgrad_microbatches)
        self._joins = {self.tasks[at] for at in ends}
        taken, after = share_recv_buffers(self.tasks, ends)
        self._buffer_of = {self.tasks[at]: buffer_key for at, buffer_key in taken.items()}
        on_device = transfers.device.type == "cuda"
        self.several_streams = on_device and any(task.lane.name == "comm" for task in self.tasks)
        """Whether several streams of a device compute."""
        self._used: list[object] | None = [] if self.several_streams else None
        lanes: Lanes = (
            DeviceLanes(self._executor, after, self._used)
            if on_device
            else HostLanes(self._executor, transfers.lanes, begins=True)
        )
        self._executor.bind(lanes, self._bound)

    def begin(self, begin: Callable[[], Hashable | None]) -> None:
        """A step is to be run. Those that `begin` alike on each rank have messages that look alike."""
        if self._shape_cache is not None:
            self._shape_cache.begin(begin())

    def run(
        self,
        inputs: list[Value] | None,
        losses: Losses,
        recorder: Recorder | None = None,
        *,
        key: RngKey | None = None,
        rows: int = 0,
    ) -> None:
        """`rows` are those of inputs that were given whole."""
        self._inputs, self._losses, self._rows = inputs, losses, rows
        self._input_grads = []
        with ExitStack() as opened:
            for stage in self._stages.values():
                stage.used = self._used
                opened.enter_context(stage.running(key or RngKey(), training=self._training))
            try:
                self._known = None if self._shape_cache is None else self._shape_cache.find()
                self._executor.run(recorder)
                if self._shape_cache is not None and self._known is None:
                    self._shape_cache.learn({number: _look(it) for number, it in self._described.items()})
            finally:
                self._transfers.forget()
                self._described.clear()
                self._values.clear()
                self._versions.clear()
                self._grads.clear()
                self._outputs.clear()
                self._differentiated.clear()

    def has_behind(self, losses: Losses) -> bool:
        """Whether inputs or targets require gradients."""
        return bool(self._input_grads or losses.cut)

    def behind(self, losses: Losses, own: Collection[int]) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets that require gradients, and these; what is behind them is taken in. `own` are those that
        the user gave.
        """
        inputs, self._input_grads = self._input_grads, []
        targets = [(target, given.grad) for target, given in losses.cut.values() if given.grad is not None]
        for stage, given in ((0, inputs), (self._last, targets)):
            if given:
                self._stages[stage].take_behind([tensor for tensor, _ in given], own)
        return inputs + targets

    def _bound(self, task: Task) -> Act:
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
                of, joins = self._stages[stage], task in self._joins
                return lambda: of.weight(microbatch, part, joins=joins)
            case Kind.REDUCE:
                assert self._reduce is not None
                return partial(self._reduce, self._program.anatomy.summed(stage, part))
            case Kind.SEND_F | Kind.RECV_F | Kind.SEND_B | Kind.RECV_B:
                assert task.lane.peer is not None
                return self._transfer(task, task.lane.peer)
            case _:
                raise PipelineError(f"{task} cannot be run: a pipeline moves no activations to host memory")

    def _forward(self, stage: int, microbatch: int, part: int) -> Act:
        of, here = self._stages[stage], (stage, microbatch)
        run = of.forward if self._training else of.evaluate
        ends = part == len(self._program.anatomy.forward[stage]) - 1
        local = stage + 1 in self._stages and self._placed(stage + 1, microbatch) == self._placed(stage, microbatch)

        def forward() -> None:
            lent = None
            if part or stage:
                waits = self._values.pop(here)
                if isinstance(waits, Arrival):
                    given, lent = waits.taken()
                    assert waits.what is not None
                    self._rows = waits.what.rows
                else:
                    given = waits
                    if here in self._versions:
                        demand_unchanged(given, self._versions.pop(here))
            else:
                assert self._inputs is not None
                given, leaves = entering(self._inputs[microbatch])
                if leaves and self._training:
                    self._differentiated[microbatch] = leaves
            if ends and stage == self._last:
                losses = self._losses
                assert losses is not None
                out = run(microbatch, part, given, losses.of(microbatch, self._rows))
                if self._training:
                    self._grads[here] = [losses.seed(out.leaves[0])]
                return
            out = run(microbatch, part, given)
            if lent is not None:
                out = lent.own(out)
            if self._used is not None:
                self._used += (given, out)
            if not ends:
                self._values[here] = out
            elif local:
                self._values[stage + 1, microbatch] = out
                self._versions[stage + 1, microbatch] = out.versions()
            else:
                self._outputs[here] = out

        return forward

    def _backward(self, stage: int, microbatch: int, part: int) -> Act:
        of, here = self._stages[stage], (stage, microbatch)
        ends = part == len(self._program.anatomy.forward[stage]) - 1

        def backward() -> None:
            waits, lent = self._grads.pop(here), None
            grads: Grads
            if isinstance(waits, Arrival):
                tree, lent = waits.taken()
                grads = tree.leaves
            else:
                grads = waits
            out = of.backward(microbatch, part, grads)
            if lent is not None:
                out = [grad.clone() if grad is not None and lent.holds(grad) else grad for grad in out]
            if self._used is not None:
                self._used += (grads, out)
            if not ends:
                self._grads[here] = out
            elif stage:
                self._grads[stage - 1, microbatch] = out  # for that stage, or to be sent
            elif microbatch in self._differentiated:
                leaves = self._differentiated.pop(microbatch)
                self._input_grads += [(x, grad) for x, grad in zip(leaves, out, strict=True) if grad is not None]

        return backward

    def _placed(self, stage: int, microbatch: int) -> int:
        return self._program.placement.device(stage, microbatch)

    def _transfer(self, task: Task, peer: int) -> Act:
        transfers, stage, microbatch = self._transfers, task.stage, task.microbatch
        here = stage, microbatch
        number, self._transfer_count = self._transfer_count, self._transfer_count + 1

        def buffer_for(what: Description) -> RecvBuffer:
            return self._recv_buffers.take(self._buffer_of[task], what)

        def send(kind: Kind, tree: Tree, rows: int, of: str) -> Work | None:
            if self._known is not None:
                return transfers.send_as(self._known[number], peer, tree, rows, of)
            self._described[number], begun = transfers.send(peer, (kind, stage), tree, rows)
            return begun

        def receive(channel: Channel) -> tuple[Arrival, Work | None]:
            if self._known is not None:
                return transfers.receive_as(self._known[number], peer, channel, buffer_for, task.awaited)
            arrival, begun = transfers.receive(peer, channel, buffer_for, task.awaited)
            self._described[number] = arrival
            return arrival, begun

        def send_value() -> Work | None:
            return send(Kind.SEND_F, self._outputs.pop(here), self._rows, f"stage {stage} hands on")

        def receive_value() -> Work | None:
            self._values[here], begun = receive((Kind.SEND_F, stage - 1))
            return begun

        def send_grads() -> Work | None:
            grads = self._grads.pop((stage - 1, microbatch))
            assert not isinstance(grads, Arrival)
            return send(Kind.SEND_B, _tree_of(grads), 0, f"stage {stage} hands back")

        def receive_grads() -> Work | None:
            self._grads[here], begun = receive((Kind.SEND_B, stage + 1))
            return begun

        return {
            Kind.SEND_F: send_value,
            Kind.RECV_F: receive_value,
            Kind.SEND_B: send_grads,
            Kind.RECV_B: receive_grads,
        }[task.kind]


def _look(described: Description | Arrival) -> Description:
    """What a message looked like that was sent, or has come."""
    what = described.what if isinstance(described, Arrival) else described
    assert what is not None, "a message that nobody has waited for"
    return what


def _tree_of(grads: Grads) -> Tree:
    """Gradients as a message: a list, None for leaves that have none."""
    leaves = [grad.to_dense() if isinstance(grad, Tensor) and grad.is_sparse else grad for grad in grads]
    return Tree(list(leaves), list_of(len(leaves)), [False] * len(leaves))


@cache
def list_of(count: int) -> pytree.TreeSpec:
    """The structure of a list of so many leaves; of one, the leaf's own."""
    return LEAF if count == 1 else pytree.tree_structure([0] * count)
