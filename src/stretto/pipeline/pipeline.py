"""A model trained by a plan: each rank runs its part of the checked program."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from stretto.costs import Costs
from stretto.execute.groups import all_reduce, place_among
from stretto.execute.host_lanes import Work
from stretto.execute.recorder import Recorder
from stretto.execute.team import Team
from stretto.ir.errors import PipelineError, StrettoError, named, told
from stretto.ir.plan import Plan
from stretto.pipeline.agreement import Agreement
from stretto.pipeline.bind import StepBinding
from stretto.pipeline.gradients import KINDS, Gradients, Kind
from stretto.pipeline.layers import (
    Layers,
    builder,
    demand_own_statistics,
    is_sparse,
    modules_named,
    outermost,
    unfit,
)
from stretto.pipeline.losses import Losses, Total
from stretto.pipeline.microbatches import cut
from stretto.pipeline.modes import evaluating
from stretto.pipeline.programs import digest_of, evaluation_of, program_for, wrong_program
from stretto.pipeline.pytree import Value, tensors_of
from stretto.pipeline.rng import RngKey
from stretto.pipeline.segments import leaves_of
from stretto.pipeline.shape_cache import ShapeCache, begin_of
from stretto.pipeline.shared_parameters import find_shared
from stretto.pipeline.stage import Stage, anatomy_of, is_phased
from stretto.pipeline.ties import (
    conflicting,
    demand_names,
    joined,
    layer_of,
    names_of,
    places_of,
    tie,
    tied_stages,
    ties_of,
    wrong_ties,
)
from stretto.pipeline.transfers import Transfers, check_group
from stretto.program.phases import Layer, cut_layers
from stretto.program.program import Program
from stretto.timeline import Timeline

_EXAMPLES = {"recompute": '["*.norm"]', "tied": '[("0.weight", "5.weight")]'}
Loss = Callable[[Value, Value], Tensor | tuple[Tensor, Tensor | int]]


class StepResult:
    """What a step gives, on every rank."""

    def __init__(self, total: Total, timeline: Timeline | None = None) -> None:
        self._total = total
        self.timeline = timeline
        """When every task of every rank ran, in seconds; on rank 0, of a step that was recorded."""

    @property
    def loss(self) -> float:
        """The mean over the microbatches, or over all that (sum, count) losses counted. Waits until it is known."""
        return self._total.mean

    def __repr__(self) -> str:
        try:
            return f"StepResult(loss={self.loss:g})"
        except PipelineError as error:
            return f"StepResult({error})"


class Pipeline:
    """Layers cut into stages, the stages placed on the ranks of a mesh, and a plan or a program to run them by.

    `layers` are modules, each taking what the one before it returned, as in `nn.Sequential`; or a function that
    builds the layer of a number, with `layer_count`, so that no rank ever holds them all. A layer may offer phases.
    The layers are recomputed in the backward with `checkpoint`, or only the modules whose names match `recompute`
    (norms and activation functions, say: cheap to run, and their outputs are then not kept).
    A `plan` is lowered for the layers: a pair's phases are woven by their `costs`; without, compute phases are taken to
    be alike and hide communication. A `program`, as `lower` makes it, is run as it is. Either way the attribute
    `program` is what runs, for `simulate`, `check` and the figures.
    `loss(output, target)` returns its microbatch's mean, or a sum and the count to divide it by.
    Layers may hand on anything; but where a step begins like an earlier one, with inputs of the same shapes, they hand
    on what looks the same, or the step is refused, unless with `dynamic_shapes`.
    `gradients` says how they are summed and given out: "cast" sums those of bfloat16 parameters in float32 and casts
    the sums, "parameter" sums in the parameter's type, "float32" gives the float32 sums as `main_grads()`.
    With `wgrad_microbatches`, weight gradients of linear layers are computed of so many microbatches at once: larger
    products, and sums that are read and written less often, for memory that is held longer.

    Nothing is run that `check` has not proved sound, and all ranks must have been given the same.
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
        checkpoint: bool = False,
        recompute: Sequence[str] = (),
        dynamic_shapes: bool = False,
        seed: int = 0,
        timeout: float = 300.0,
    ) -> None:
        _demand_mesh(mesh)
        self._loss, self._gradient_kind = loss, gradients
        self.rank, self._device = mesh.get_local_rank(), torch.device(mesh.device_type)
        self._finished = ""  # why nothing more can be run
        wrong = wrong_program(plan, program, costs, wgrad_microbatches, mesh.size())
        wrong = wrong or _wrong(loss, seed, gradients, checkpoint, recompute, tied, dynamic_shapes)
        self._team = Team(
            mesh.get_group(), self._device, timeout=timeout, wrong=wrong, error=PipelineError, failure=told
        )
        with self._team.closing_if_it_fails():
            self._placement = (program if program is not None else plan).placement  # type: ignore[union-attr]
            build, shares = self._team.all_or_none(lambda: self._build(layers, layer_count, balance, tied))
            phases = self._phases(build, shares)
            given = layers if isinstance(layers, Sequence | nn.ModuleList | nn.Sequential) else []
            together = self._together([*tied, *ties_of(given)], shares)
            ties = tied_stages(together, shares)
            self.program = self._team.all_or_none(
                lambda: program_for(plan, program, phases, ties, costs, wgrad_microbatches)
            )
            """What runs."""
            self._agree(
                {
                    "cut": str([len(share) for share in shares]),
                    "checkpoint": str(checkpoint),
                    "recompute": str(list(recompute)),
                    "tied": str(sorted(set(together.values()))),
                    "wgrad_microbatches": str(self.program.anatomy.wgrad_microbatches),
                    "plan" if plan is not None else "program": digest_of(self.program),
                    "gradients": gradients,
                    "dynamic_shapes": str(dynamic_shapes),
                    "seed": str(seed),
                    "timeout": str(timeout),
                }
            )
            self._make_stages(shares, given, together, checkpointed=checkpoint, recomputed=self._recomputed(recompute))
            self._transfers = Transfers(self._team, self.program, self._device)
            if self._device.type == "cuda":  # autograd's thread would find no context for its first matrix product
                torch.autograd.backward(torch.zeros(1, device=self._device, requires_grad=True).sum())
            sums = partial(self._replicas.sum_stages, gradients=self._gradients)
            everybody = tuple(range(self._team.size))
            self._begins = None if dynamic_shapes else Agreement(self._team, [everybody])
            self._binding = self._bind(self.program, reduce=sums)
        self._layout = 0  # of the parameters that are trained
        self._gradients.several_streams = self._binding.several_streams
        self._evaluation: StepBinding | None = None
        self._evaluations = 0
        self._total_of_last: Total | None = None  # step, whose loss may not have been asked for yet
        self._counted: bool | None = None  # whether the loss gives a sum and a count, once a step has shown it
        self._key = RngKey(seed=seed, replica=place_among(mesh.mesh.tolist()))
        self._team.supervisor.ready()

    def _build(
        self,
        layers: Layers | Callable[[int], nn.Module],
        layer_count: int | None,
        balance: Sequence[int] | None,
        tied: Sequence[Sequence[str]],
    ) -> tuple[Callable[[int], nn.Module], list[tuple[int, ...]]]:
        """Make this rank's layers. How to make any, and the layers of each stage."""
        build, count = builder(layers, layer_count)
        demand_names(tied, count)
        shares = list(cut_layers(range(count), stages=self._placement.stages, balance=balance))
        if isinstance(layers, Sequence | nn.ModuleList | nn.Sequential):
            demand_own_statistics(layers, shares)
        here = sorted({stage for device, stage in self._placement.homes if device == self.rank})
        self._layers = {number: build(number).to(self._device) for stage in here for number in shares[stage]}
        self._module = nn.ModuleDict({str(number): layer for number, layer in self._layers.items()})
        if (wrong := unfit(self._layers)) is not None:
            raise PipelineError(wrong)
        return build, shares

    def _make_stages(
        self,
        shares: Sequence[Sequence[int]],
        given: Layers | Sequence[nn.Module],
        together: dict[str, tuple[str, ...]],
        *,
        checkpointed: bool,
        recomputed: dict[str, nn.Module],
    ) -> None:
        """The stages of this rank, with what it holds together with others, and where gradients are summed."""
        self._tie(together)
        sparse = {id(parameter) for module in self.modules() if is_sparse(module) for parameter in module.parameters()}
        homes = self._placement.homes
        self._replicas = find_shared(self._module, homes, shares, together, self._team, sparse=sparse)
        self._all_or_none(self._replicas.wrong(self._device))
        self._replicas.start_equal(self._device)
        shared, here_layers = self._replicas, self._layers

        def demand(parameters: Sequence[Tensor]) -> None:
            if (wrong := unfit(here_layers)) is not None:
                raise PipelineError(wrong)
            shared.demand(parameters)

        self._gradients = Gradients(
            self._gradient_kind,
            is_loose=lambda parameter: id(parameter) in sparse or shared.is_sparse(parameter),
            shared_as=shared.shared_as,
            demand=demand,
            name_of=partial(_name_of, self._module),
        )
        self._stages = {
            stage: Stage(
                {number: self._layers[number] for number in shares[stage]},
                self.program.anatomy,
                stage,
                gradients=self._gradients,
                device=self._device,
                checkpointed=checkpointed,
                elsewhere=partial(_elsewhere, layers=given),
                replicated=sum(stage == other for _, other in homes) > 1,
                recomputed={name: it for name, it in recomputed.items() if int(name.split(".")[0]) in shares[stage]},
            )
            for stage in sorted({stage for device, stage in homes if device == self.rank})
        }

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        accumulate: bool = False,
        record: bool = False,
        check_finite: bool = True,
    ) -> StepResult:
        """Run one step: forwards, backwards, gradients in the parameters' `.grad`.

        Inputs and targets are given whole (a tensor, tuple or dict, cut along the first dimension) or as a list or
        iterator of microbatches, on the ranks that need them: inputs where the first stage lives, targets where the
        last one does. Gradients replace those of the step before, or are added to them with `accumulate`. With
        `record`, on all ranks alike, the result has the measured timeline. A loss that is not finite is an error, named
        with its microbatch; without `check_finite` only once the loss is asked for, and until then nobody waits for it.
        """
        begun = False
        self._demand_open()
        try:
            with self._guarding(self._step_label(record=record, accumulate=accumulate)):
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
                given = microbatches, losses.targets, rows
                self._binding.begin(partial(begin_of, given, self._module, self._loss, self._device, self._layout))
                self._replicas.begin(self._gradients, partial(self._leaves_behind, microbatches, losses))
                recorder = Recorder(len(self._binding.tasks)) if record else None
                self._binding.run(microbatches, losses, recorder, key=self._key, rows=rows)
                self._catch_up(recorder is not None)
                wrong = self._found_wrong(check_buffers, losses)
                timeline = self._gathered(recorder) if recorder is not None else None
                total = self._total(losses, wrong is not None)
                if check_finite or changed or self._counted is None:
                    self._demand_all_well(total, wrong)
                elif wrong is not None:
                    raise wrong
                count = self._count(losses, total, wait=check_finite)
                self._run_behind(losses, microbatches, (inputs, targets), count)
                self._replicas.end(self._gradients)
            if check_finite:
                _ = total.mean
            with self._guarding():
                self._gradients.give_out(count)
            self._key = replace(self._key, step=self._key.step + 1)
        except BaseException:
            if begun:
                self._gradients.restore()
            raise
        finally:
            self._team.supervisor.answer()
        return StepResult(total, timeline)

    def eval_step(self, inputs: Any = None, targets: Any = None) -> StepResult:
        """The loss of a batch, without gradients, in evaluation mode."""
        self._demand_open()
        self._evaluations += 1
        if self._evaluation is None:
            program = evaluation_of(self.program)
            self._evaluation = self._bind(program)
        label = f"evaluation {self._evaluations}"
        with self._guarding(label), evaluating(self._layers.values()), torch.inference_mode(False), torch.no_grad():
            losses, microbatches, rows = self._batch(inputs, targets)
            given = microbatches, losses.targets, rows
            self._evaluation.begin(partial(begin_of, given, self._module, self._loss, self._device))
            self._evaluation.run(microbatches, losses, key=self._key, rows=rows)
            total = self._total(losses)
            total.wait()
        self._team.supervisor.answer()
        _ = total.mean
        return StepResult(total)

    def close(self) -> None:
        """Let go of connections and threads. A pipeline that failed, or was closed, runs nothing more."""
        if not self._finished and self._total_of_last is not None:
            with suppress(PipelineError):  # whoever asks for that loss is told
                self._total_of_last.wait()
        self._finished = self._finished or "this pipeline was closed"
        self._team.close()
        self._close_links()

    def _close_links(self) -> None:
        self._transfers.close()
        self._replicas.close()
        if self._begins is not None:
            self._begins.close()

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's, under the names that `nn.Sequential(*layers)` would give them; a tied one by its first name."""
        return self._module.named_parameters(remove_duplicate=remove_duplicate)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's, frozen ones too."""
        return self._module.parameters()

    def main_grads(self) -> dict[str, Tensor | None]:
        """With `gradients="float32"`, the gradients of this rank's trained parameters as they were summed, by name; a
        tied parameter has its first. They are there until the next step, which may write into them.
        """
        if self._gradient_kind != "float32":
            raise PipelineError('main_grads() is for pipelines that were made with gradients="float32"')
        self._gradients.demand_main_grads()
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: self._gradients.main_grad(parameter) for name, parameter in trained.items()}

    def modules(self) -> Iterator[nn.Module]:
        """This rank's layers and all modules in them."""
        return (module for _, module in self.named_modules())

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The same, under the names that `nn.Sequential(*layers)` would give them."""
        return ((name, module) for name, module in self._module.named_modules() if name)

    def train(self, mode: bool = True) -> "Pipeline":
        """Put this rank's layers in training mode, or in evaluation mode, as `nn.Module.train` does."""
        self._module.train(mode)
        return self

    @property
    def step_count(self) -> int:
        """How many steps were run; random numbers depend on it, so a run that is resumed sets it."""
        return self._key.step

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._key = replace(self._key, step=count)

    def eval(self) -> "Pipeline":
        """Put this rank's layers in evaluation mode. `eval_step` does so by itself, for as long as it runs."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether this rank's layers are in training mode, as `train` and `eval` left them."""
        return self._module.training

    def __repr__(self) -> str:
        stages = ", ".join(map(str, sorted(self._stages)))
        layers = repr(self._module).partition("\n")[2]
        ranks, of = self._placement.devices, self._placement.stages
        return f"Pipeline(  # rank {self.rank} of {ranks}, stages {stages} of {of}\n{layers}"

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part, under the names that `nn.Sequential(*layers)` would give it."""
        return dict(self._module.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part from a state dict, which may hold more."""
        mine = {f"{number}." for number in self._layers}
        try:
            self._module.load_state_dict(
                {name: value for name, value in state.items() if name[: name.find(".") + 1] in mine}
            )
        except RuntimeError as error:
            if type(error) is not RuntimeError or not str(error).startswith("Error(s) in loading"):
                raise  # a layer's own
            raise RuntimeError(str(error).replace("ModuleDict", f"the layers of rank {self.rank}")) from None

    def split_report(self) -> dict[str, bool]:
        """This rank's parameters, and whether their gradients are put off into the weight part of the backward."""
        late = {
            id(parameter)
            for stage in self._stages.values()
            for layer in stage.deferral.layers
            for parameter in layer.parameters()
        }
        every = self.named_parameters(remove_duplicate=False)
        return {name: id(parameter) in late for name, parameter in every}

    def _bind(self, program: Program, reduce: Callable[[tuple[int, ...]], Work | None] | None = None) -> StepBinding:
        shape_cache = None if self._begins is None else ShapeCache(self._begins, self._team.size)
        return StepBinding(
            program, self._team.supervisor, self._stages, self._transfers, reduce=reduce, shape_cache=shape_cache
        )

    def _recomputed(self, patterns: Sequence[str]) -> dict[str, nn.Module]:
        """This rank's modules with such names. Each name must be somebody's."""
        found = modules_named(self._layers, patterns)
        mine = [any(fnmatch(name, pattern) for name in found) for pattern in patterns]
        for pattern, *some in zip(patterns, *self._team.gather(mine, list[bool]), strict=True):
            if not any(some):
                raise PipelineError(f"no module is called {pattern!r:.60}, so it cannot be recomputed")
        return outermost(found)

    def _phases(self, build: Callable[[int], nn.Module], shares: Sequence[Sequence[int]]) -> list[list[Layer]] | None:
        """The phases of all stages, None if no layer offers any; otherwise other ranks' layers are asked too."""
        if not any(self._team.gather(any(is_phased(layer) for layer in self._layers.values()), bool)):
            return None
        return [anatomy_of([self._layers.get(number) or build(number) for number in share]) for share in shares]

    def _agree(self, options: dict[str, str]) -> None:
        """All ranks have been given the same, or none goes on."""
        first, *others = self._team.gather(options, dict[str, str])
        for rank, other in enumerate(others, 1):
            for name, value in first.items():
                if other.get(name) != value:
                    values = f" ({other[name]:.40} and {value:.40})" if name not in ("plan", "program") else ""
                    raise told(f"rank {rank} was given another {name} than rank 0{values}")

    def _all_or_none(self, wrong: str | None) -> None:
        """Refuse what is wrong on any rank, on all."""

        def demand() -> None:
            if wrong is not None:
                raise PipelineError(wrong)

        self._team.all_or_none(demand)

    def _together(self, ties: Sequence[Sequence[str]], shares: Sequence[Sequence[int]]) -> dict[str, tuple[str, ...]]:
        """For each name that is tied, all that it is tied to: by these ties, or because they are one parameter already,
        in layers of several stages.
        """
        places, given = places_of(self._module), joined(ties)
        self._all_or_none(conflicting(given, places))
        stage_of = {number: stage for stage, share in enumerate(shares) for number in share}
        several = [
            names for names in names_of(places).values() if len({stage_of[layer_of(name)] for name in names}) > 1
        ]
        found = self._team.gather(several, list[list[str]])
        return joined([*ties, *(names for some in found for names in some)])

    def _tie(self, together: dict[str, tuple[str, ...]]) -> None:
        """What has several names here is one parameter from now on."""

        def most(table: Tensor) -> Tensor:
            assert self._team.host is not None
            self._team.all_reduce(table, self._team.host, dist.ReduceOp.MAX)
            return table

        if (wrong := wrong_ties(together, dict(self.named_parameters(remove_duplicate=False)), most)) is not None:
            raise PipelineError(wrong)
        tie(together, places_of(self._module))

    def _gathered(self, recorder: Recorder) -> Timeline | None:
        return self._team.start(lambda: recorder.gathered(self.program, self._team.host, self._team.settle))

    def _demand_open(self) -> None:
        if self._finished:
            raise PipelineError(f"{self._finished}; make a new one")

    def _step_label(self, **options: bool) -> str:
        """With what must be the same on all ranks."""
        given = [name for name, value in options.items() if value]
        return f"step {self._key.step + 1}" + (f" ({', '.join(given)})" if given else "")

    @contextmanager
    def _guarding(self, label: str = "") -> Iterator[None]:
        """A step, or more of it: what goes wrong in it is told to all, and nothing is left waiting."""
        try:
            with self._team.supervisor.guarding(label):
                try:
                    yield
                except RuntimeError as error:
                    # Of a collective in a layer too: it ends because another rank has failed.
                    known = self._team.supervisor.has_failed or "gloo/" in str(error) or self._has_broken()
                    if isinstance(error, StrettoError) or not known:
                        raise
                    raise self._team.supervisor.explained(error, "the others") from error
        except BaseException as error:
            self._finished = f"this pipeline has failed and is finished ({named(error)})"
            self._team.end()
            self._close_links()
            raise

    def _has_broken(self) -> bool:
        """Whether a group that does not block has failed."""
        try:
            self._check_groups()
        except RuntimeError:
            return True
        return False

    def _check_groups(self) -> None:
        self._transfers.check()
        if self._team.everybody is not None:
            check_group(self._team.everybody)

    def _catch_up(self, wanted: bool = True) -> None:
        """Let the host wait until the device has got here."""
        if wanted and self._device.type == "cuda":
            what = "the device to end the step"
            self._team.catch_up(what)
            with self._team.supervisor.explaining(lambda: what):
                self._check_groups()  # streams that were let go have ended too, but nothing has arrived

    def _batch(self, inputs: Any, targets: Any) -> tuple[Losses, list[Value] | None, int]:
        """Where losses go, the microbatches, and how many rows were given if they were given whole."""
        wanted, target_rows = self._given(targets, "targets", self._placement.stages - 1)
        microbatches, rows = self._given(inputs, "inputs", 0)
        return Losses(self._loss, wanted, self._placement.microbatches, self._device, target_rows), microbatches, rows

    def _given(self, batch: Any, name: str, stage: int) -> tuple[list[Value] | None, int]:
        """The microbatches, demanded where they are needed."""
        if stage not in self._stages:
            return None, 0
        if batch is None:
            raise PipelineError(f"rank {self.rank} runs stage {stage} and needs {name}")
        return cut(batch, self._placement.microbatches, name)

    def _count(self, losses: Losses, total: Total, *, wait: bool) -> Tensor | None:
        """What gradients are to be divided by, if by anything. Only the first step must wait to know that."""
        first = self._counted is None
        counted = total.counted if wait or first else losses.counted if losses.here else self._counted
        if first:
            self._counted = counted
        elif counted != self._counted:
            raise PipelineError("the loss gives a sum and a count in some steps only; it must in all or none")
        return total.count() if counted else None

    def _run_behind(self, losses: Losses, microbatches: Any, batch: Any, count: Tensor | None) -> None:
        """Run the graphs behind inputs and targets backward, by one backward, from their gradients."""
        if not self._binding.has_behind(losses):
            return
        own = {id(tensor) for tensor in tensors_of((batch, microbatches))}
        found = self._binding.behind(losses, own)
        if not found:
            return
        tensors, grads = zip(*found, strict=True)
        torch.autograd.backward(tensors, grads if count is None else [grad / count for grad in grads])
        for stage in self._stages.values():
            self._gradients.collect(stage.parameters(), count)

    def _leaves_behind(self, microbatches: list[Value] | None, losses: Losses) -> set[int]:
        """The ids of all leaves that inputs and targets depend on."""
        given = [tensor for tensor in tensors_of((microbatches, losses.targets)) if tensor.requires_grad]
        return {id(leaf) for leaf in leaves_of([get_gradient_edge(tensor).node for tensor in given], ())}

    def _found_wrong(self, check_buffers: Callable[[], None], losses: Losses) -> PipelineError | None:
        """What a step that has run should not have done, on this rank."""
        try:
            check_buffers()
            for stage in self._stages.values():
                stage.demand_as_before()
            self._gradients.demand_no_hooks()
            losses.demand_graph()
        except PipelineError as error:
            return error
        return None

    def _demand_all_well(self, total: Total, wrong: PipelineError | None) -> None:
        """Raise if a rank has found something wrong."""
        (refusing,) = total.more()
        if wrong is not None:
            raise wrong
        if refusing:
            raise self._team.supervisor.explained(
                RuntimeError("another rank refuses the step"), "the others to end the step"
            )

    def _total(self, losses: Losses, refuses: bool = False) -> Total:
        """The losses of all ranks; with them it is told whether a rank refuses the step."""
        table = losses.table()
        whole = torch.cat([table.flatten(), table.new_full((1,), float(refuses))])
        everybody = self._team.everybody
        assert everybody is not None
        work = self._team.start(lambda: all_reduce(everybody, whole, dist.ReduceOp.SUM))

        def wait() -> None:
            self._team.settle(work, whole)
            self._catch_up()

        self._total_of_last = Total(whole[: table.numel()].view_as(table), whole[table.numel() :], wait)
        return self._total_of_last


