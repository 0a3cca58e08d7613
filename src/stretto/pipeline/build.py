"""Builds the parts of a pipeline on each rank, in an order of collectives that is the same everywhere."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stretto.choose import MemoryChoice, choose_memory
from stretto.execute.members import Members
from stretto.execute.team import Team
from stretto.ir.errors import PipelineError, peer_failure
from stretto.ir.mesh import MeshShape
from stretto.ir.placement import Placement
from stretto.layers import Layer
from stretto.memory import Memory
from stretto.moe.all_to_all import AllToAll
from stretto.moe.exchange import Exchange, validate_exchange
from stretto.moe.expert_ranks import ExpertRanks
from stretto.pipeline.agreement import Agreement
from stretto.pipeline.bind import Reduce, StepBinding
from stretto.pipeline.exchanges import Exchanges
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.layers import Layers, is_sparse, unfit
from stretto.pipeline.memory_sites import Decisions, Part, PartSites, find_sites, not_found, unknown, unused
from stretto.pipeline.mesh import shape_of
from stretto.pipeline.names import Names, prefix_of
from stretto.pipeline.options import Options, wrong_option
from stretto.pipeline.placing import (
    Placed,
    Together,
    gather_experts,
    gather_names,
    gather_phases,
    gather_ties,
    place_layers,
    raise_on_all,
    tie_parameters,
)
from stretto.pipeline.programs import digest_of, on_mesh, program_for, wrong_program
from stretto.pipeline.replicas import Replicas
from stretto.pipeline.shape_cache import ShapeCache
from stretto.pipeline.shared_experts import tied_experts
from stretto.pipeline.shared_parameters import find_shared
from stretto.pipeline.stage import Stage
from stretto.pipeline.ties import tied_stages
from stretto.pipeline.transfers import Transfers
from stretto.program.program import Program
from stretto.program.sums import reduces
from stretto.program.task import EXPERT_SUM


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a pipeline on one rank."""

    team: Team
    placement: Placement
    program: Program
    layers: dict[int, nn.Module]
    layer_count: int
    """The number of layers of the whole model."""
    shape: MeshShape
    module: nn.ModuleDict
    names: Names
    replicas: Replicas
    gradients: Gradients
    stages: dict[int, Stage]
    transfers: Transfers
    agreement: Agreement
    """Exchanges numbers between all ranks."""
    starts: Agreement | None
    """The same, to exchange how each step begins; None with `dynamic_shapes`."""
    binding: StepBinding
    """The training step."""
    memory: Memory
    """The memory policy, with what costs have chosen."""
    memory_choice: MemoryChoice | None


def build(layers: Layers | Callable[[int], nn.Module], loss: Any, mesh: DeviceMesh, options: Options) -> Parts:
    """Build this rank's parts. All ranks call this together.

    Nearly every step below is collective (see its docstring), so no rank may skip one, and their order is fixed.
    """
    shape = shape_of(mesh)
    device = torch.device(mesh.device_type)
    team = _form_team(loss, mesh, device, shape, options)
    with team.closing_if_it_fails():
        options = replace(options, plan=on_mesh(options.plan, shape))
        placement = (options.program if options.program is not None else options.plan).placement  # type: ignore[union-attr]
        placed = place_layers(team, shape, device, placement, layers, options)
        experts = gather_experts(team, placed, shape)
        phases = gather_phases(team, placed)
        names, tied = gather_names(team, placed, options.tied)
        together = names.together = gather_ties(team, placed, names, tied)
        program, memory_choice = _make_program(team, placed, phases, together, experts, options)
        _validate_same_costs(team, options)
        if memory_choice is not None:
            options = replace(options, memory=memory_choice.memory)
        _validate_same_options(team, placed, program, together, options)
        raise_on_all(team, tied_experts(placed.module, together, names))
        sites = _find_sites(team, placed, options.memory, in_phases=not program.anatomy.is_whole)
        tie_parameters(team, placed, names)
        sparse = _find_sparse(placed)
        replicas = _share_parameters(team, device, placement, placed, names, sparse, shape)
        raise_on_all(team, replicas.unsummed(_sums_of(program, team.rank)))
        gradients = _make_gradients(placed, names, replicas, sparse, options)
        connected = _make_exchange(team, shape, gradients, options)
        stages = _make_stages(device, placement, placed, program, gradients, sites, connected, options)
        transfers = Transfers(team, program, device)
        _warm_up_autograd(device)
        agreement = Agreement(team, [tuple(range(team.size))])
        starts = None if options.dynamic_shapes and shape.ep == 1 else agreement
        reduce = partial(replicas.sum_stages, gradients=gradients)
        binding = bind(
            program,
            team,
            stages,
            transfers,
            starts,
            reduce=reduce,
            dynamic_shapes=options.dynamic_shapes,
            host_bytes=options.memory.host_bytes,
        )
    return Parts(
        team=team,
        placement=placement,
        program=program,
        layers=placed.layers,
        layer_count=sum(map(len, placed.shares)),
        shape=shape,
        module=placed.module,
        names=names,
        replicas=replicas,
        gradients=gradients,
        stages=stages,
        transfers=transfers,
        agreement=agreement,
        starts=starts,
        binding=binding,
        memory=options.memory,
        memory_choice=memory_choice,
    )


