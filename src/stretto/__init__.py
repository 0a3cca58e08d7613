"""Stretto: plan, check, simulate, draw and run pipeline-parallel training, and push the trained weights.

The main path, in order:

    plan      schedules (a module), Plan, load_plan, parse_plan; layers (a module), Phase
    program   lower, weight_update, program_of, Call, Program, parse_program
    check     check, Violation
    run       simulate, costs (a module): Costs, load_costs; execute; Pipeline; Memory, load_memory, choose_memory
    models    model (a module), cut; weights (a module): push them
    look      Timeline, load_timeline, fit, draw_text, draw_comparison
    errors    StrettoError, and those derived from it
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto import costs, layers, schedules
from stretto.check import Violation, check
from stretto.choose import choose_memory
from stretto.costs import Costs, load_costs
from stretto.draw import draw_comparison, draw_text
from stretto.execute import execute
from stretto.ir.errors import (
    CostError,
    PeerError,
    PipelineError,
    PlanError,
    ProgramError,
    StrettoError,
    TextError,
    WeightsError,
)
from stretto.ir.extras import require as _require
from stretto.ir.plan import Plan
from stretto.ir.text import load_plan, parse_plan
from stretto.layers import Phase
from stretto.memory import Memory, load_memory
from stretto.program.calls import Call, program_of
from stretto.program.lower import lower
from stretto.program.program import Program
from stretto.program.text import parse_program
from stretto.program.update import weight_update
from stretto.simulate import simulate
from stretto.timeline import Timeline, fit, load_timeline

if TYPE_CHECKING:
    from stretto import model, weights
    from stretto.model.cut import cut
    from stretto.pipeline.pipeline import Pipeline

__version__ = "0.3.0"

__all__ = [
    "Call",
    "CostError",
    "Costs",
    "Memory",
    "PeerError",
    "Phase",
    "Pipeline",
    "PipelineError",
    "Plan",
    "PlanError",
    "Program",
    "ProgramError",
    "StrettoError",
    "TextError",
    "Timeline",
    "Violation",
    "WeightsError",
    "check",
    "choose_memory",
    "costs",
    "cut",
    "draw_comparison",
    "draw_text",
    "execute",
    "fit",
    "layers",
    "load_costs",
    "load_memory",
    "load_plan",
    "load_timeline",
    "lower",
    "model",
    "parse_plan",
    "parse_program",
    "program_of",
    "schedules",
    "simulate",
    "weight_update",
    "weights",
]


_NEED_TORCH = {
    "Pipeline": "stretto.pipeline.pipeline",
    "cut": "stretto.model.cut",
    "model": "stretto.model",
    "weights": "stretto.weights",
}


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch when it is asked for."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    _require("torch", extra="train", what=f"stretto.{name}")
    module = import_module(_NEED_TORCH[name])
    return module if name in ("model", "weights") else getattr(module, name)
