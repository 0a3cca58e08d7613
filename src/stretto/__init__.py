"""Stretto: training and weight updates that are planned, checked, simulated, drawn and run as one thing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.check import Violation, check
from stretto.costs import BucketTimes, Costs, Link, PhaseTimes, SharedResource
from stretto.draw import draw_comparison, draw_figure, draw_insets, draw_text, draw_trace, parse_trace
from stretto.execute import execute
from stretto.ir.action import Action, Op, Pair
from stretto.ir.errors import CostError, PeerError, PipelineError, PlanError, ProgramError, StrettoError, TextError
from stretto.ir.extras import demand as _demand
from stretto.ir.placement import Placement
from stretto.ir.plan import Plan
from stretto.ir.text import parse_plan
from stretto.program.calls import Call, program_of
from stretto.program.lower import lower
from stretto.program.phases import DENSE, EMBEDDING, LOSS, MOE, MTP, Layer, Phase, cut_layers
from stretto.program.program import Program
from stretto.program.text import parse_program
from stretto.program.update import weight_update
from stretto.schedules.dualpipe import dualpipe, dualpipev
from stretto.schedules.forward_only import forward_only
from stretto.schedules.gpipe import gpipe
from stretto.schedules.interleaved import interleaved
from stretto.schedules.one_f_one_b import one_f_one_b
from stretto.schedules.vshape import v_half, v_min, zb_v
from stretto.schedules.zero_bubble import zb_h1, zb_h2
from stretto.simulate import simulate
from stretto.timeline import Timeline, fit

if TYPE_CHECKING:
    from stretto import weights
    from stretto.pipeline.grouped_linear import GroupedLinear
    from stretto.pipeline.pipeline import Pipeline

__version__ = "0.1.0"

__all__ = [
    "DENSE",
    "EMBEDDING",
    "LOSS",
    "MOE",
    "MTP",
    "Action",
    "BucketTimes",
    "Call",
    "CostError",
    "Costs",
    "GroupedLinear",
    "Layer",
    "Link",
    "Op",
    "Pair",
    "PeerError",
    "Phase",
    "PhaseTimes",
    "Pipeline",
    "PipelineError",
    "Placement",
    "Plan",
    "PlanError",
    "Program",
    "ProgramError",
    "SharedResource",
    "StrettoError",
    "TextError",
    "Timeline",
    "Violation",
    "check",
    "cut_layers",
    "draw_comparison",
    "draw_figure",
    "draw_insets",
    "draw_text",
    "draw_trace",
    "dualpipe",
    "dualpipev",
    "execute",
    "fit",
    "forward_only",
    "gpipe",
    "interleaved",
    "lower",
    "one_f_one_b",
    "parse_plan",
    "parse_program",
    "parse_trace",
    "program_of",
    "simulate",
    "v_half",
    "v_min",
    "weight_update",
    "weights",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


_NEED_TORCH = {
    "GroupedLinear": "stretto.pipeline.grouped_linear",
    "Pipeline": "stretto.pipeline.pipeline",
    "weights": "stretto.weights",
}


def __getattr__(name: str) -> Any:
    """What needs PyTorch is imported when it is asked for."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    _demand("torch", extra="train", what=f"stretto.{name}")
    module = import_module(_NEED_TORCH[name])
    return module if name == "weights" else getattr(module, name)