def _form_team(loss: Any, mesh: DeviceMesh, device: torch.device, shape: MeshShape, options: Options) -> Team:
    """Validate the arguments and connect the ranks (collective): if one rank's arguments are wrong, all raise."""
    wrong = wrong_program(
        options.plan,
        options.program,
        options.costs,
        options.wgrad_microbatches,
        shape,
        memory=options.memory,
    )
    wrong = wrong or wrong_option(loss, options)
    members = Members.of_mesh(mesh)
    return Team(members, device, timeout=options.timeout, wrong=wrong, error=PipelineError, failure=peer_failure)


def _make_program(
    team: Team,
    placed: Placed,
    phases: list[list[Layer]] | None,
    together: Together,
    experts: list[int],
    options: Options,
) -> tuple[Program, MemoryChoice | None]:
    """Lower the plan, or validate the program that was passed (collective: if a rank fails, all raise). If costs are to
    choose what to offload, they do so first.
    """
    ties = tied_stages(together, placed.shares)

    def make() -> tuple[Program, MemoryChoice | None]:
        memory, choice = options.memory, None
        if memory.is_auto:
            choice = choose_memory(
                options.plan,  # type: ignore[arg-type]
                options.costs,  # type: ignore[arg-type]
                layers=phases,
                ties=ties,
                experts=experts,
                wgrad_microbatches=options.wgrad_microbatches,
                memory=memory,
            )
            memory = choice.memory
        program = program_for(
            options.plan,
            options.program,
            phases,
            ties,
            experts,
            options.costs,
            options.wgrad_microbatches,
            memory.copy_actions if memory.offloads else 0,
        )
        return program, choice

    return team.all_or_none(make)


def _validate_same_costs(team: Team, options: Options) -> None:
    """Raise unless costs choose what to offload on all ranks or on none, and are the same then (collective)."""
    text = msgspec.json.encode(options.costs, order="sorted", enc_hook=float) if options.memory.is_auto else b""
    first, *others = team.gather(text.decode(), str)
    for rank, other in enumerate(others, 1):
        if bool(other) != bool(first):
            auto = rank if other else 0
            raise peer_failure(f"rank {rank} was given another memory than rank 0: only that of rank {auto} is auto")
        if other != first:
            raise peer_failure(f"rank {rank} was given other costs than rank 0, and memory is auto, which goes by them")


def _validate_same_options(team: Team, placed: Placed, program: Program, together: Together, options: Options) -> None:
    """Raise unless all ranks were given the same options (collective)."""
    texts = {
        "cut": str([len(share) for share in placed.shares]),
        **{
            f"memory.{name}": str(getattr(options.memory, name)) for name in Memory.__struct_fields__ if name != "sites"
        },
        "tied": str(sorted(set(together.values()))),
        "wgrad_microbatches": str(program.anatomy.wgrad_microbatches),
        "plan" if options.plan is not None else "program": digest_of(program),
        "gradients": options.gradients,
        "dynamic_shapes": str(options.dynamic_shapes),
        "seed": str(options.seed),
        "timeout": str(options.timeout),
        "exchange": _described(options.exchange),
    }
    _validate_same_sites(team, options.memory)
    first, *others = team.gather(texts, dict[str, str])
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                values = f" ({other[name]:.40} and {value:.40})" if name not in ("plan", "program") else ""
                raise peer_failure(f"rank {rank} was given another {name} than rank 0{values}")


