"""The arguments of a pipeline, and their validation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.costs import Costs
from stretto.ir.errors import PipelineError, StrettoError
from stretto.ir.plan import Plan
from stretto.moe.exchange import Exchange
from stretto.moe.expert_ranks import ExpertRanks
from stretto.pipeline.gradients import KINDS, Kind
from stretto.program.program import Program

_EXAMPLES = {"recompute": '["*.norm"]', "tied": '[("0.weight", "5.weight")]'}


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
    checkpoint: bool
    recompute: Sequence[str]
    dynamic_shapes: bool
    seed: int
    timeout: float
    exchange: Callable[[ExpertRanks], Exchange] | None


def wrong_option(loss: Any, options: Options) -> StrettoError | None:
    """Return the error in the other arguments of a pipeline, or None."""
    seed, gradients, dynamic_shapes = options.seed, options.gradients, options.dynamic_shapes
    if not callable(loss):
        return PipelineError(f"loss is a function of output and target (got {loss!r:.60})")
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        return PipelineError(f"seed is a whole number of at most 63 bits (got {seed!r:.60})")
    if gradients not in KINDS:
        return PipelineError(f"gradients is one of {', '.join(map(repr, KINDS))} (got {gradients!r:.60})")
    for name, value in (("recompute", options.recompute), ("tied", options.tied)):
        if isinstance(value, str) or not isinstance(value, Sequence):
            return PipelineError(f"{name} is a list, such as {_EXAMPLES[name]} (got {value!r:.40})")
    if not isinstance(dynamic_shapes, bool):
        return PipelineError(f"dynamic_shapes is True or False (got {dynamic_shapes!r:.60})")
    if options.exchange is not None and not callable(options.exchange):
        return PipelineError(
            f"exchange is a function that makes an exchange for experts, such as stretto.moe.AllToAll (got "
            f"{options.exchange!r:.60})"
        )
    if options.checkpoint and options.recompute:
        return PipelineError("checkpoint=True recomputes whole layers; give that or modules to recompute, not both")
    return None