def _demand_mesh(mesh: Any) -> None:
    """Refuse what is no mesh, or none of whose ranks we could meet."""
    if not isinstance(mesh, DeviceMesh):
        raise PipelineError(f"mesh is a DeviceMesh, as init_device_mesh makes it (got {mesh!r:.60})")
    if mesh.ndim != 1:
        names = ", ".join(mesh.mesh_dim_names or ()) or "no names"
        raise PipelineError(f'mesh has {mesh.ndim} dimensions ({names}); give one of them, such as mesh["pp"]')
    ranks = mesh.mesh.tolist()
    if ranks != sorted(ranks):
        raise PipelineError(f"mesh lists its ranks as {ranks}; give them in ascending order")


def _wrong(
    loss: Any, seed: Any, gradients: Any, checkpoint: bool, recompute: Any, tied: Any, dynamic_shapes: Any
) -> StrettoError | None:
    """What is wrong with what a pipeline is to be made of, if anything is."""
    if not callable(loss):
        return PipelineError(f"loss is a function of output and target (got {loss!r:.60})")
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        return PipelineError(f"seed is a whole number of at most 63 bits (got {seed!r:.60})")
    if gradients not in KINDS:
        return PipelineError(f"gradients is one of {', '.join(map(repr, KINDS))} (got {gradients!r:.60})")
    for name, given in (("recompute", recompute), ("tied", tied)):
        if isinstance(given, str) or not isinstance(given, Sequence):
            return PipelineError(f"{name} is a list, such as {_EXAMPLES[name]} (got {given!r:.40})")
    if not isinstance(dynamic_shapes, bool):
        return PipelineError(f"dynamic_shapes is True or False (got {dynamic_shapes!r:.60})")
    if checkpoint and recompute:
        return PipelineError("checkpoint=True recomputes whole layers; give that or modules to recompute, not both")
    return None


def _name_of(module: nn.Module, tensor: Tensor) -> str:
    found = (name for name, parameter in module.named_parameters() if parameter is tensor)
    return next(found, f"a parameter of shape {tuple(tensor.shape)}")


def _elsewhere(tensor: Tensor, layers: Layers | Sequence[nn.Module]) -> str | None:
    """The name that a parameter has in all layers, of which this rank has some."""
    every = (layer.named_parameters(prefix=str(number)) for number, layer in enumerate(layers))
    return next((name for named in every for name, other in named if other is tensor), None)