def _validate_same_sites(team: Team, memory: Memory) -> None:
    """Raise unless all ranks were given the same sites in the same order (collective)."""
    first, *others = team.gather({pattern: str(action) for pattern, action in memory.patterns.items()}, dict[str, str])
    for rank, other in enumerate(others, 1):
        if (how := _difference(other, first, rank)) is not None:
            raise peer_failure(f"rank {rank} was given another memory.sites than rank 0: {how}")


def _difference(sites: dict[str, str], first: dict[str, str], rank: int) -> str | None:
    """Return in words how the sites of a rank differ from those of rank 0: the first pattern that does."""
    for pattern in first | sites:
        here, there = sites.get(pattern, "not there"), first.get(pattern, "not there")
        if here != there:
            return f"{pattern!r:.60} is {here} on rank {rank} and {there} on rank 0"
    for here, there in zip(sites, first, strict=True):
        if here != there:
            return f"only their order differs, first where rank {rank} has {here!r:.60} and rank 0 {there!r:.60}"
    return None


def _described(function: Any) -> str:
    """Return a text that is the same for the same function, or class, with the same arguments."""
    if isinstance(function, partial):
        more = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in sorted(function.keywords.items()))]
        return f"{_described(function.func)}({', '.join(more)})"
    return getattr(function, "__qualname__", type(function).__qualname__)


def _sums_of(program: Program, rank: int) -> set[tuple[tuple[int, ...], bool]]:
    """Return the sums of gradients on this rank: the stages of each, and whether it sums experts."""
    work = program.work
    tasks = reduces(work)[program.device[reduces(work)] == rank]
    return {
        (program.anatomy.summed(stage, part), part == EXPERT_SUM)
        for stage, part in zip(work.stage[tasks].tolist(), work.part[tasks].tolist(), strict=True)
    }


def _find_sites(team: Team, placed: Placed, memory: Memory, *, in_phases: bool) -> dict[Part, PartSites]:
    """Return the sites of this rank's layers (collective). Raise if a pattern decides nothing on any rank."""
    decisions = Decisions(memory)
    sites = find_sites(decisions, placed.layers, in_phases=in_phases) if memory.patterns else {}
    every = team.gather(decisions.reasons, dict[str, str])
    if (pattern := unknown(memory, every)) is not None:
        raise PipelineError(not_found(pattern, chain.from_iterable(team.gather(decisions.near(pattern), list[str]))))
    if (wrong := unused(memory, every)) is not None:
        raise PipelineError(wrong)
    return sites


def _find_sparse(placed: Placed) -> set[int]:
    """Return the ids of this rank's parameters whose gradients are sparse."""
    modules = (module for module in placed.module.modules() if is_sparse(module))
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _share_parameters(
    team: Team,
    device: torch.device,
    placement: Placement,
    placed: Placed,
    names: Names,
    sparse: set[int],
    shape: MeshShape,
) -> Replicas:
    """Find what several ranks hold, connect these ranks, and broadcast the values they start with (collective)."""
    replicas = find_shared(placed.module, placement.homes, placed.shares, names, team, sparse=sparse, mesh=shape)
    raise_on_all(team, replicas.wrong(device))
    replicas.start_equal(device)
    return replicas


def _make_gradients(placed: Placed, names: Names, replicas: Replicas, sparse: set[int], options: Options) -> Gradients:
    layers = placed.layers

    def validate(parameters: Sequence[Tensor]) -> None:
        if (wrong := unfit(layers)) is not None:
            raise PipelineError(wrong)
        replicas.validate(parameters)

    return Gradients(
        options.gradients,
        is_loose=lambda parameter: id(parameter) in sparse or replicas.is_sparse(parameter),
        shared_as=replicas.shared_as,
        validate=validate,
        name_of=partial(_name_of, placed.module, names),
    )


