"""The program that a pipeline runs: a plan's, lowered for its layers, or the one that it was given."""

import hashlib
from collections.abc import Sequence
from typing import Any

from stretto.check import demand_sound
from stretto.costs import Costs
from stretto.ir.errors import PipelineError, PlanError, ProgramError, StrettoError
from stretto.ir.plan import Plan
from stretto.pipeline.layers import even_costs
from stretto.program.forwards import forwards_of
from stretto.program.lower import lower
from stretto.program.phases import Anatomy, Layer
from stretto.program.program import Program
from stretto.program.sums import Sums, reduces
from stretto.program.task import COPIES, Kind


def wrong_program(plan: Any, program: Any, costs: Any, wgrad_microbatches: Any, ranks: int) -> StrettoError | None:
    """What is wrong with what a pipeline is to run by, if anything is."""
    if type(wgrad_microbatches) is not int or wgrad_microbatches < 1:
        return PipelineError(f"wgrad_microbatches is a whole number of at least 1 (got {wgrad_microbatches!r:.60})")
    if (plan is None) == (program is None):
        several = ", and not both" if plan is not None else ""
        return PlanError(f"give a pipeline a plan, or the program that it is to run{several}")
    if program is None and not isinstance(plan, Plan):
        return PlanError(f"plan is a Plan, such as stretto.zb_v(devices=4, microbatches=8) (got {plan!r:.60})")
    if plan is None and not isinstance(program, Program):
        return ProgramError(f"program is a Program, such as stretto.lower(plan) makes (got {program!r:.60})")
    if program is not None:
        if program.is_update or program.is_own:
            return ProgramError("this program trains nothing; stretto.lower(plan) makes one that does")
        if program.work.among((Kind.RECOMPUTE, *COPIES)).any():
            return ProgramError(
                "a pipeline does not run programs that recompute or offload; lower without, and give recompute or "
                "checkpoint to the pipeline"
            )
        if costs is not None:
            return PipelineError("costs are what a plan is woven by; a program is woven already")
        if wgrad_microbatches != 1:
            return PipelineError("wgrad_microbatches goes with a plan; a program has it from lower()")
    given = plan if program is None else program
    if given.devices != ranks:
        what = "plan" if program is None else "program"
        return PlanError(f"the {what} is for {given.devices} devices, but the mesh has {ranks} ranks")
    return None


def program_for(
    plan: Plan | None,
    program: Program | None,
    phases: Sequence[Sequence[Layer]] | None,
    ties: Sequence[Sequence[int]],
    costs: Costs | None,
    wgrad_microbatches: int,
) -> Program:
    """What runs layers with these phases, if any, in stages that share weights so: a plan's program, or this one."""
    if program is not None:
        _demand_fits(program, phases, ties)
        return program
    assert plan is not None
    costs = costs if costs is not None or phases is None else even_costs(phases)
    program = lower(plan, layers=phases, ties=ties, costs=costs, wgrad_microbatches=wgrad_microbatches)
    demand_sound(program, "plan")
    return program


def _demand_fits(program: Program, phases: Sequence[Sequence[Layer]] | None, ties: Sequence[Sequence[int]]) -> None:
    """Refuse a program that is not for these layers, or not sound."""
    demand_sound(program)
    anatomy = program.anatomy
    if not anatomy.is_whole:
        for stage, layers in enumerate(anatomy.layers):
            wanted = [phase for layer in layers for phase in layer.phases]
            there = [] if phases is None else [phase for layer in phases[stage] for phase in layer.phases]
            if wanted != there:
                raise ProgramError(
                    f"the program runs stage {stage} in the phases {_listed(wanted)}, but its layers offer "
                    f"{_listed(there) or 'none'}"
                )
    here = Anatomy.whole(program.placement.stages, ties=ties).ties
    if here != anatomy.ties:
        raise ProgramError(
            f"the program is for stages that share weights as {list(anatomy.ties)} says, but these layers do as "
            f"{list(here)}; give that to lower as ties"
        )
    sums = Sums(program.placement, anatomy)
    if sums and not len(reduces(program.work)):
        raise ProgramError(
            f"the program does not sum the gradients of stage {sums.stage[0]}, which several devices hold; programs "
            "that lower() makes do"
        )


def evaluation_of(program: Program) -> Program:
    """Its forwards, in the same order."""
    layers = None if program.anatomy.is_whole else program.anatomy.layers
    made = lower(forwards_of(program), layers=layers)
    demand_sound(made)
    return made


def digest_of(program: Program) -> str:
    """What two programs have in common only if they are the same."""
    made = hashlib.blake2b(f"{program} {program.placement} {program.lanes}".encode(), digest_size=16)
    for column in (program.lane, *program.work.columns(), program.need_start, program.need, program.counterpart):
        made.update(column.astype("<i8").tobytes())
    return made.hexdigest()


def _listed(phases: Sequence[Any]) -> str:
    return ", ".join(f"{phase.name} ({phase.lane})" for phase in phases[:6]) + ", …" * (len(phases) > 6)
