"""Memory policies: what becomes of the tensors that forwards save for backwards, site by site.

>>> from stretto import Memory
>>> policy = Memory(sites={"*.norm": "recompute", "*": "offload"})
>>> policy.action("3.norm"), policy.action("3.linear")
('recompute', 'offload')
"""

import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import msgspec
import tomli_w

from stretto.ir.errors import PlanError, TextError
from stretto.ir.files import file_path, read_text, write_text
from stretto.ir.units import parse_bytes

Action: TypeAlias = Literal[
    "keep",
    "recompute",
    "fp8",
    "offload",
    "fp8+offload",
    "recompute+fp8",
    "recompute+offload",
    "recompute+fp8+offload",
]
ACTIONS: tuple[Action, ...] = get_args(Action)
Preset: TypeAlias = Literal["none", "k2"]
PRESETS: dict[Preset, dict[str, Action]] = {
    "none": {},
    "k2": {
        "*norm": "recompute",
        "*.swiglu": "recompute+fp8",
        "*.q_b_proj": "recompute",
        "*.kv_b_proj": "recompute",
        "*.heads": "recompute",
        "*.experts": "fp8",
        "*.shared_experts": "fp8",
        "*": "offload",
    },
}
"""Policies by name. In `k2`, Kimi K2's, norms, SwiGLU and the up-projections of latent attention are recomputed, the
inputs of SwiGLU and of the up-projections of experts are stored in float8, and the rest is offloaded."""
_SIZES = ("min_bytes", "max_in_flight", "host_bytes")
_MARGIN, _UNIT = 1.125, 1 << 21
_EXAMPLE = 'such as {"*.norm": "recompute", "attn": "offload"}'


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a `Pipeline` does with the tensors that forwards save for backwards.

    A site is a phase or a module. Its tensors stay on the device ("keep"), are dropped and computed again in the
    backward ("recompute"), are copied to host memory and back ("offload"), or are stored in float8, which rounds them
    ("fp8"; only those of 16 bits are). "fp8+offload" does both. After "recompute+" it says how to store the inputs from
    which the site is computed again.
    """

    sites: dict[str, Action] = {}
    """What becomes of the tensors of each site, by patterns of names: the first pattern that matches decides. Sites
    that none matches do as the module or phase around them, and in the end keep their tensors."""
    preset: Preset = "none"
    """Patterns that come after those of `sites`: "k2" has Kimi K2's. Those that match nothing in a model do nothing."""
    fraction: float | tuple[float, ...] | Literal["auto"] = 1.0
    """How much of what may be offloaded is, in bytes: what the backward needs last goes first. One number, or a list
    with one for each stage. With "auto", a pipeline chooses by its costs, as `choose_memory` does."""
    min_bytes: int = 1 << 20
    """Tensors that are smaller stay on the device as they are: a copy of them takes longer than it is worth."""
    max_in_flight: int | None = None
    """The most bytes of a device that may be on their way to host memory at a time; the rest stays on the device."""
    keep_layers: int = 0
    """This many of each stage's last layers offload nothing, since the backward needs them first."""
    host_bytes: int | None = None
    """The most host memory that a rank may use. A pipeline that needs more says how much."""
    copy_actions: int = 1
    """How many of the device's actions a copy may take, as in `lower(offload=)`; 1 is Kimi K2's rule. What is needed
    again before it could have left and come back stays on the device."""

    def __post_init__(self) -> None:
        if isinstance(self.fraction, list):
            msgspec.structs.force_setattr(self, "fraction", tuple(self.fraction))
        wrong = _wrong(self)
        if wrong is not None:
            raise PlanError(wrong)
        msgspec.structs.force_setattr(self, "sites", dict(self.sites))  # what is checked is not to change

    @property
    def offloads(self) -> bool:
        """Whether any site may offload."""
        fractions = self.fraction if isinstance(self.fraction, tuple) else (self.fraction,)
        return self.names_offload and any(fractions)

    @property
    def names_offload(self) -> bool:
        """Whether a pattern says "offload", even if `fraction` leaves nothing of that."""
        return any(action.endswith("offload") for action in self.patterns.values())

    @property
    def compresses(self) -> bool:
        """Whether any site may store tensors in float8."""
        return any("fp8" in action for action in self.patterns.values())

    @property
    def patterns(self) -> dict[str, Action]:
        """All patterns in order: those of `sites`, and then those of the preset."""
        return {**self.sites, **{name: act for name, act in PRESETS[self.preset].items() if name not in self.sites}}

    @property
    def is_auto(self) -> bool:
        """Whether costs are to choose `fraction`."""
        return self.fraction == "auto"

    def fraction_of(self, stage: int) -> float:
        """Return how much a stage offloads of what it may."""
        assert self.fraction != "auto", "costs have not chosen yet"
        return self.fraction[stage] if isinstance(self.fraction, tuple) else self.fraction

    def action(self, *names: str) -> Action | None:
        """Return what becomes of the tensors of a site with these names; None if no pattern matches."""
        return next((action for pattern, action in self.patterns.items() if self.matches(pattern, *names)), None)

    def matches(self, pattern: str, *names: str) -> bool:
        """Return whether a pattern matches one of a site's names."""
        return any(fnmatchcase(name, pattern) for name in names)

    def save(self, path: str | Path) -> None:
        """Write a TOML file, for `load_memory`."""
        if file_path(path).suffix.lower() != ".toml":
            raise TextError(f"a memory policy is saved as .toml (got {path})")
        defaults = msgspec.to_builtins(Memory())
        table = {name: value for name, value in msgspec.to_builtins(self).items() if value != defaults[name]}
        write_text(path, tomli_w.dumps(table))