Connected = tuple[Exchange, ExpertRanks]
"""An exchange, and the ranks that it connects."""


def _make_exchange(team: Team, shape: MeshShape, gradients: Gradients, options: Options) -> Connected | None:
    """Connect the ranks that hold each other's experts (collective), by an exchange for this rank's."""
    if shape.ep == 1:
        return None
    every = {
        tuple(shape.device(pp=pp, replica=other) for other in shape.ep_replicas(replica))
        for pp in range(shape.pp)
        for replica in range(shape.replicas)
    }
    (group,) = (group for ranks in sorted(every) if (group := team.make(ranks)) is not None)
    make, expert_ranks = AllToAll if options.exchange is None else options.exchange, ExpertRanks(team, group)
    gradients.ignore(expert_ranks.anchor)

    def valid() -> Exchange:
        exchange = make(expert_ranks)
        validate_exchange(exchange)
        return exchange

    return team.all_or_none(valid), expert_ranks


def _make_stages(
    device: torch.device,
    placement: Placement,
    placed: Placed,
    program: Program,
    gradients: Gradients,
    sites: Mapping[Part, PartSites],
    connected: Connected | None,
    options: Options,
) -> dict[int, Stage]:
    shares = placed.shares

    def sites_of(stage: int) -> dict[Part, PartSites]:
        last = shares[stage][len(shares[stage]) - options.memory.keep_layers :] if options.memory.keep_layers else ()
        own = {part: of_part for part, of_part in sites.items() if part[0] in shares[stage]}
        return {part: of_part.staying() if part[0] in last else of_part for part, of_part in own.items()}

    def exchanges(stage: int) -> Exchanges | None:
        if connected is None:
            return None
        module = nn.ModuleList(placed.layers[number] for number in shares[stage])
        return Exchanges(module, stage, *connected)

    return {
        stage: Stage(
            {number: placed.layers[number] for number in shares[stage]},
            program.anatomy,
            stage,
            gradients=gradients,
            device=device,
            elsewhere=partial(_name_elsewhere, layers=placed.modules),
            replicated=sum(stage == other for _, other in placement.homes) > 1,
            exchanges=exchanges(stage),
            sites=sites_of(stage) if options.memory.patterns else None,
            memory=options.memory,
        )
        for stage in placed.stages
    }


def _warm_up_autograd(device: torch.device) -> None:
    """Run a backward on CUDA, so that autograd's thread has a context for its first matrix product."""
    if device.type == "cuda":
        torch.autograd.backward(torch.zeros(1, device=device, requires_grad=True).sum())


def bind(
    program: Program,
    team: Team,
    stages: dict[int, Stage],
    transfers: Transfers,
    starts: Agreement | None,
    *,
    reduce: Reduce | None = None,
    dynamic_shapes: bool = False,
    host_bytes: int | None = None,
) -> StepBinding:
    """Bind a program's tasks: a training step with `reduce`, otherwise an evaluation step.

    With `dynamic_shapes`, or without `starts`, every message is described.
    """
    mesh, rank = program.placement.mesh, team.rank
    pipeline = [device for device in range(team.size) if mesh is None or mesh.place(device)[1] == mesh.place(rank)[1]]
    shape_cache = None if starts is None else ShapeCache(starts, team.size, pipeline, remembers=not dynamic_shapes)
    return StepBinding(
        program, team.supervisor, stages, transfers, reduce=reduce, shape_cache=shape_cache, host_bytes=host_bytes
    )


def _name_of(module: nn.Module, names: Names, tensor: Tensor) -> str:
    found = (names.seen(name) for name, parameter in module.named_parameters() if parameter is tensor)
    return next(found, f"a parameter of shape {tuple(tensor.shape)}")


def _name_elsewhere(tensor: Tensor, layers: Layers) -> str | None:
    """Return a tensor's name among the parameters of all layers, including other ranks', or None."""
    every = (layer.named_parameters(prefix=prefix_of(number, layer)) for number, layer in enumerate(layers))
    return next((name for named in every for name, other in named if other is tensor), None)
