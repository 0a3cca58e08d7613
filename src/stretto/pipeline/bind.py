"""Binds a rank's tasks (forwards, backwards, transfers, sums) to callables that the executor runs."""

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from stretto.execute.device_lanes import DeviceLanes
from stretto.execute.executor import Act, Executor, HostLanes, Lanes
from stretto.execute.host_lanes import Work
from stretto.execute.recorder import Recorder
from stretto.execute.supervisor import Supervisor
from stretto.ir.errors import PipelineError
from stretto.pipeline.arrivals import Arrival, Channel
from stretto.pipeline.descriptions import Description
from stretto.pipeline.host_pool import HostPool
from stretto.pipeline.losses import Losses
from stretto.pipeline.measures import Measures
from stretto.pipeline.microbatches import Microbatches
from stretto.pipeline.pytree import LEAF, Tree, Value, entering, validate_unchanged
from stretto.pipeline.recv_buffers import BufferKey, RecvBuffer, RecvBuffers, share_recv_buffers
from stretto.pipeline.rng import RngKey
from stretto.pipeline.segments import Grads
from stretto.pipeline.shape_cache import Messages, ShapeCache
from stretto.pipeline.stage import Stage
from stretto.pipeline.transfers import Transfers
from stretto.program.program import Program
from stretto.program.task import EXPERT_SUM, WEIGHTS, Kind, Task
from stretto.program.wgrads import joined_ends


class Reduce(Protocol):
    """Starts to sum the gradients of stages over ranks: those of experts, or of all else."""

    def __call__(self, stages: tuple[int, ...], *, experts: bool) -> Work | None: ...