def load_memory(path: str | Path) -> Memory:
    """Read the TOML file that `Memory.save` writes, or one written by hand.

    >>> from tempfile import TemporaryDirectory
    >>> from stretto import Memory, load_memory
    >>> with TemporaryDirectory() as folder:
    ...     Memory(sites={"attn": "offload"}, keep_layers=1).save(f"{folder}/memory.toml")
    ...     print(load_memory(f"{folder}/memory.toml").sites)
    {'attn': 'offload'}
    """
    text = read_text(path)
    try:
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also covers numbers with thousands of digits
            raise PlanError(
                f'not valid TOML: {error}; patterns and texts are quoted: "*norm" = "recompute", host_bytes = "64GiB"'
            ) from None
        return _from_table(table)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def memory_of(value: Any) -> Memory:
    """Return a policy: a `Memory` as it is, a mapping as its sites, the name of a preset as that preset, and "auto" as
    one that offloads as much as costs say.
    """
    if isinstance(value, Memory):
        return value
    if isinstance(value, Mapping):
        return Memory(sites=dict(value))
    if value is None:
        return Memory()
    if isinstance(value, str) and value in PRESETS:
        return Memory(preset=value)
    if value == "auto":
        return Memory(sites={"*": "offload"}, fraction="auto")
    raise PlanError(
        f"memory is a stretto.Memory, a dict {_EXAMPLE}, or one of {_names((*PRESETS, 'auto'))}; load_memory(path) "
        f"reads a file (got {value!r:.60})"
    )


def host_buffer_bytes(needed: float) -> int:
    """Return the size of a host buffer for passes that take so much: an eighth more, since microbatches differ, in
    units of 2 MiB.
    """
    return -(-int(needed * _MARGIN) // _UNIT) * _UNIT


def recomputes(action: Action) -> bool:
    """Return whether a site with this action is computed again in the backward."""
    return action.startswith("recompute")


def stored_as(action: Action) -> Action:
    """Return how a site's tensors are stored, or the inputs from which it is recomputed."""
    return cast("Action", action.removeprefix("recompute").removeprefix("+") or "keep")


def without_offload(action: Action) -> Action:
    """Return the same action, where nothing leaves the device."""
    return cast("Action", action.removesuffix("offload").removesuffix("+") or "keep")


def _names(values: Iterable[str]) -> str:
    return ", ".join(f'"{value}"' for value in values)


def _from_table(table: Mapping[str, Any]) -> Memory:
    sized = dict(table)
    for name in _SIZES:
        if isinstance(text := sized.get(name), str):
            try:
                size = parse_bytes(text)
            except TextError:
                raise PlanError(f"{name} is a number of bytes, or a size such as 2GB (got {text!r:.40})") from None
            if not size.is_integer():
                raise PlanError(f"{name} is a whole number of bytes (got {text!r:.40})")
            sized[name] = int(size)
    unknown = [name for name in sized if name not in Memory.__struct_fields__]
    if unknown:
        known = ", ".join(Memory.__struct_fields__)
        raise PlanError(f"{unknown[0]!r:.40} is nothing that a memory policy has; there are {known}")
    return Memory(**sized)


def _dotted(name: str, table: Any) -> str:
    """Return the first name in nested tables, as TOML reads a name with dots that is not quoted."""
    while isinstance(table, dict) and table:
        inner, table = next(iter(table.items()))
        name = f"{name}.{inner}"
    return f"{name:.60}"


def _wrong(policy: Memory) -> str | None:
    """Return the error in a policy, or None."""
    if not isinstance(policy.sites, dict):
        return f"sites is a table of patterns, {_EXAMPLE} (got {policy.sites!r:.60})"
    for pattern, action in policy.sites.items():
        if not isinstance(pattern, str) or not pattern:
            return f"a site is named by a pattern, such as '*.norm' (got {pattern!r:.40})"
        if action not in ACTIONS and pattern in Memory.__struct_fields__:
            return f"{pattern} is a limit and no site: it goes beside sites, and in a file above [sites]"
        if isinstance(action, dict):
            return f'names with dots are quoted in a file: "{_dotted(pattern, action)}" (got a table {pattern!r:.40})'
        if action not in ACTIONS:
            return f"what becomes of {pattern!r:.40} is one of {', '.join(ACTIONS)} (got {action!r:.40})"
    preset: Any = policy.preset
    if not isinstance(preset, str) or preset not in PRESETS:
        auto = '; "auto" is a fraction: Memory(..., fraction="auto")' if preset == "auto" else ""
        return f"preset is one of {_names(PRESETS)}{auto} (got {preset!r:.40})"
    fractions: Any = policy.fraction if isinstance(policy.fraction, tuple) else (policy.fraction,)
    if not fractions:
        return "fraction is an empty list; give one number, or one for each stage"
    for fraction in () if policy.is_auto else fractions:
        if type(fraction) not in (int, float) or not 0 <= fraction <= 1:
            return f'fraction is a number from 0 to 1, a list of them for all stages, or "auto" (got {fraction!r:.40})'
    for name in _SIZES:
        value = getattr(policy, name)
        if value is not None and (type(value) is not int or value < 0):
            units = ", such as 64 << 30 for 64 GiB; only files take units" if isinstance(value, str) else ""
            return f"{name} is a whole number of bytes{units} (got {value!r:.40})"
    if policy.min_bytes is None:
        return "min_bytes is a whole number of bytes (got None)"
    if type(policy.keep_layers) is not int or policy.keep_layers < 0:
        return f"keep_layers is a whole number of layers (got {policy.keep_layers!r:.40})"
    if type(policy.copy_actions) is not int or policy.copy_actions < 1:
        return f"copy_actions is a number of actions of at least 1 (got {policy.copy_actions!r:.40})"
    return None
