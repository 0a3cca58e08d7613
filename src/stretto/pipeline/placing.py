"""Places layers on ranks: which of them this rank holds, and what all ranks must know of each other's."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.execute.team import Team
from stretto.ir.errors import PipelineError
from stretto.ir.mesh import MeshShape
from stretto.ir.placement import Placement
from stretto.layers import Layer, cut_layers
from stretto.moe.experts import experts_of, sharded_experts
from stretto.pipeline.layers import Layers, builder, unfit, validate_own_statistics
from stretto.pipeline.named_layer import NamedLayer
from stretto.pipeline.names import Names, clash_of
from stretto.pipeline.options import Options
from stretto.pipeline.phases import anatomy_of, is_phased
from stretto.pipeline.shared_experts import shared_experts
from stretto.pipeline.ties import (
    conflicting,
    joined,
    layer_of,
    names_of,
    numbered,
    places_of,
    tie,
    ties_of,
    validate_groups,
    wrong_ties,
)

Together = dict[str, tuple[str, ...]]
"""For each tied name, all names of its tie."""


class Placed(NamedTuple):
    """This rank's layers, and what it knows of all others."""

    build: Callable[[int], nn.Module]
    """Builds the layer of any number."""
    modules: Layers
    """All layers, if they were passed as modules; otherwise empty."""
    shares: list[tuple[int, ...]]
    """The layers of each stage."""
    stages: list[int]
    """The stages of this rank."""
    layers: dict[int, nn.Module]
    """The layers of this rank."""
    module: nn.ModuleDict
    """The layers of this rank, as one module."""


def place_layers(
    team: Team,
    shape: MeshShape,
    device: torch.device,
    placement: Placement,
    layers: Layers | Callable[[int], nn.Module],
    options: Options,
) -> Placed:
    """Cut the layers into stages, and build this rank's (collective: if a rank fails, all raise)."""

    def place() -> Placed:
        build, count = builder(layers, options.layer_count)
        validate_groups(options.tied)
        shares = list(cut_layers(range(count), stages=placement.stages, balance=options.balance))
        modules: Layers = []
        if isinstance(layers, Sequence | nn.ModuleList | nn.Sequential):
            validate_own_statistics(layers, shares)
            if shape.ep > 1 and (wrong := shared_experts(enumerate(layers))) is not None:
                raise PipelineError(wrong)
            modules = layers
        stages = sorted({stage for home, stage in placement.homes if home == team.rank})
        ep_rank = shape.ep_rank(shape.place(team.rank)[1])
        own = {}
        for number in (number for stage in stages for number in shares[stage]):
            layer = build(number)
            for experts in experts_of(layer):
                experts.shard(ep_rank, shape.ep)  # before the layer moves, so that only these move
            own[number] = layer.to(device)
        module = nn.ModuleDict({str(number): layer for number, layer in own.items()})
        every = enumerate(modules) if modules else own.items()
        wrong = unfit(own) or clash_of(every) or (shared_experts(own.items()) if shape.ep > 1 else None)
        if wrong is not None:
            raise PipelineError(wrong)
        return Placed(build, modules, shares, stages, own, module)

    return team.all_or_none(place)


def gather_experts(team: Team, placed: Placed, shape: MeshShape) -> list[int]:
    """Return the stages that have experts of which each rank holds some (collective)."""
    own = [
        stage
        for stage in placed.stages
        if any(sharded_experts(placed.layers[number]) for number in placed.shares[stage])
    ]
    stages = sorted({stage for from_rank in team.gather(own, list[int]) for stage in from_rank})
    if shape.ep > 1 and not stages:
        raise PipelineError(
            f"the mesh has ep={shape.ep}, but no layer has experts (stretto.moe.Experts) to share out; use dp instead"
        )
    return stages


def gather_phases(team: Team, placed: Placed) -> list[list[Layer]] | None:
    """Return the phases of all stages, None if no rank's layers have any (collective)."""
    has_phases = any(team.gather(any(is_phased(layer) for layer in placed.layers.values()), bool))
    own = team.all_or_none(lambda: {number: anatomy_of(layer) for number, layer in placed.layers.items()})
    every = [layers for from_rank in team.gather(own, dict[int, Layer]) for layers in from_rank.items()]
    anatomies = dict(every)
    for number, anatomy in every:
        if anatomy != anatomies[number]:
            raise PipelineError(f"layer {number} has other phases on one rank than on another")
    return [[anatomies[number] for number in share] for share in placed.shares] if has_phases else None


def gather_names(team: Team, placed: Placed, tied: Sequence[Sequence[str]]) -> tuple[Names, list[list[str]]]:
    """Find the `NamedLayer`s of all ranks, and the parameters that users tie by names of these (collective)."""
    named = {number: layer for number, layer in placed.layers.items() if isinstance(layer, NamedLayer)}
    wanted = {name for names in tied for name in names}
    own: dict[str, list[str]] = {}
    for number, layer in named.items():
        for name, _ in layer.named_parameters(remove_duplicate=False):
            if name in wanted:
                own.setdefault(name, []).append(f"{number}.{name}")
    everywhere: dict[str, set[str]] = {}
    for from_rank in team.gather(own, dict[str, list[str]]):
        for name, internal in from_rank.items():
            everywhere.setdefault(name, set()).update(internal)
    numbers = {number for from_rank in team.gather(sorted(named), list[int]) for number in from_rank}
    layer_count = sum(map(len, placed.shares))
    return Names(numbers), team.all_or_none(lambda: numbered(tied, everywhere, layer_count))


def gather_ties(team: Team, placed: Placed, names: Names, tied: Sequence[Sequence[str]]) -> Together:
    """Return all ties (collective): by `tied`, and by layers of several stages that already share a parameter."""
    ties = [*tied, *ties_of(placed.modules)]
    places = places_of(placed.module)
    raise_on_all(team, conflicting(joined(ties), places, names.seen))
    stage_of = {number: stage for stage, share in enumerate(placed.shares) for number in share}
    across_stages = [same for same in names_of(places).values() if len({stage_of[layer_of(name)] for name in same}) > 1]
    gathered = team.gather(across_stages, list[list[str]])
    return joined([*ties, *(same for from_rank in gathered for same in from_rank)])


def tie_parameters(team: Team, placed: Placed, names: Names) -> None:
    """Validate the ties over all ranks (collective), and make tied parameters of this rank one."""

    def most(table: Tensor) -> Tensor:
        assert team.host is not None
        team.all_reduce(table, team.host, dist.ReduceOp.MAX)
        return table

    parameters = dict(placed.module.named_parameters(remove_duplicate=False))
    if (wrong := wrong_ties(names.together, parameters, most, names.seen)) is not None:
        raise PipelineError(wrong)
    tie(names.together, places_of(placed.module))


def raise_on_all(team: Team, wrong: str | None) -> None:
    """Raise on all ranks if any rank has an error text (collective)."""

    def validate() -> None:
        if wrong is not None:
            raise PipelineError(wrong)

    team.all_or_none(validate)
