"""The registry of schedules: each registers itself, with the facts a user needs to choose one."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import TypeVar

from stretto.ir.errors import PlanError
from stretto.ir.plan import Plan

Make = Callable[..., Plan]
_M = TypeVar("_M", bound=Make)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule with its formulas: p devices, m microbatches, v stages per device, device r."""

    name: str
    make: Make
    published: str
    """Year and month, e.g. "2018-11"; listings are sorted by it."""
    meaning: str
    limits: str
    bubble: str
    memory: str
    """The most stage passes that device r holds, in units of all of the device's stages."""
    stages_per_device: int = 1
    variable: bool = False
    """Whether it takes `stages_per_device` and `overlap`."""
    aliases: tuple[str, ...] = ()
    even: bool = False
    """Whether devices and microbatches must be even."""
    rounds: int = 0
    """The least number of microbatches per device."""


WEIGHT_UPDATE = "weight_update"
"""What the command line calls the weight update, which is no schedule."""

SCHEDULES: dict[str, Schedule] = {}
"""All schedules by name, the oldest first."""


def register(
    *,
    published: str,
    meaning: str,
    limits: str,
    bubble: str,
    memory: str,
    stages_per_device: int = 1,
    variable: bool = False,
    aliases: tuple[str, ...] = (),
    even: bool = False,
    rounds: int = 0,
) -> Callable[[_M], _M]:
    """Register a plan-making function under its own name: in this process, `SCHEDULES` has it from then on.

    A file in `stretto/schedules/` that does so is known to the command line, `doctor`, docs and tests. A plan that a
    script makes reaches the command line by `plan.save("mine.csv")`.

    The function takes `devices` and `microbatches` by keyword, and if `variable`, `stages_per_device` and `overlap`.
    `published` is a year and month, by which listings are sorted. `meaning`, `limits`, `bubble` and `memory` are texts
    for `stretto show`. `even` says that devices and microbatches must be even, `rounds` the least microbatches per
    device.
    """
    texts = {"published": published, "meaning": meaning, "limits": limits, "bubble": bubble, "memory": memory}
    for field, text in texts.items():
        if not isinstance(text, str) or not text:
            raise PlanError(f"{field} is a text about the schedule (got {text!r:.40})")
    if not isinstance(aliases, tuple) or not all(isinstance(alias, str) and _is_name(alias) for alias in aliases):
        raise PlanError(f"aliases are a tuple of names in lower case, without spaces or dashes (got {aliases!r:.40})")
    for field, count, least in (("stages_per_device", stages_per_device, 1), ("rounds", rounds, 0)):
        if type(count) is not int or count < least:
            raise PlanError(f"{field} is a whole number of at least {least} (got {count!r:.40})")

    def registered(make: _M) -> _M:
        name = getattr(make, "__name__", "")
        about = Schedule(
            name, make, published, meaning, limits, bubble, memory, stages_per_device, variable, aliases, even, rounds
        )
        if not callable(make) or not _is_name(name) or not name.isidentifier():
            raise PlanError(f"a schedule has a name in lower case, without spaces or signs (got {name!r:.40})")
        keywords = ("devices", "microbatches", *(("stages_per_device", "overlap") if variable else ()))
        try:
            signature(make).bind(**dict.fromkeys(keywords))
        except TypeError as error:
            raise PlanError(f"{name} is called with the keywords {', '.join(keywords)}: {error}") from None
        if WEIGHT_UPDATE in (name, *aliases):
            raise PlanError(f"{WEIGHT_UPDATE} is what the command line calls the weight update; choose another name")
        known = {word for schedule in SCHEDULES.values() for word in (schedule.name, *schedule.aliases)}
        if taken := known & {name, *aliases}:
            raise PlanError(f"there already is a schedule {min(taken)}")
        every = sorted([*SCHEDULES.values(), about], key=lambda schedule: (schedule.published, schedule.name))
        SCHEDULES.clear()
        SCHEDULES.update((schedule.name, schedule) for schedule in every)
        return make

    return registered


def _is_name(text: str) -> bool:
    """Return whether a name can be found: lookups ignore case, and dashes become underscores."""
    return text == text.lower().replace("-", "_").strip() != ""


def schedule_named(name: str) -> Schedule:
    """Look a schedule up by name or alias; case and dashes do not matter."""
    plain = name.lower().replace("-", "_")
    for schedule in SCHEDULES.values():
        if plain in (schedule.name, *schedule.aliases):
            return schedule
    near = get_close_matches(plain, SCHEDULES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise PlanError(f"unknown schedule {name!r:.40}; {hint}known are {', '.join(SCHEDULES)}, or a .csv or .json file")
