"""The arguments of a pipeline, and their validation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.costs import Costs
from stretto.ir.errors import PipelineError, PlanError, StrettoError
from stretto.ir.plan import Plan
from stretto.memory import Memory, memory_of
from stretto.moe.exchange import Exchange
from stretto.moe.expert_ranks import ExpertRanks
from stretto.pipeline.gradients import KINDS, Kind
from stretto.program.program import Program


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `Pipeline`, except its layers, loss and mesh."""

    plan: Plan | None
    program: Program | None
    layer_count: int | None
    costs: Costs | None
    balance: Sequence[int] | None
    tied: Sequence[Sequence[str]]
    gradients: Kind
    wgrad_microbatches: int
    memory: Memory
    dynamic_shapes: bool
    seed: int
    timeout: float
    exchange: Callable[[ExpertRanks], Exchange] | None
    wrong_memory: StrettoError | None = None


def memory_from(memory: Any, checkpoint: Any, recompute: Any) -> tuple[Memory, StrettoError | None]:
    """Return the policy of a pipeline's arguments `memory`, `checkpoint` and `recompute`, and the error in them."""
    try:
        policy = memory_of(memory)
        if isinstance(recompute, str) or not isinstance(recompute, Sequence):
            raise PipelineError(f'recompute is a list, such as ["*.norm"] (got {recompute!r:.40})')
        if not isinstance(checkpoint, bool):
            raise PipelineError(f"checkpoint is True or False (got {checkpoint!r:.40})")
        if checkpoint and recompute:
            raise PipelineError("checkpoint=True recomputes whole layers; give that or modules to recompute, not both")
        if (checkpoint or recompute) and memory not in (None, "none"):
            name = "checkpoint" if checkpoint else "recompute"
            raise PipelineError(f"{name} is a short form of memory, so give one of the two")
        patterns = ["*"] if checkpoint else list(recompute)
        return (Memory(sites=dict.fromkeys(patterns, "recompute")) if patterns else policy), None
    except StrettoError as error:
        return Memory(), error


def wrong_option(loss: Any, options: Options) -> StrettoError | None:
    """Return the error in the other arguments of a pipeline, or None; its plan or program must be right."""
    seed, gradients, dynamic_shapes = options.seed, options.gradients, options.dynamic_shapes
    if not callable(loss):
        return PipelineError(f"loss is a function of output and target (got {loss!r:.60})")
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        return PipelineError(f"seed is a whole number of at most 63 bits (got {seed!r:.60})")
    if gradients not in KINDS:
        return PipelineError(f"gradients is one of {', '.join(map(repr, KINDS))} (got {gradients!r:.60})")
    if isinstance(options.tied, str) or not isinstance(options.tied, Sequence):
        return PipelineError(f'tied is a list, such as [("0.weight", "5.weight")] (got {options.tied!r:.40})')
    if not isinstance(dynamic_shapes, bool):
        return PipelineError(f"dynamic_shapes is True or False (got {dynamic_shapes!r:.60})")
    if options.exchange is not None and not callable(options.exchange):
        return PipelineError(
            f"exchange is a function that makes an exchange for experts, such as stretto.moe.AllToAll (got "
            f"{options.exchange!r:.60})"
        )
    stages = (options.plan if options.program is None else options.program).placement.stages  # type: ignore[union-attr]
    fraction = options.memory.fraction
    if isinstance(fraction, tuple) and len(fraction) != stages:
        return PlanError(f"memory.fraction has {len(fraction)} entries, but there are {stages} stages")
    return options.wrong_memory