class StepBinding:
    """A training or evaluation step of one program; run it any number of times.

    Between tasks, values and gradients are stored by (stage, microbatch).
    """

    def __init__(
        self,
        program: Program,
        supervisor: Supervisor,
        stages: dict[int, Stage],
        transfers: Transfers,
        *,
        reduce: Reduce | None = None,
        shape_cache: ShapeCache | None = None,
        host_bytes: int | None = None,
    ) -> None:
        """Bind every task of the program.

        `reduce` sums the gradients of stages over ranks; without it, this is an evaluation step. Without a
        `shape_cache`, every message carries its description. `host_bytes` is the most host memory to offload to.
        """
        self._shape_cache = shape_cache
        self._known: Messages | None = None  # this step's descriptions, if an earlier step began alike
        self._described: dict[int, Description | Arrival] = {}  # the descriptions that this step exchanged, by transfer
        self._transfer_count = 0
        self._training, self._reduce = reduce is not None, reduce
        self._program, self._stages, self._transfers = program, stages, transfers
        self._last = program.placement.stages - 1
        self._first = Microbatches.of(program.placement, supervisor.rank).first
        self._inputs: list[Value] | None = None
        self._rows = 0  # of the whole batch of inputs, 0 if unknown
        self._losses: Losses | None = None  # of a training step
        self._measures: Measures | None = None  # of an evaluation step
        self._differentiated: dict[int, list[Any]] = {}  # leaves of inputs that require gradients, by microbatch
        self._input_grads: list[tuple[Tensor, Tensor]] = []
        self._values: dict[tuple[int, int], Tree | Arrival] = {}
        self._versions: dict[tuple[int, int], list[int]] = {}  # of values whose next stage is on this rank
        self._grads: dict[tuple[int, int], Grads | Arrival] = {}
        self._outputs: dict[tuple[int, int], Tree] = {}
        self._executor = Executor(program, supervisor)
        self.tasks = self._executor.tasks
        self._recv_buffers = RecvBuffers(transfers.device)
        ends = joined_ends(self.tasks, program.anatomy.wgrad_microbatches)
        self.joins = {self.tasks[at] for at in ends}
        """Weight gradients that are computed together with later ones."""
        taken, after = share_recv_buffers(self.tasks, ends)
        self._buffer_of = {self.tasks[at]: buffer_key for at, buffer_key in taken.items()}
        self._plan_offload(transfers.device, supervisor.rank, host_bytes)
        on_device = transfers.device.type == "cuda"
        self.several_streams = on_device and any(task.lane.name == "comm" for task in self.tasks)
        """Whether tasks compute on more than one CUDA stream."""
        self._used: list[object] | None = [] if self.several_streams else None
        lanes: Lanes = (
            DeviceLanes(self._executor, after, self._used)
            if on_device
            else HostLanes(self._executor, transfers.lanes, begins=True)
        )
        self._lanes = lanes
        self._executor.bind(lanes, self._bound)

    def _plan_offload(self, device: torch.device, rank: int, host_bytes: int | None) -> None:
        """Find out which passes leave the device, where to, and which task may use their memory first."""
        out = [task for task in self.tasks if task.kind is Kind.OFFLOAD]
        self._host_pool = HostPool({task.slot: task.stage for task in out}, device, rank=rank, limit=host_bytes)
        self._host_buffer = {(task.stage, task.microbatch): task.slot for task in out}
        self._frees: dict[Task, list[tuple[int, int]]] = {}
        freed: set[int] = set()
        for task, needs in zip(self.tasks, self._executor.needs, strict=True):
            for need in needs:
                if self.tasks[need].kind is Kind.OFFLOAD and need not in freed:
                    freed.add(need)
                    self._frees.setdefault(task, []).append((self.tasks[need].stage, self.tasks[need].microbatch))
        if self._training:
            for number, stage in self._stages.items():
                stage.leaving = frozenset(task.microbatch for task in out if task.stage == number)

    @property
    def needs(self) -> Sequence[Sequence[int]]:
        """The needs of each task, by index."""
        return self._executor.needs

    @property
    def kept_until(self) -> Sequence[int] | None:
        """Where lanes share memory, how long each task keeps what is another lane's (`DeviceLanes.kept_until`)."""
        lanes = self._lanes
        return lanes.kept_until if self._used is not None and isinstance(lanes, DeviceLanes) else None

    @property
    def host_pool(self) -> HostPool:
        """The host memory for what this rank offloads."""
        return self._host_pool

    def close(self) -> None:
        """Return the host memory; the device must be able to finish what it was given."""
        self._host_pool.close()

    @property
    def recv_buffers(self) -> set[BufferKey]:
        """The receive buffers of this rank."""
        return set(self._buffer_of.values())

    def begin(self, begin: Callable[[], Hashable | None], rows: int = 0) -> None:
        """Tell the other ranks how this step begins.

        Steps for which `begin` returns equal keys on every rank exchange messages of the same shapes. `rows` is the
        batch size of targets passed as one batch, else 0.
        """
        if self._shape_cache is not None:
            self._shape_cache.begin(begin(), rows)

    @property
    def rows_by_rank(self) -> dict[int, int]:
        """The batch sizes of targets, of the ranks that were given any, once the step has run."""
        return {} if self._shape_cache is None else self._shape_cache.rows

    def run(
        self,
        inputs: list[Value] | None,
        losses: Losses | Measures,
        recorder: Recorder | None = None,
        *,
        key: RngKey | None = None,
        rows: int = 0,
    ) -> None:
        """Run all tasks once. `rows` is the batch size of inputs passed as one batch, else 0."""
        self._inputs, self._rows = inputs, rows
        if isinstance(losses, Measures):
            self._measures = losses
        else:
            self._losses = losses
        self._input_grads = []
        if isinstance(self._lanes, DeviceLanes):
            self._recv_buffers.reader = torch.cuda.current_stream()
            for stage in self._stages.values():
                stage.streams = [torch.cuda.current_stream(), *self._lanes.streams_of("comm")]
        with ExitStack() as contexts:
            for stage in self._stages.values():
                stage.used = self._used
                contexts.enter_context(stage.running(key or RngKey(), training=self._training))
            try:
                self._known = None if self._shape_cache is None else self._shape_cache.find()
                self._executor.run(recorder)
                if self._shape_cache is not None and self._known is None:
                    self._shape_cache.learn({number: _look(message) for number, message in self._described.items()})
            finally:
                self._transfers.forget()
                self._described.clear()
                self._values.clear()
                self._versions.clear()
                self._grads.clear()
                self._outputs.clear()
                self._differentiated.clear()
                self._inputs = self._losses = self._measures = None

    def has_behind(self, losses: Losses) -> bool:
        """Return whether any inputs or targets require gradients."""
        return bool(self._input_grads or losses.cut)

    def behind(self, losses: Losses, own: Collection[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the inputs and targets that require gradients, each with its gradient.

        Also adopt the leaves of the graphs behind them. `own` holds the ids of the tensors that the user passed.
        """
        inputs, self._input_grads = self._input_grads, []
        targets = [(target, detached.grad) for target, detached in losses.cut.values() if detached.grad is not None]
        for stage, pairs in ((0, inputs), (self._last, targets)):
            if pairs:
                self._stages[stage].adopt_behind([tensor for tensor, _ in pairs], own)
        return inputs + targets

    def _bound(self, task: Task) -> Act:
        act, frees = self._act(task), self._frees.get(task)
        if frees is None:
            return act

        def free_and_act() -> Work | None:
            for stage, microbatch in frees:
                self._stages[stage].release(microbatch)
            return act()

        return free_and_act

    def _act(self, task: Task) -> Act:
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
                owner, joins = self._stages[stage], task in self.joins
                return lambda: owner.weight(microbatch, part, joins=joins)
            case Kind.REDUCE:
                assert self._reduce is not None
                return partial(self._reduce, self._program.anatomy.summed(stage, part), experts=part == EXPERT_SUM)
            case Kind.SEND_F | Kind.RECV_F | Kind.SEND_B | Kind.RECV_B:
                assert task.lane.peer is not None
                return self._transfer(task, task.lane.peer)
            case Kind.OFFLOAD | Kind.ONLOAD:
                copies = self._stages[stage].offload if task.kind is Kind.OFFLOAD else self._stages[stage].onload
                return partial(copies, microbatch, self._host_pool, self._host_buffer[stage, microbatch])
            case _:
                raise PipelineError(f"{task} cannot be run in a pipeline")

    def _forward(self, stage: int, microbatch: int, part: int) -> Act:
        owner, key = self._stages[stage], (stage, microbatch)
        ends = part == len(self._program.anatomy.forward[stage]) - 1
        local = stage + 1 in self._stages and self._placed(stage + 1, microbatch) == self._placed(stage, microbatch)

        def forward() -> None:
            buffer, held = None, False
            if part or stage:
                stored = self._values.pop(key)
                if isinstance(stored, Arrival):
                    value, buffer = stored.take()
                    held = True
                    assert stored.description is not None
                    self._rows = stored.description.rows
                else:
                    value = stored
                    if key in self._versions:
                        validate_unchanged(value, self._versions.pop(key))
            else:
                assert self._inputs is not None
                value, leaves = entering(self._inputs[microbatch - self._first])
                held = True
                if leaves and self._training:
                    self._differentiated[microbatch] = leaves
            if self._used is not None:
                self._used.append(value)  # a last part too may read memory of another lane
            if ends and stage == self._last:
                if self._training:
                    losses = self._losses
                    assert losses is not None
                    out = owner.forward(microbatch, part, value, losses.of(microbatch, self._rows), held=held)
                    self._grads[key] = [losses.seed(out.leaves[0], microbatch)]
                else:
                    measures = self._measures
                    assert measures is not None
                    out = owner.evaluate(microbatch, part, value, measures.of(microbatch, self._rows))
                    measures.keep(microbatch, out, buffer)
                return
            if self._training:
                out = owner.forward(microbatch, part, value, held=held)
            else:
                out = owner.evaluate(microbatch, part, value)
            if buffer is not None:
                out = buffer.own(out)
            if self._used is not None:
                self._used.append(out)
            if not ends:
                self._values[key] = out
            elif local:
                self._values[stage + 1, microbatch] = out
                self._versions[stage + 1, microbatch] = out.versions()
            else:
                self._outputs[key] = out

        return forward

    def _backward(self, stage: int, microbatch: int, part: int) -> Act:
        owner, key = self._stages[stage], (stage, microbatch)
        ends = part == len(self._program.anatomy.backward[stage]) - 1

        def backward() -> None:
            stored, buffer = self._grads.pop(key), None
            grads: Grads
            if isinstance(stored, Arrival):
                tree, buffer = stored.take()
                grads = tree.leaves
            else:
                grads = stored
            out = owner.backward(microbatch, part, grads)
            if buffer is not None:
                out = [grad.clone() if grad is not None and buffer.holds(grad) else grad for grad in out]
            if self._used is not None:
                self._used += (grads, out)
            if not ends:
                self._grads[key] = out
            elif stage:
                self._grads[stage - 1, microbatch] = out  # stage - 1 runs here, or a send takes it
            elif microbatch in self._differentiated:
                leaves = self._differentiated.pop(microbatch)
                self._input_grads += [(x, grad) for x, grad in zip(leaves, out, strict=True) if grad is not None]

        return backward

    def _placed(self, stage: int, microbatch: int) -> int:
        return self._program.placement.device(stage, microbatch)

    def _transfer(self, task: Task, peer: int) -> Act:
        transfers, stage, microbatch = self._transfers, task.stage, task.microbatch
        key = stage, microbatch
        number, self._transfer_count = self._transfer_count, self._transfer_count + 1

        def buffer_for(description: Description) -> RecvBuffer:
            return self._recv_buffers.take(self._buffer_of[task], description)

        def send(kind: Kind, tree: Tree, rows: int, sender: str) -> Work | None:
            if self._known is not None:
                return transfers.send_as(self._known[number], peer, tree, rows, sender)
            self._described[number], begun = transfers.send(peer, (kind, stage), tree, rows)
            return begun

        def receive(channel: Channel) -> tuple[Arrival, Work | None]:
            if self._known is not None:
                return transfers.receive_as(self._known[number], peer, channel, buffer_for, task.awaited)
            arrival, begun = transfers.receive(peer, channel, buffer_for, task.awaited)
            self._described[number] = arrival
            return arrival, begun

        def send_value() -> Work | None:
            return send(Kind.SEND_F, self._outputs.pop(key), self._rows, f"stage {stage} hands on")

        def receive_value() -> Work | None:
            self._values[key], begun = receive((Kind.SEND_F, stage - 1))
            return begun

        def send_grads() -> Work | None:
            grads = self._grads.pop((stage - 1, microbatch))
            assert not isinstance(grads, Arrival)
            return send(Kind.SEND_B, _tree_of(grads), 0, f"stage {stage} hands back")

        def receive_grads() -> Work | None:
            self._grads[key], begun = receive((Kind.SEND_B, stage + 1))
            return begun

        return {
            Kind.SEND_F: send_value,
            Kind.RECV_F: receive_value,
            Kind.SEND_B: send_grads,
            Kind.RECV_B: receive_grads,
        }[task.kind]


def _look(described: Description | Arrival) -> Description:
    """Return the description of a message that was sent or received."""
    description = described.description if isinstance(described, Arrival) else described
    assert description is not None, "no task waited for this message"
    return description


def _tree_of(grads: Grads) -> Tree:
    """Return gradients as a message: a list, with None for leaves that have no gradient."""
    leaves = [grad.to_dense() if isinstance(grad, Tensor) and grad.is_sparse else grad for grad in grads]
    return Tree(list(leaves), list_of(len(leaves)), [False] * len(leaves))


@cache
def list_of(count: int) -> pytree.TreeSpec:
    """Return the pytree structure of a list of `count` leaves; for one leaf, that of the leaf itself."""
    return LEAF if count == 1 else pytree.tree_structure([0] * count)
