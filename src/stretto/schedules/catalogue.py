"""All schedules by name, with what a user wants to know before choosing one."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from stretto.ir.errors import PlanError
from stretto.ir.plan import Plan
from stretto.schedules.dualpipe import dualpipe, dualpipev
from stretto.schedules.gpipe import gpipe
from stretto.schedules.interleaved import interleaved
from stretto.schedules.one_f_one_b import one_f_one_b
from stretto.schedules.vshape import v_half, v_min, zb_v
from stretto.schedules.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule with its formulas: p devices, m microbatches, v stages per device, device r."""

    name: str
    make: Callable[..., Plan]
    meaning: str
    limits: str
    bubble: str
    memory: str
    stages_per_device: int = 1
    variable: bool = False
    """Takes `virtual` and `overlap`."""


_ALL = (
    Schedule("gpipe", gpipe, "all forwards, then all backwards", "any", "(p−1)(F+B)", "m"),
    Schedule(
        "one_f_one_b",
        one_f_one_b,
        "1F1B: each backward as soon as it can run",
        "any",
        "(p−1)(F+B)",
        "min(p−r, m)",
    ),
    Schedule(
        "interleaved",
        interleaved,
        "1F1B over v stages per device; with overlap, Kimi K2's: one more warm-up forward, steady state in pairs",
        "any; bubble for m ≥ p, memory and overlap for p∣m",
        "(p−1)(F+B)/v; overlap: (2(p−r−1)F&B−(p−2r−1)(F+B))/v",
        "(pv+p−1−2r)/v; overlap: ((v+1)p−2r)/v",
        stages_per_device=2,
        variable=True,
    ),
    Schedule(
        "zb_h1",
        zb_h1,
        "1F1B with weight gradients moved into the bubble",
        "any; formulas for m ≥ p, W ≤ min(F,I)",
        "(p−1)(F+I−W)",
        "p−r, and r between I and W",
    ),
    Schedule(
        "zb_h2",
        zb_h2,
        "no bubble within a device's span, for twice the memory",
        "any; formulas for m ≥ 2p−1, W ≤ min(F,I)",
        "(p−1)(F+I−2W) of its span",
        "2p−2r−1, and 2r between I and W",
    ),
    Schedule(
        "zb_v",
        zb_v,
        "stages in a \"V\": no bubble within a device's span at 1F1B's memory",
        "any; formulas for m ≥ 2p−1, F=I=W",
        "0 of its span",
        "p",
        stages_per_device=2,
    ),
    Schedule(
        "v_half",
        v_half,
        'the "V" at about half of 1F1B\'s memory',
        "any; formulas for p ≥ 3, m ≥ p, F=I=W",
        "(3p−7)/2 for even p, (3p−4)/2 for odd",
        "p/2+1 for even p, (p+1)/2 for odd",
        stages_per_device=2,
    ),
    Schedule(
        "v_min",
        v_min,
        'the "V" at about a third of 1F1B\'s memory',
        "any; formulas for p ≥ 3, m ≥ p, F=I=W",
        "(6p−1)/2−3k, k = ⌈(p+2)/3⌉",
        "k = ⌈(p+2)/3⌉",
        stages_per_device=2,
    ),
    Schedule(
        "dualpipe",
        dualpipe,
        "DeepSeek-V3's: two opposite pipelines over the same devices, woven; parameters twice",
        "p even, m even, m ≥ 2p; bubble at F=I=W, F&B=3F",
        "(p/2−1)(F&B+B−3W)",
        "p+1",
    ),
    Schedule(
        "dualpipev",
        dualpipev,
        "DualPipe cut in half: one copy of the model",
        "m ≥ 2p; bubble at F=I=W, F&B=3F",
        "(p−1)(F&B+B−3W)/2",
        "p+½",
        stages_per_device=2,
    ),
)

SCHEDULES = {schedule.name: schedule for schedule in _ALL}


def schedule_named(name: str) -> Schedule:
    """Look a schedule up by name; case, dashes and "1f1b" are forgiven."""
    plain = name.lower().replace("-", "_")
    plain = {"1f1b": "one_f_one_b", "zbv": "zb_v", "zbh1": "zb_h1", "zbh2": "zb_h2"}.get(plain, plain)
    if plain in SCHEDULES:
        return SCHEDULES[plain]
    near = get_close_matches(plain, SCHEDULES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise PlanError(f"unknown schedule {name!r:.40}; {hint}known are {', '.join(SCHEDULES)}")
