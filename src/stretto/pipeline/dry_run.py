"""Dry runs: the forwards of one microbatch, and from what they save, how much memory a step takes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.costs import Costs
from stretto.execute.team import Team
from stretto.ir.errors import PipelineError
from stretto.memory import Memory
from stretto.pipeline.bind import StepBinding
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.host_pool import validate_together
from stretto.pipeline.losses import Loss, Losses, OneLoss
from stretto.pipeline.measures import Measures
from stretto.pipeline.memory_report import MemoryReport, RankMemory, StageMemory
from stretto.pipeline.microbatches import Microbatches
from stretto.pipeline.names import modules_of
from stretto.pipeline.programs import evaluation_of
from stretto.pipeline.pytree import Value
from stretto.pipeline.rehearsal import Rehearsal
from stretto.pipeline.rng import RngKey, python_generators_kept
from stretto.pipeline.sites_seen import PatternCheck
from stretto.pipeline.stage import Stage
from stretto.pipeline.step_memory import PartMemory, StepMemory
from stretto.pipeline.storages import storages_of
from stretto.pipeline.transfers import Transfers
from stretto.pipeline.unchanged import unchanged
from stretto.program.program import Program
from stretto.program.task import Kind
from stretto.timeline.memory_bound import memory_bound


class DryRun:
    """Runs the forwards of one microbatch of a pipeline, and predicts the memory of its steps."""

    def __init__(
        self,
        program: Program,
        team: Team,
        stages: dict[int, Stage],
        transfers: Transfers,
        gradients: Gradients,
        binding: StepBinding,
        loss: Loss,
        memory: Memory,
        patterns: PatternCheck,
    ) -> None:
        """`stages`, `gradients` and `binding` are those of the training step; they stay as they are."""
        self._memory, self._patterns = memory, patterns
        self._program, self._team, self._stages = program, team, stages
        self._transfers, self._gradients, self._binding = transfers, gradients, binding
        self._loss = loss
        self._module = nn.ModuleList(layer for stage in stages.values() for layer in stage.layers.values())

    def run(
        self, batch: tuple[list[Value] | None, int], targets: tuple[list[Value] | None, int], key: RngKey
    ) -> MemoryReport:
        """Return the report. All ranks call this together, each with its microbatches and the rows of the batch."""
        _validate_made(self._stages.values())
        has_loss = self._agree_on_targets(targets[0])
        forwards = evaluation_of(self._program, 1)
        stages = self._rehearse(forwards, batch, targets if has_loss else None, key)
        self._patterns.run(stage.sites_seen() for stage in stages.values())
        counted = [(stage.memory, stage.parts) for stage in stages.values() if stage.memory is not None]
        every = self._team.gather(counted, _Counted)
        replica_of = self._program.placement.replica
        mine = replica_of(self._team.rank)
        own = [stage for rank, others in enumerate(every) for stage in others if replica_of(rank) == mine]
        here = self._team.all_or_none(lambda: self._predict(sorted(own, key=lambda counted: counted[0].stage)))
        validate_together(self._team, here.host - self._binding.host_pool.nbytes)
        largest = {
            number: max((stage for others in every for stage, _ in others if stage.stage == number), key=_size)
            for number in range(self._program.placement.stages)
        }
        return MemoryReport(tuple(largest.values()), tuple(self._team.gather(here, RankMemory)), has_loss, self._memory)

    def _agree_on_targets(self, targets: list[Value] | None) -> bool:
        """Return whether the ranks of the last stage were given targets; raise if only some were."""
        last = self._program.placement.stages - 1
        given = self._team.gather("" if last not in self._stages else "no" if targets is None else "yes", str)
        if {"yes", "no"} <= set(given):
            raise PipelineError(
                f"rank {given.index('no')} was given no targets, but another rank that runs the last stage was"
            )
        return "yes" in given

    def _rehearse(
        self,
        forwards: Program,
        batch: tuple[list[Value] | None, int],
        targets: tuple[list[Value] | None, int] | None,
        key: RngKey,
    ) -> dict[int, Rehearsal]:
        """Run the forwards of the first microbatch, and leave everything as it was. Return the stages that ran here."""
        rank, work = self._team.rank, self._program.work
        numbers = Microbatches.of(forwards.placement, rank)
        leaving = set(work.stage[work.kind == Kind.OFFLOAD].tolist())
        homes = sorted(stage for device, stage in forwards.placement.homes if device == rank)
        stages = {
            number: Rehearsal(
                self._stages[number],
                numbers.first,
                leaves=number in leaving,
                receives=number == 0 or number - 1 not in homes,
                hands_on=number + 1 in homes,
            )
            for number in homes
        }
        losses, last = None, forwards.placement.stages - 1
        if targets is not None and last in stages:
            loss = _labelled(self._loss, stages[last])
            losses = Losses(loss, _first(targets[0]), numbers, self._team.device, targets[1])
        binding = StepBinding(forwards, self._team.supervisor, dict(stages), self._transfers)
        modules = [*self._module.modules(), *(self._loss.modules() if isinstance(self._loss, nn.Module) else ())]
        parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        with (
            self._gradients.set_aside(dict.fromkeys(parameters)),
            unchanged(dict.fromkeys(modules)),
            python_generators_kept(),
        ):
            binding.run(_first(batch[0]), _OnlyLoss(losses, numbers, self._team.device), key=key, rows=batch[1])
        return stages

    def _predict(self, counted: "_Counted") -> RankMemory:
        """Return what a step takes on this rank, from what a microbatch of each stage takes in this pipeline.

        Raise PipelineError if there is too little host memory.
        """
        rank, binding, stages = self._team.rank, self._binding, [stage for stage, _ in counted]
        activations = StepMemory(
            binding.tasks,
            binding.needs,
            self._program.anatomy,
            [parts for _, parts in counted],
            joins=binding.joins,
            kept_until=binding.kept_until,
        ).peak()
        costs = Costs(
            BW=1.0,  # weight gradients are computed after the input gradient, also in a full backward
            activation_bytes=tuple(float(stage.activations) for stage in stages),
            offload_bytes=tuple(float(stage.offloaded) for stage in stages),
            pending_bytes=tuple(float(stage.pending) for stage in stages),
        )
        passes = memory_bound(self._program, costs)[rank].peak_bytes
        assert passes is not None
        sums, copies = self._gradients.bytes_for({number: it.parameters() for number, it in self._stages.items()})
        return RankMemory(
            rank=rank,
            weights=_bytes_of((*self._module.parameters(), *self._module.buffers())),
            gradients=sums + max(0, copies - activations),
            activations=activations,
            transient=max(0, activations - round(passes)),
            buffers=sum(
                stages[stage].inputs if kind is Kind.RECV_F else stages[stage + 1].input_gradients
                for kind, stage, _ in self._binding.recv_buffers
            ),
            host=self._binding.host_pool.foresee({stage.stage: stage.host for stage in stages}),
            stages=tuple(sorted(self._stages)),
        )


_Counted = list[tuple[StageMemory, list[PartMemory]]]


class _OnlyLoss(Measures):
    """Gives the last stage the loss of a training step, if there are targets."""

    def __init__(self, losses: Losses | None, numbers: Microbatches, device: Any) -> None:
        super().__init__([], numbers, device, keeps_outputs=False)
        self._loss = losses

    def of(self, microbatch: int, rows: int = 0) -> Callable[[Value], Value]:
        return super().of(microbatch) if self._loss is None else OneLoss(self._loss, microbatch, rows)


def _labelled(loss: Loss, stage: Rehearsal) -> Loss:
    """Return a loss whose saved tensors are counted apart from the last layer's."""

    def labelled(output: Value, target: Value) -> Any:
        stage.enter_loss(output)
        return loss(output, target)

    return labelled


def _first(microbatches: list[Value] | None) -> list[Value] | None:
    """Return a copy of the first microbatch, as the only one: layers may change it in place."""
    if microbatches is None:
        return None
    leaves, spec = pytree.tree_flatten(microbatches[0])
    copies = {
        id(leaf): leaf.detach().clone().requires_grad_(leaf.requires_grad)
        for leaf in leaves
        if isinstance(leaf, Tensor)
    }
    return [pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], spec)]


def _validate_made(stages: Iterable[Stage]) -> None:
    """Raise PipelineError if a first forward would make parameters or buffers, which would remain."""
    for stage in stages:
        for number, layer in stage.layers.items():
            for _, name, module in modules_of(number, layer):
                own = (*module._parameters.values(), *module._buffers.values())
                if any(tensor is not None and is_lazy(tensor) for tensor in own):
                    raise PipelineError(f"{name} gets its parameters in its first forward; run that before a dry run")


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages of these tensors."""
    return sum({storage._cdata: storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}.values())


def _size(stage: StageMemory) -> int:
    return stage.activations + sum(site.recomputed for site in stage.sites)
