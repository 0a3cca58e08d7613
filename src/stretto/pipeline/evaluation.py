"""Evaluations: forwards only, for a loss, metrics or outputs; on as many microbatches as the batch has rows for."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from torch import nn

from stretto.execute.team import Team
from stretto.ir.errors import PipelineError, peer_failure
from stretto.pipeline.agreement import Agreement
from stretto.pipeline.bind import StepBinding
from stretto.pipeline.build import bind
from stretto.pipeline.losses import Loss, Losses
from stretto.pipeline.measures import Measures
from stretto.pipeline.microbatches import Microbatches, cut, needed, rows_of, validate_cuts
from stretto.pipeline.programs import evaluation_of
from stretto.pipeline.rng import RngKey
from stretto.pipeline.shape_cache import begin_of
from stretto.pipeline.stage import Stage
from stretto.pipeline.transfers import Transfers
from stretto.program.program import Program

_MISSING = -1  # stands for the rows of a batch that was not passed


class Given(msgspec.Struct, frozen=True):
    """What a rank was given for an evaluation."""

    inputs: int | None
    """The rows of its inputs, 0 for a list of microbatches; None if it runs no first stage."""
    targets: int | None
    """The same for targets and the last stage."""
    metrics: list[str]
    outputs: bool


class Agreed(NamedTuple):
    """What ranks have agreed on, from what each was given."""

    microbatches: int
    """How many each pipeline runs."""
    has_targets: bool
    is_uneven: bool
    """Whether pipelines have batches of different sizes."""


def agree(given: Sequence[Given], microbatches: int, replica_of: Callable[[int], int] = lambda _: 0) -> Agreed:
    """Return what to run, from what each rank was given; `replica_of` returns the pipeline that a rank is in.

    Raise PipelineError, on every rank the same, if that does not fit together.
    """
    for rank, other in enumerate(given):
        if other.metrics != given[0].metrics:
            names = " and ".join(", ".join(each.metrics) or "none" for each in (other, given[0]))
            raise peer_failure(
                f"rank {rank} was given other metrics than rank 0 ({names:.120}); give all ranks the same"
            )
        if other.outputs != given[0].outputs:
            raise peer_failure(
                f"rank {rank} was given outputs={other.outputs}, but rank 0 outputs={given[0].outputs}; give all ranks "
                "the same"
            )
    inputs = {rank: each.inputs for rank, each in enumerate(given) if each.inputs is not None}
    targets = {rank: each.targets for rank, each in enumerate(given) if each.targets is not None}
    has_targets = _MISSING not in targets.values()
    if not has_targets and set(targets.values()) != {_MISSING}:
        without = next(rank for rank, rows in targets.items() if rows == _MISSING)
        raise PipelineError(f"rank {without} was given no targets, but another rank that runs the last stage was")
    sizes = []
    for replica in dict.fromkeys(map(replica_of, inputs)):
        own_inputs, own_targets = (
            {rank: rows for rank, rows in every.items() if replica_of(rank) == replica} for every in (inputs, targets)
        )
        rows = _same("inputs", own_inputs)
        if has_targets:
            validate_cuts(rows, _same("targets", own_targets), microbatches)
            rows = rows or next(iter(own_targets.values()))
        sizes.append(rows)
    count = min(microbatches, *(rows or microbatches for rows in sizes))
    return Agreed(count, has_targets, len({rows for rows in sizes if rows}) > 1)


def _same(name: str, rows: Mapping[int, int]) -> int:
    """Return the rows of a batch that several ranks were given."""
    first, *_ = rows
    for rank, number in rows.items():
        if number != rows[first]:
            one, other = (f"{rows[each]} rows" if rows[each] else "a list" for each in (first, rank))
            raise peer_failure(
                f"rank {first} was given {name} of {one}, but rank {rank} of {other}; give both the same"
            )
    return rows[first]


class Evaluator:
    """Runs evaluations of one pipeline, by a program for each number of microbatches that has occurred."""

    def __init__(
        self,
        program: Program,
        team: Team,
        stages: dict[int, Stage],
        transfers: Transfers,
        starts: Agreement | None,
        module: nn.Module,
        loss: Loss,
    ) -> None:
        """`module` holds this rank's layers. Without `starts`, every message carries its description."""
        self._program, self._team, self._stages = program, team, stages
        self._transfers, self._starts = transfers, starts
        self._module, self._loss = module, loss
        self._bindings: dict[int, StepBinding] = {}

    def run(
        self, inputs: Any, targets: Any, metrics: Mapping[str, Loss] | None, key: RngKey, *, outputs: bool
    ) -> Measures:
        """Run the forwards of a batch, and return what this rank has measured. All ranks call this together."""
        metrics = _validated(metrics)
        stages = self._program.placement.stages
        given = Given(
            self._rows(inputs, "inputs", 0),
            self._rows(targets, "targets", stages - 1, optional=outputs),
            sorted(metrics),
            outputs,
        )
        every = Microbatches.of(self._program.placement, self._team.rank)
        count, has_targets, is_uneven = agree(
            self._team.gather(given, Given), every.count, self._program.placement.replica
        )
        numbers = every.fewer(count)
        microbatches, rows = (None, 0) if given.inputs is None else cut(inputs, count, "inputs")
        cut_targets, target_rows = (
            (None, 0) if given.targets is None or not has_targets else cut(targets, count, "targets")
        )
        device = self._team.device
        functions = [("", self._loss), *((name, metrics[name]) for name in given.metrics)] if has_targets else []
        losses = [
            Losses(function, cut_targets, numbers, device, target_rows, metric=name) for name, function in functions
        ]
        measures = Measures(losses, numbers, device, keeps_outputs=outputs, is_uneven=is_uneven)
        binding = self._binding(count)
        binding.begin(partial(begin_of, (microbatches, cut_targets, rows), self._module, self._loss, device))
        binding.run(microbatches, measures, key=key, rows=rows)
        return measures

    def _rows(self, batch: Any, name: str, stage: int, *, optional: bool = False) -> int | None:
        """Return the rows of a batch, None if this rank does not run the stage that takes it."""
        if stage not in self._stages:
            return None
        if batch is None and optional:
            return _MISSING
        return rows_of(needed(batch, name, self._team.rank, stage), name)

    def _binding(self, count: int) -> StepBinding:
        if count not in self._bindings:
            program = evaluation_of(self._program, count)
            self._bindings[count] = bind(program, self._team, self._stages, self._transfers, self._starts)
        return self._bindings[count]


def _validated(metrics: Any) -> Mapping[str, Loss]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(
        isinstance(name, str) and name and callable(function) for name, function in metrics.items()
    ):
        raise PipelineError(
            'metrics are functions of output and target, by name, such as {"accuracy": accuracy} '
            f"(got {metrics!r:.60})"
        )
    return metrics
