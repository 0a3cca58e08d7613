"""What several ranks hold, found when a pipeline is made: stages on two devices, and parameters that are tied."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from stretto.execute.team import Team
from stretto.pipeline.replicas import Held, Replicas
from stretto.pipeline.ties import Place, layer_of, names_of, places_of


def find_shared(
    module: nn.Module,
    homes: Iterable[tuple[int, int]],
    shares: Sequence[Sequence[int]],
    together: Mapping[str, tuple[str, ...]],
    team: Team,
    *,
    sparse: Collection[int],
) -> Replicas:
    """What of this rank's module other ranks hold too. Parameters that several stages hold are tied.

    `homes` are the devices and stages of the placement, `shares` the layers of each stage, `together` the names that
    are tied, `sparse` the ids of parameters whose gradients may be sparse.
    """
    ranks: dict[int, set[int]] = defaultdict(set)
    for device, stage in homes:
        for number in shares[stage]:
            ranks[number].add(device)
    stage_of = {number: stage for stage, share in enumerate(shares) for number in share}

    def held(names: Sequence[str]) -> Held:
        every = tuple(sorted(set().union(*(ranks[layer_of(name)] for name in names))))
        stages = tuple(sorted({stage_of[layer_of(name)] for name in names}))
        return Held(every, min(ranks[layer_of(names[0])]), stages)

    of, parameters = dict[str, Held](), dict[str, nn.Parameter]()
    buffers, places = dict[str, Place](), places_of(module)
    for every in names_of(places).values():
        first = next((together[name] for name in every if name in together), every)[0]
        where, key = places[every[0]]
        parameter = where._parameters[key]
        assert parameter is not None
        of[first], parameters[first], places[first] = held(together.get(first, (first,))), parameter, (where, key)
    for prefix, where in module.named_modules():
        for key, buffer in where._buffers.items():
            if buffer is not None:
                name = f"{prefix}.{key}"
                of[name], buffers[name] = held([name]), (where, key)
    sets = {*(held(same).ranks for same in together.values()), *(tuple(sorted(some)) for some in ranks.values())}
    return Replicas(
        team,
        of,
        parameters,
        places,
        buffers,
        [one for one in sets if len(one) > 1],
        stages=[stage for stage, share in enumerate(shares) if len(ranks[share[0]]) > 1],
        sparse=lambda parameter: id(parameter) in sparse,
    )
