"""Finds what several ranks hold: the layers of stages that live on several devices, and tied parameters."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from stretto.execute.team import Team
from stretto.ir.mesh import MeshShape
from stretto.moe.experts import sharded_experts
from stretto.pipeline.names import Names
from stretto.pipeline.replicas import Held, Replicas
from stretto.pipeline.ties import Place, layer_of, names_of, places_of


def find_shared(
    module: nn.Module,
    homes: Iterable[tuple[int, int]],
    shares: Sequence[Sequence[int]],
    names: Names,
    team: Team,
    *,
    sparse: Collection[int],
    mesh: MeshShape,
) -> Replicas:
    """Return the parameters and buffers of this rank's module that other ranks hold too.

    `homes` are the (device, stage) pairs of the placement, `shares` the layers of each stage, `names` know which are
    tied, `sparse` are the ids of parameters whose gradients may be sparse. Experts that are sharded over the "ep"
    ranks of the mesh are shared only with ranks of the same place there. All ranks call this together.
    """
    together = names.together
    ranks: dict[int, set[int]] = defaultdict(set)
    for device, stage in homes:
        for number in shares[stage]:
            ranks[number].add(device)
    stage_of = {number: stage for stage, share in enumerate(shares) for number in share}

    def ep_rank(device: int) -> int:
        return mesh.ep_rank(mesh.place(device)[1])

    def holders(same: Sequence[str], *, experts: bool = False) -> Held:
        devices = set().union(*(ranks[layer_of(name)] for name in same))
        if experts:
            devices = {device for device in devices if ep_rank(device) == ep_rank(team.rank)}
        stages = tuple(sorted({stage_of[layer_of(name)] for name in same}))
        source = min(ranks[layer_of(same[0])] & devices)
        return Held(tuple(sorted(devices)), source, stages, experts)

    sharded = {id(parameter) for experts in sharded_experts(module) for parameter in experts.parameters()}

    held, parameters = dict[str, Held](), dict[str, nn.Parameter]()
    buffers, places = dict[str, Place](), places_of(module)
    for same in names_of(places).values():
        first = next((together[name] for name in same if name in together), same)[0]
        owner, key = places[same[0]]
        parameter = owner._parameters[key]
        assert parameter is not None
        held[first] = holders(together.get(first, (first,)), experts=id(parameter) in sharded)
        parameters[first], places[first] = parameter, (owner, key)
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                name = f"{prefix}.{key}"
                held[name], buffers[name] = holders([name]), (owner, key)
    sets = {*(holders(same).ranks for same in together.values()), *(tuple(sorted(some)) for some in ranks.values())}
    sets |= {  # of the experts of every rank, since all ranks make all groups
        tuple(device for device in some if ep_rank(device) == place) for some in sets for place in range(mesh.ep)
    }
    return Replicas(
        team,
        held,
        parameters,
        places,
        buffers,
        [one for one in sets if len(one) > 1],
        stages=[stage for stage, share in enumerate(shares) if len(ranks[share[0]]) > 1],
        sparse=lambda parameter: id(parameter) in sparse,
        seen=names.seen,
    )
