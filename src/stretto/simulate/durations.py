"""How long each task of a program takes under a cost table."""

import sys

import numpy as np

from stretto.costs import Costs, Link, link_ends
from stretto.ir.errors import CostError
from stretto.program.experts import expert_steps
from stretto.program.graph import leaders
from stretto.program.program import Program
from stretto.program.task import COPIES, EXPERT_SUM, UPDATES, WEIGHTS, Kind
from stretto.program.timing import part_times
from stretto.timeline.memory import Floats

_GIVE_LAYERS = "give its layers: lower(plan, layers=…), --layers"


def durations(program: Program, costs: Costs) -> Floats:
    """Return the time of each task; all ends of a transfer or collective take the same time, the longest of any."""
    stages, devices = program.placement.stages, program.devices
    costs.validate(stages=stages, devices=devices, recompute=program.recomputes)
    work = program.work
    if program.is_update:
        time = np.zeros(len(program))
        for kind in UPDATES:
            time[work.kind == kind] = getattr(costs.bucket, kind.name.lower())
        return time
    slowdown = np.where(program.compute, costs.device_factors(devices=devices)[program.device], 1.0)
    if program.is_own:
        time = np.array([float(costs.call_time(name)) for name in program.anatomy.calls])[work.part]
        time *= slowdown
        return time
    if costs.phases and program.anatomy.is_whole:
        raise CostError(f"the costs have times of phases, but the program has none; {_GIVE_LAYERS}")
    with np.errstate(over="ignore"):  # simulate() rejects a step of infinite length
        time = _whole_times(program, costs) if program.anatomy.is_whole else _part_times(program, costs)
        time *= slowdown
        if costs.loads is not None:
            time *= _loads(program, costs)
        if program.anatomy.experts:
            time = _longest(program, time)
        time += _transfer_times(program, costs)
    if (copies := np.flatnonzero(work.among(COPIES))).size:
        size = costs.leaving_bytes(stages=stages, recompute=program.recomputes)
        with np.errstate(over="ignore"):
            time[copies] = costs.host.latency + size[work.stage[copies]] * _rate(costs.host)
    sums = work.kind == Kind.REDUCE
    reduce = costs.per_stage("reduce", stages=stages)
    time[sums] = np.where(work.part > 0, costs.reduce_tied, reduce[work.stage])[sums]
    if program.anatomy.experts:
        of_experts = np.flatnonzero(sums & (work.part == EXPERT_SUM))
        time[of_experts] = costs.per_stage("reduce_experts", stages=stages)[work.stage[of_experts]]
    return time


def _whole_times(program: Program, costs: Costs) -> Floats:
    """Return the times of whole actions; 0 for other tasks."""
    stages = program.placement.stages
    costs.validate_passes(stages=stages)
    forward, whole, late, woven, recompute = (
        costs.per_stage(name, stages=stages) for name in ("F", "B", "BW", "FB", "R")
    )
    of_input, of_weight = (  # a program without I and W needs no times of them
        costs.per_stage(kind.name, stages=stages) if (program.work.kind == kind).any() else np.zeros(stages)
        for kind in (Kind.I, Kind.W)
    )
    if not np.isfinite(forward + whole).all():
        raise CostError("the step would take longer than a number can say; use a larger unit of time")
    saved = forward + whole - woven  # what weaving a stage's forward with its own backward saves
    table = np.zeros((len(Kind), stages))
    table[[Kind.F, Kind.B, Kind.I, Kind.W, Kind.PAIR, Kind.WGRAD, Kind.RECOMPUTE]] = (
        forward,
        whole - late,
        of_input,
        of_weight,
        forward - saved / 2,
        late,
        recompute,
    )
    work = program.work
    time: Floats = table[work.kind, work.stage]
    pairs = np.flatnonzero(work.kind == Kind.PAIR)
    time[pairs] = np.maximum(0.0, time[pairs] + (whole - late - saved / 2)[work.stage_b[pairs]])
    return time


def _part_times(program: Program, costs: Costs) -> Floats:
    anatomy, work = program.anatomy, program.work
    alone, woven = (part_times(anatomy, costs, woven=woven) for woven in (False, True))
    time = np.zeros(len(program))
    for kinds, of, rows in (
        ((Kind.F,), Kind.F, anatomy.forward_rows),
        ((Kind.B, Kind.I), Kind.B, anatomy.backward_rows),
        ((Kind.RECOMPUTE,), Kind.RECOMPUTE, anatomy.backward_rows),
        (WEIGHTS, Kind.WGRAD, anatomy.weight_rows),
    ):
        task = np.flatnonzero(work.among(kinds))
        row = rows[work.stage[task]] + work.part[task]
        time[task] = np.where(work.woven[task], np.concatenate(woven[of])[row], np.concatenate(alone[of])[row])
    return time


def _loads(program: Program, costs: Costs) -> Floats:
    """Return the factor on each task's time that comes from how many tokens its rank's experts got."""
    placement, anatomy, work = program.placement, program.anatomy, program.work
    if placement.mesh is None or placement.mesh.ep == 1:
        raise CostError(
            "loads are of experts on several ranks, but the plan has no such ranks; put it on a mesh with ep"
        )
    if anatomy.is_whole:
        raise CostError(f"loads are of phases from dispatch to combine, but the program has none; {_GIVE_LAYERS}")
    if not anatomy.experts:
        raise CostError("loads are of experts on several ranks, but no stage of the program has experts")
    each = placement.microbatches // placement.replicas
    factors = costs.load_factors(ranks=placement.mesh.ep, microbatches=each)
    ranks = np.array([placement.mesh.ep_rank(replica) for replica in range(placement.replicas)])
    forward, backward, weight = expert_steps(anatomy)
    loads = np.ones(len(program))
    for kinds, inside, rows in (
        ((Kind.F,), forward, anatomy.forward_rows),
        ((Kind.B, Kind.I, Kind.RECOMPUTE), backward, anatomy.backward_rows),
        (WEIGHTS, weight, anatomy.weight_rows),
    ):
        task = np.flatnonzero(work.among(kinds))
        task = task[inside[rows[work.stage[task]] + work.part[task]]]
        replica, microbatch = np.divmod(work.microbatch[task], each)
        loads[task] = factors[ranks[replica], microbatch]
    return loads


def _longest(program: Program, time: Floats) -> Floats:
    """Return the longest time among the ends of each task."""
    leader, longest = leaders(program), time.copy()
    np.maximum.at(longest, leader, time)
    return longest[leader]


def _transfer_times(program: Program, costs: Costs) -> Floats:
    table = {link_ends(key): link for key, link in costs.links.items()}
    latency, rate = np.zeros(len(program.lanes)), np.zeros(len(program.lanes))
    for index, lane in enumerate(program.lanes):
        if lane.peer is not None:
            ends = (lane.device, lane.peer) if lane.name == "send" else (lane.peer, lane.device)
            link = table.get(ends, costs.link)
            latency[index], rate[index] = link.latency, _rate(link)
    size = costs.per_stage("message_bytes", stages=program.placement.stages)
    # A transfer crosses the boundary between two stages; the stage before it sets the size.
    boundary = program.work.stage - program.work.among((Kind.RECV_F, Kind.SEND_B))
    with np.errstate(over="ignore"):  # simulate() rejects a step of infinite length
        return np.where(program.moving, latency[program.lane] + size[boundary] * rate[program.lane], 0.0)


def _rate(link: Link) -> float:
    return min(1 / link.bandwidth, sys.float_info.max)
