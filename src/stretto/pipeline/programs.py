"""The program that a pipeline runs: its plan lowered for its layers, or the program passed to it."""

import hashlib
from collections.abc import Sequence
from typing import Any

from stretto.check import validate_sound
from stretto.costs import Costs
from stretto.ir.errors import PipelineError, PlanError, ProgramError, StrettoError
from stretto.ir.mesh import MeshShape
from stretto.ir.plan import Plan
from stretto.layers import Layer
from stretto.memory import Memory
from stretto.pipeline.layers import even_costs
from stretto.program.anatomy import Anatomy
from stretto.program.forwards import first_forwards, forwards_of
from stretto.program.lower import lower
from stretto.program.program import Program
from stretto.program.sums import Sums, reduces
from stretto.program.task import COPIES


def wrong_program(
    plan: Any, program: Any, costs: Any, wgrad_microbatches: Any, mesh: MeshShape, *, memory: Memory
) -> StrettoError | None:
    """Return the error in a pipeline's plan or program arguments, or None."""
    if type(wgrad_microbatches) is not int or wgrad_microbatches < 1:
        return PipelineError(f"wgrad_microbatches is a whole number of at least 1 (got {wgrad_microbatches!r:.60})")
    if (plan is None) == (program is None):
        several = ", and not both" if plan is not None else ""
        return PlanError(f"give a pipeline a plan, or the program that it is to run{several}")
    if program is None and not isinstance(plan, Plan):
        return PlanError(
            f"plan is a Plan, such as stretto.schedules.zb_v(devices=4, microbatches=8) (got {plan!r:.60})"
        )
    if plan is None and not isinstance(program, Program):
        return ProgramError(f"program is a Program, such as stretto.lower(plan) makes (got {program!r:.60})")
    if program is not None:
        if program.is_update or program.is_own:
            return ProgramError("this program trains nothing; stretto.lower(plan) makes one that does")
        if program.recomputes:
            return ProgramError(
                "a pipeline recomputes within its backwards, not in tasks of their own; lower without recompute, and "
                "say in memory what to recompute"
            )
        if memory.is_auto:
            return PipelineError(
                "costs choose what to offload before a plan is lowered; give a plan, or the memory that "
                "stretto.choose_memory returns and the program that is lowered for it"
            )
        if memory.offloads != bool(program.work.among(COPIES).any()):
            return ProgramError(
                "memory offloads, but the program copies nothing to host memory; lower with offload=1"
                if memory.offloads
                else "the program offloads, but memory does not say what; name it there, or lower without offload"
            )
        if costs is not None:
            return PipelineError("costs are what a plan is woven by; a program is woven already")
        if wgrad_microbatches != 1:
            return PipelineError("wgrad_microbatches goes with a plan; a program has it from lower()")
    schedule, what = (plan, "plan") if program is None else (program, "program")
    given = schedule.placement.mesh
    if given is not None and given != mesh:
        return PlanError(f"the {what} is for a mesh of {given}, but the mesh is {mesh}")
    devices = mesh.pp if given is None and program is None else mesh.devices
    if schedule.devices != devices:
        ranks = f"{mesh.devices} ranks" if mesh.replicas == 1 else f"pp={mesh.pp} ({mesh})"
        return PlanError(f"the {what} is for {schedule.devices} devices, but the mesh has {ranks}")
    if program is not None and given is None and mesh.replicas > 1:
        return PlanError(f"the program is for one pipeline, but the mesh is {mesh}; lower plan.on_mesh(...)")
    return None


def on_mesh(plan: Plan | None, mesh: MeshShape) -> Plan | None:
    """Return the plan of the whole mesh, if it has several pipelines."""
    return plan if plan is None or plan.placement.mesh is not None or mesh.replicas == 1 else plan.on_mesh(mesh)


def program_for(
    plan: Plan | None,
    program: Program | None,
    phases: Sequence[Sequence[Layer]] | None,
    ties: Sequence[Sequence[int]],
    experts: Sequence[int],
    costs: Costs | None,
    wgrad_microbatches: int,
    offload: int,
) -> Program:
    """Lower the plan for layers with these phases and ties, or validate the given program against them.

    `experts` are the stages with experts of which each rank holds some. `offload` is as in `lower`.
    """
    if program is not None:
        _validate_fits(program, phases, ties, experts)
        return program
    assert plan is not None
    costs = costs if costs is not None or phases is None else even_costs(phases)
    program = lower(
        plan,
        layers=phases,
        ties=ties,
        experts=experts,
        costs=costs,
        wgrad_microbatches=wgrad_microbatches,
        offload=offload,
    )
    validate_sound(program, "plan")
    return program


def _validate_fits(
    program: Program,
    phases: Sequence[Sequence[Layer]] | None,
    ties: Sequence[Sequence[int]],
    experts: Sequence[int],
) -> None:
    """Raise ProgramError if a program does not fit these layers, or is not sound."""
    validate_sound(program)
    anatomy = program.anatomy
    if not anatomy.is_whole:
        for stage, layers in enumerate(anatomy.layers):
            expected = [phase for layer in layers for phase in layer.phases]
            offered = [] if phases is None else [phase for layer in phases[stage] for phase in layer.phases]
            if expected != offered:
                raise ProgramError(
                    f"the program runs stage {stage} in the phases {_listed(expected)}, but its layers offer "
                    f"{_listed(offered) or 'none'}"
                )
    layer_ties = Anatomy.whole(program.placement.stages, ties=ties).ties
    if layer_ties != anatomy.ties:
        raise ProgramError(
            f"the program is for stages that share weights as {list(anatomy.ties)} says, but these layers do as "
            f"{list(layer_ties)}; give that to lower as ties"
        )
    if tuple(experts) != program.anatomy.experts:
        raise ProgramError(
            f"the program is for experts in the stages {list(program.anatomy.experts)}, but these layers have them in "
            f"{list(experts)}; give that to lower as experts"
        )
    sums = Sums(program.placement, anatomy)
    if sums and not len(reduces(program.work)):
        raise ProgramError(
            f"the program does not sum the gradients of stage {sums.stage[0]}, which several devices hold; programs "
            "that lower() makes do"
        )


def evaluation_of(program: Program, count: int) -> Program:
    """Return a program of only the forwards of each replica's first `count` microbatches, in the same order."""
    layers = None if program.anatomy.is_whole else program.anatomy.layers
    plan = forwards_of(program)
    all_ = plan.microbatches == count * plan.placement.replicas
    evaluation = lower(plan if all_ else first_forwards(plan, count), layers=layers, experts=program.anatomy.experts)
    validate_sound(evaluation)
    return evaluation


def digest_of(program: Program) -> str:
    """Return a checksum of everything in a program."""
    checksum = hashlib.blake2b(f"{program} {program.placement} {program.lanes}".encode(), digest_size=16)
    for column in (program.lane, *program.work.columns(), program.need_start, program.need, program.counterpart):
        checksum.update(column.astype("<i8").tobytes())
    return checksum.hexdigest()


def _listed(phases: Sequence[Any]) -> str:
    return ", ".join(f"{phase.name} ({phase.lane})" for phase in phases[:6]) + ", …" * (len(phases) > 6)
