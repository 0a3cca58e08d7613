"""How long each part of each pass takes."""

from stretto.costs import Costs, PhaseTimes
from stretto.ir.errors import CostError
from stretto.program.anatomy import Anatomy, Part
from stretto.program.task import Kind

Times = dict[Kind, list[list[float]]]


def part_times(anatomy: Anatomy, costs: Costs, *, woven: bool) -> Times:
    """Return times by kind, stage and part, for forwards, input parts of backwards, recomputation and weight gradients;
    if `woven`, those in a pair.

    Without times for phases, a stage's compute phases share its F, I and W equally, and communication and waits of the
    host take no time. With times for phases, a phase without a backward takes none unless it is listed. A full
    backward's parts are those of its I and W, and a pair's are those of its passes, so B, FB and BW do not apply.
    """
    if costs.phases and costs.R is not None:
        raise CostError("R is a time of whole passes; with times of phases, give each phase its own R")
    if costs.B is not None or costs.FB is not None or costs.BW:
        raise CostError(
            "B, FB and BW are times of whole passes; with layers they follow from the phases, so leave them out"
        )
    stages = len(anatomy.forward)
    names = () if costs.phases else ("F", "I", "W", "R")
    whole = {name: costs.per_stage(name, stages=stages).tolist() for name in names}
    times: Times = {Kind.F: [], Kind.B: [], Kind.RECOMPUTE: [], Kind.WGRAD: []}
    for stage, parts in enumerate(anatomy.forward):
        backward = anatomy.backward[stage]
        shares = sum(part.phase.lane == "compute" for part in parts)
        shared = {name: shares if name == "F" else len(anatomy.weight_steps[stage]) for name in names}
        share = PhaseTimes(*(whole[name][stage] / shared[name] for name in names))
        of = {part: _times(part, costs, share, woven=woven) for part in parts}
        times[Kind.F].append([of[part].F for part in parts])
        times[Kind.B].append([of[part].I for part in backward])
        times[Kind.RECOMPUTE].append([of[part].recompute for part in backward])
        times[Kind.WGRAD].append([of[backward[step]].W for step in anatomy.weight_steps[stage]])
    return times


def _times(part: Part, costs: Costs, share: PhaseTimes, *, woven: bool) -> PhaseTimes:
    if not costs.phases:
        return share if part.phase.lane == "compute" else PhaseTimes()
    own, general = f"{part.kind}.{part.phase.name}", part.phase.name
    alone = costs.phases.get(own, costs.phases.get(general))
    if alone is None and not part.phase.backward:
        alone = PhaseTimes()
    if alone is None:
        raise CostError(
            f"no times for phase {part.phase.name} of {part.kind} layers; known are {', '.join(costs.phases)}"
        )
    # an entry for all layers is not for those that have times of their own
    in_pairs = costs.woven.get(own, None if own in costs.phases else costs.woven.get(general))
    return alone if in_pairs is None or not woven else in_pairs.over(alone)
