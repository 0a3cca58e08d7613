"""Trains a model by a plan: each rank runs its part of the checked program."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from stretto.costs import Costs
from stretto.execute.recorder import Recorder, bytes_counter
from stretto.ir.errors import PipelineError
from stretto.ir.plan import Plan
from stretto.memory import Action, Memory, Preset
from stretto.moe.exchange import Exchange
from stretto.moe.expert_ranks import ExpertRanks
from stretto.pipeline.build import build
from stretto.pipeline.clipping import Clipper
from stretto.pipeline.dry_run import DryRun
from stretto.pipeline.evaluation import Evaluator
from stretto.pipeline.gradients import Kind
from stretto.pipeline.layer_sums import LayerSums
from stretto.pipeline.layers import Layers
from stretto.pipeline.losses import Loss, Losses
from stretto.pipeline.memory_report import MemoryReport
from stretto.pipeline.mesh import parallel_index
from stretto.pipeline.microbatches import Microbatches, cut, needed
from stretto.pipeline.modes import evaluating
from stretto.pipeline.names import named_modules
from stretto.pipeline.options import Options, memory_from
from stretto.pipeline.pytree import Value, tensors_of
from stretto.pipeline.results import StepResult
from stretto.pipeline.rng import RngKey
from stretto.pipeline.segments import leaves_of
from stretto.pipeline.shape_cache import begin_of
from stretto.pipeline.sites_seen import PatternCheck
from stretto.pipeline.states import States
from stretto.pipeline.totals import Total, sum_tables
from stretto.pipeline.turns import Turns
from stretto.program.program import Program
from stretto.timeline import Timeline

log = logging.getLogger(__name__)
_TRAINS_NOTHING = "no loss of this step depends on a parameter that requires gradients"


class Pipeline:
    """Trains layers that are cut into stages and placed on the ranks of a mesh, by a plan or a program.

    `mesh` has a dimension "pp", whose ranks are the plan's devices, and may have "dp" and "ep". Along "dp" each
    pipeline trains on microbatches of its own, and gradients are summed; along "ep" likewise, and each rank holds only
    some of the experts (`stretto.moe.Experts`), to which the others send tokens.

    `layers` are modules that run in order, each on the output of the previous one, as in `nn.Sequential`. They can also
    be a function that builds the layer of a given number; then pass `layer_count`, and no rank holds all layers. A
    layer may offer phases.

    A `plan` is lowered for the layers, and `costs` decide how the phases of a pair are woven. Without costs, all
    compute phases are assumed to take equally long and to hide communication. A `program`, as `lower` returns it, runs
    as it is. Either way the attribute `program` is the program that runs, for `simulate`, `check` and the figures.

    `loss(output, target)` returns the mean of its microbatch, or a sum and the count to divide it by.

    `memory` says what becomes of the tensors that forwards save: `Memory(sites={"*.norm": "recompute", "*":
    "offload"})`, or just its sites. `checkpoint=True` is short for the sites {"*": "recompute"}, which compute every
    layer or phase again, and `recompute=["*.norm"]` for {"*.norm": "recompute"}. "auto" offloads as much as hides by
    the costs, which then need bytes and the bandwidth to host memory (`choose_memory`); the attribute `memory_choice`
    says what that is, and why.

    Layers may pass any values to each other. But if a step begins like an earlier one, with inputs of the same shapes,
    these values must have the same shapes as then, or the step is refused; `dynamic_shapes=True` lifts that.

    `gradients` chooses how gradients are summed: "cast" sums those of bfloat16 parameters in float32 and casts the
    result, "parameter" sums in the parameter's dtype, "float32" provides the float32 sums as `main_grads()`.

    `wgrad_microbatches` is the number of microbatches whose weight gradients a linear layer computes at once. More
    means larger products and fewer reads and writes of the sums, but memory is held longer.

    `exchange` makes what moves tokens between the ranks of "ep": `stretto.moe.AllToAll` unless given.

    A pipeline runs only programs that `check` has proved sound, and all ranks must pass the same arguments.
    """

    def __init__(
        self,
        layers: Layers | Callable[[int], nn.Module],
        *,
        plan: Plan | None = None,
        program: Program | None = None,
        loss: Loss,
        mesh: DeviceMesh,
        layer_count: int | None = None,
        costs: Costs | None = None,
        balance: Sequence[int] | None = None,
        tied: Sequence[Sequence[str]] = (),
        gradients: Kind = "cast",
        wgrad_microbatches: int = 1,
        memory: Memory | Mapping[str, Action] | Preset | Literal["auto"] | None = "none",
        checkpoint: bool = False,
        recompute: Sequence[str] = (),
        dynamic_shapes: bool = False,
        seed: int = 0,
        timeout: float = 300.0,
        exchange: Callable[[ExpertRanks], Exchange] | None = None,
    ) -> None:
        policy, wrong_memory = memory_from(memory, checkpoint, recompute)
        options = Options(
            plan=plan,
            program=program,
            layer_count=layer_count,
            costs=costs,
            balance=balance,
            tied=tied,
            gradients=gradients,
            wgrad_microbatches=wgrad_microbatches,
            memory=policy,
            dynamic_shapes=dynamic_shapes,
            seed=seed,
            timeout=timeout,
            exchange=exchange,
            wrong_memory=wrong_memory,
        )
        parts = build(layers, loss, mesh, options)
        self.rank = parts.team.rank
        """This rank's number among those of the mesh."""
        self._device = torch.device(mesh.device_type)
        self._loss, self._gradient_kind = loss, gradients
        self._team, self._placement, self._shape = parts.team, parts.placement, parts.shape
        self._microbatches = Microbatches.of(parts.placement, self.rank)
        ends = {device for device, stage in parts.placement.homes if stage == parts.placement.stages - 1}
        self._has_only_end = ends == {self.rank}  # whether only this rank computes losses
        self.program = parts.program
        """The program that runs."""
        self.memory_choice = parts.memory_choice
        """With memory="auto", what costs have chosen and why; else None."""
        if self.memory_choice is not None and self.rank == 0:
            log.info("%s", self.memory_choice)
        self._layers, self._module, self._names = parts.layers, parts.module, parts.names
        self._replicas, self._gradients = parts.replicas, parts.gradients
        self._stages, self._transfers = parts.stages, parts.transfers
        self._binding = parts.binding
        self._gradients.several_streams = self._binding.several_streams
        self._turns = Turns(self._team, self._transfers, [self._replicas.close, parts.agreement.close])
        self._layout = 0  # identifies the trained parameters
        self._evaluator = Evaluator(
            self.program, self._team, self._stages, self._transfers, parts.starts, self._module, loss
        )
        self._evaluations = 0
        self._patterns = PatternCheck(parts.memory, self._team)
        self._dry_run = DryRun(
            self.program,
            self._team,
            self._stages,
            self._transfers,
            self._gradients,
            self._binding,
            loss,
            parts.memory,
            self._patterns,
        )
        self._states = States(parts.module, parts.layers, parts.names, mesh, self.rank)
        self._clipper = Clipper(self._team, self._turns, parts.agreement, self._replicas)
        self._layer_sums = LayerSums(self._team, self._turns, parts.agreement, parts.layers, parts.layer_count)
        self._total_of_last: Total | None = None  # of the last step, whose loss may not have been read yet
        self._counted: bool | None = None  # whether the loss returns a sum and a count; known after the first step
        self._key = RngKey(seed=seed, replica=parallel_index(mesh))
        self._team.supervisor.ready()

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        accumulate: bool = False,
        record: bool = False,
        check_finite: bool = True,
    ) -> StepResult:
        """Run one step: forwards, backwards, and gradients in the parameters' `.grad`.

        Pass inputs and targets as one batch (a tensor, tuple or dict, cut along the first dimension) or as a list or
        iterator of microbatches. Only ranks that hold the first stage need inputs, and those that hold the last stage
        need targets. `step` overwrites `.grad`; pass `accumulate=True` to add. With `record`, which all ranks must
        pass, the result has the measured timeline. A loss that is not finite raises an error that names its
        microbatch; with `check_finite=False` only reading the loss raises it, and the step does not wait for the loss.
        """
        begun = False
        self._turns.validate_open()
        try:
            with self._turns.guarding(self._step_label(record=record, accumulate=accumulate)):
                if not torch.is_grad_enabled():
                    raise PipelineError(
                        "step() needs gradients, which are off here (torch.no_grad); eval_step() needs none"
                    )
                losses, microbatches, rows = self._batch(inputs, targets)
                check_buffers = self._replicas.watch_buffers()
                begun = True
                changed = self._gradients.begin(
                    {number: stage.parameters() for number, stage in self._stages.items()}, accumulate=accumulate
                )
                if changed:
                    self._layout = self._gradients.layout
                batch = microbatches, losses.targets, rows
                begin = partial(begin_of, batch, self._module, self._loss, self._device, self._layout)
                self._binding.begin(begin, losses.rows)
                self._replicas.begin(self._gradients, partial(self._leaves_behind, microbatches, losses))
                if self._shape.ep > 1:
                    self._replicas.validate_begin()
                recorder = Recorder(len(self._binding.tasks), bytes_counter(self._device)) if record else None
                with nullcontext() if recorder is None else recorder.recording():
                    self._binding.run(microbatches, losses, recorder, key=self._key, rows=rows)
                    self._turns.catch_up(recorder is not None)
                wrong = self._found_wrong(check_buffers, losses)
                timeline = self._gathered(recorder) if recorder is not None else None
                total = self._total(losses, wrong is not None)
                if check_finite or changed or self._counted is None:
                    self._validate_all_ranks(total, wrong)
                elif wrong is not None:
                    raise wrong
                self._patterns.run(stage.sites_seen() for stage in self._stages.values())
                # where a stage has copies, each might have been given another batch
                doubtful = losses.is_weighted and len(self._placement.routes) > 1
                count = self._count(losses, total, wait=check_finite or doubtful)
                self._run_behind(losses, microbatches, (inputs, targets), count)
                self._replicas.end(self._gradients)
            if check_finite:
                _ = total.mean
            with self._turns.guarding():
                self._gradients.give_out(count)
            self._key = replace(self._key, step=self._key.step + 1)
        except BaseException:
            if begun:
                self._gradients.restore()
            raise
        finally:
            self._team.supervisor.answer()
        return StepResult(total, timeline)

    def eval_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        metrics: Mapping[str, Loss] | None = None,
        outputs: bool = False,
    ) -> StepResult:
        """Compute the loss of a batch, without gradients, in evaluation mode.

        `metrics` are further functions of output and target, each of which returns the mean of its microbatch, or a sum
        and a count; all ranks must pass the same names. With `outputs`, which all ranks must pass too, the result has
        the last layer's outputs, on the ranks that computed them. Then targets may be left out, and neither loss nor
        metrics are computed. A batch with fewer rows than the plan has microbatches runs as one microbatch per row.
        """
        self._turns.validate_open()
        self._evaluations += 1
        try:
            with (
                self._turns.guarding(f"evaluation {self._evaluations}"),
                evaluating(self._layers.values()),
                torch.inference_mode(False),
                torch.no_grad(),
            ):
                measures = self._evaluator.run(inputs, targets, metrics, self._key, outputs=bool(outputs))
                kept = measures.outputs()
                loss, *others = sum_tables(self._team, measures.tables(), self._turns.catch_up)
                for total in (loss, *others):
                    counted = total.counted  # waits for it, and validates it
                    if measures.is_uneven and measures.has_targets and not counted:
                        raise PipelineError(
                            f"pipelines were given batches of different sizes, and {total.what} is a mean, so rows "
                            "would not weigh alike; give all as many, or let it return a sum and a count"
                        )
        finally:
            self._team.supervisor.answer()
        if not measures.has_targets:
            return StepResult(None, metrics=dict.fromkeys(metrics or ()), outputs=kept)
        _ = loss.mean
        return StepResult(loss, metrics=dict(zip(sorted(metrics or ()), others, strict=True)), outputs=kept)

    def dry_run(self, inputs: Any = None, targets: Any = None) -> MemoryReport:
        """Predict the memory of a step, before it runs: return what each stage saves, and each device's peak.

        This runs the forwards of each pipeline's first microbatch, and trains nothing: parameters, gradients, module
        buffers, random numbers and the step count stay as they are. Pass inputs and targets as for `step`, on all
        ranks; iterators are used up as by a step. Without targets, the loss is not counted. If there is too little host
        memory for what `memory` offloads, this raises an error as a step would.
        """
        self._turns.validate_open()
        try:
            with self._turns.guarding("a dry run"):
                if not torch.is_grad_enabled():
                    raise PipelineError("dry_run() needs gradients, which are off here (torch.no_grad)")
                last = self._placement.stages - 1
                cut_targets = (None, 0) if targets is None else self._cut(targets, "targets", last)
                return self._dry_run.run(self._cut(inputs, "inputs", 0), cut_targets, self._key)
        finally:
            self._team.supervisor.answer()

    def close(self) -> None:
        """Close connections and threads. A pipeline that failed or was closed runs no more steps."""
        is_open = self._turns.is_open
        if is_open and self._total_of_last is not None:
            with suppress(PipelineError):  # reading that loss raises it
                self._total_of_last.wait()
        self._turns.close()
        if is_open:  # after a failure, host memory is freed with the pipeline: the device may be stuck
            self._binding.close()

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters by the names in `nn.Sequential(*layers)`; a tied one by its first name.

        In a `NamedLayer`, as `stretto.cut` makes them, names are those of the whole model instead.
        """
        return self._names.all_seen(self._module.named_parameters(remove_duplicate=remove_duplicate))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters, including frozen ones."""
        return self._module.parameters()

    def main_grads(self) -> dict[str, Tensor | None]:
        """Return the float32 gradient sums of this rank's trained parameters by name, with `gradients="float32"`.

        A tied parameter is listed by its first name. The tensors are valid until the next step, which may overwrite
        them.
        """
        if self._gradient_kind != "float32":
            raise PipelineError('main_grads() is for pipelines that were made with gradients="float32"')
        self._gradients.validate_main_grads()
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: self._gradients.main_grad(parameter) for name, parameter in trained.items()}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients of all ranks, so that their norm is at most `max_norm`; return the norm they had.

        As `torch.nn.utils.clip_grad_norm_` on the uncut model, in place: on `.grad`, or with `gradients="float32"` on
        `main_grads()`. What several ranks hold counts once. All ranks must call this, with the same arguments. The norm
        is a tensor, the same on every rank. With `error_if_nonfinite`, a norm that is not finite raises, and gradients
        stay as they are.
        """
        self._turns.validate_open()
        main = self.main_grads() if self._gradient_kind == "float32" else None
        grads = [
            (name, parameter, parameter.grad if main is None else main[name])
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        ]
        return self._clipper.clip(grads, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """This rank's layers, by their numbers in the whole model."""
        return MappingProxyType(self._layers)

    def sum_by_layer(self, values: Mapping[int, Tensor], *, what: str = "numbers to sum") -> dict[int, Tensor]:
        """Sum numbers of this rank's layers over all ranks that hold a copy of the layer, in float64.

        For example, the tokens that a layer's experts got: in DualPipe, each copy of a layer sees half of them. All
        ranks must call this, with equally many numbers for each layer; a rank may have none. If none has any, an error
        says that no layer has `what`.
        """
        self._turns.validate_open()
        return self._layer_sums.sum(values, what)

    def modules(self) -> Iterator[nn.Module]:
        """Return this rank's layers and all modules inside them."""
        return (module for module in self._module.modules() if module is not self._module)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return this rank's layers and all modules inside them, by the names in `nn.Sequential(*layers)`.

        In a `NamedLayer`, as `stretto.cut` makes them, names are those of the whole model instead.
        """
        return named_modules(self._layers)

    def train(self, mode: bool = True) -> "Pipeline":
        """Put this rank's layers in training mode, or with False in evaluation mode, as `nn.Module.train` does."""
        self._module.train(mode)
        return self

    @property
    def step_count(self) -> int:
        """The number of steps run so far. Random numbers depend on it, so set it when resuming a run."""
        return self._key.step

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._key = replace(self._key, step=count)

    def eval(self) -> "Pipeline":
        """Put this rank's layers in evaluation mode. `eval_step` does this itself while it runs."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether this rank's layers are in training mode, as set by `train` and `eval`."""
        return self._module.training

    def __repr__(self) -> str:
        stages = ", ".join(map(str, sorted(self._stages)))
        layers = repr(self._module).partition("\n")[2]
        ranks, of = self._placement.devices, self._placement.stages
        mesh = f" ({self._shape})" if self._shape.replicas > 1 else ""
        return f"Pipeline(  # rank {self.rank} of {ranks}{mesh}, stages {stages} of {of}\n{layers}"

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of this rank's layers, by the names of `named_parameters`.

        Experts of which this rank holds some ("ep") are DTensors, which `torch.distributed.checkpoint` saves as one.
        """
        return self._states.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's layers from a state dict, which may contain other layers too, and all experts."""
        self._states.load_state_dict(state)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Return an optimizer's state of this rank's parameters, by name, for `torch.distributed.checkpoint`.

        The tensors are the optimizer's own, so that loading a checkpoint into them restores it.
        """
        return self._states.optimizer_state_dict(optimizer)

    def split_report(self) -> dict[str, bool]:
        """Return for each of this rank's parameters whether the split backward defers its gradient."""
        deferred = {
            id(parameter)
            for stage in self._stages.values()
            for layer in stage.deferral.layers
            for parameter in layer.parameters()
        }
        every = self.named_parameters(remove_duplicate=False)
        return {name: id(parameter) in deferred for name, parameter in every}

    def _gathered(self, recorder: Recorder) -> Timeline | None:
        return self._team.start(lambda: recorder.gathered(self.program, self._team.host, self._team.settle))

    def _step_label(self, **options: bool) -> str:
        """Return the step's name with its options, which must be the same on all ranks."""
        flags = [name for name, value in options.items() if value]
        return f"step {self._key.step + 1}" + (f" ({', '.join(flags)})" if flags else "")

    def _batch(self, inputs: Any, targets: Any) -> tuple[Losses, list[Value] | None, int]:
        """Return the step's losses, the input microbatches, and the rows of an input that came as one batch, else 0."""
        target_microbatches, target_rows = self._cut(targets, "targets", self._placement.stages - 1)
        microbatches, rows = self._cut(inputs, "inputs", 0)
        losses = Losses(self._loss, target_microbatches, self._microbatches, self._device, target_rows)
        return losses, microbatches, rows

    def _cut(self, batch: Any, name: str, stage: int) -> tuple[list[Value] | None, int]:
        """Cut a batch into microbatches, if this rank runs the stage that takes it; raise if it is missing."""
        if stage not in self._stages:
            return None, 0
        return cut(needed(batch, name, self.rank, stage), self._microbatches.count, name)

    def _count(self, losses: Losses, total: Total, *, wait: bool) -> Tensor | None:
        """Return the count by which gradients must be divided, or None. Only the first step must wait to know."""
        first = self._counted is None
        counted = total.counted if wait or first else losses.counted if losses.has_any else self._counted
        if first:
            self._counted = counted
        elif counted != self._counted:
            raise PipelineError("the loss gives a sum and a count in some steps only; it must in all or none")
        if not counted:
            self._validate_equal_batches()
        return total.count() if counted else None

    def _validate_equal_batches(self) -> None:
        """Raise PipelineError if pipelines were given batches of different sizes, of which only means are known."""
        rows = sorted(set(self._binding.rows_by_rank.values()))
        if len(rows) > 1:
            raise PipelineError(
                f"ranks that run the last stage were given targets of {rows[0]} and of {rows[-1]} rows, and the loss "
                "is a mean, so rows would not weigh alike; give all as many, or let the loss return a sum and a count"
            )

    def _run_behind(self, losses: Losses, microbatches: Any, batch: Any, count: Tensor | None) -> None:
        """Run the backward of the graphs behind inputs and targets, from their gradients, in one call."""
        if not self._binding.has_behind(losses):
            return
        own = {id(tensor) for tensor in tensors_of((batch, microbatches))}
        pairs = self._binding.behind(losses, own)
        if not pairs:
            return
        tensors, grads = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, grads if count is None else [grad / count for grad in grads])
        for stage in self._stages.values():
            self._gradients.collect(stage.parameters(), count)

    def _leaves_behind(self, microbatches: list[Value] | None, losses: Losses) -> set[int]:
        """Return the ids of all leaves on which inputs and targets depend."""
        tensors = [tensor for tensor in tensors_of((microbatches, losses.targets)) if tensor.requires_grad]
        return {id(leaf) for leaf in leaves_of([get_gradient_edge(tensor).node for tensor in tensors], ())}

    def _found_wrong(self, check_buffers: Callable[[], None], losses: Losses) -> PipelineError | None:
        """Return the error in what layers and loss did during the step on this rank, or None."""
        try:
            check_buffers()
            for stage in self._stages.values():
                stage.validate_parameters()
            self._gradients.validate_hooks()
            if losses.has_any and not losses.trains and self._has_only_end:
                raise PipelineError(_TRAINS_NOTHING)
        except PipelineError as error:
            return error
        return None

    def _validate_all_ranks(self, total: Total, wrong: PipelineError | None) -> None:
        """Raise if any rank refuses the step, or if no loss of any rank trains anything."""
        refusing, training = total.more()
        if wrong is not None:
            raise wrong
        if not training:
            raise PipelineError(_TRAINS_NOTHING)
        if refusing:
            raise self._team.supervisor.explained(
                RuntimeError("another rank refuses the step"), "the others to end the step"
            )

    def _total(self, losses: Losses, refuses: bool = False) -> Total:
        """Start to sum the losses of all ranks, and the numbers of ranks that refuse the step, and that train by it."""
        tables, flags = [(losses.name, losses.table())], (refuses, losses.trains)
        (self._total_of_last,) = sum_tables(self._team, tables, self._turns.catch_up, flags=flags)
        return self._total_of_last
