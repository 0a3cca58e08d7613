"""Sites: the phases and modules of a stage, and what a memory policy says about each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import NamedTuple

from torch import nn

from stretto.memory import Action, Memory, recomputes, without_offload
from stretto.pipeline.named_layer import NamedLayer
from stretto.pipeline.names import modules_of
from stretto.pipeline.phases import anatomy_of, bypassed, is_phased

Decision = tuple[int, Action]
"""The number of the pattern that decides about a site, and what it says."""
Part = tuple[int, int]
"""A layer's number, and the number of its phase; 0 if it runs whole."""


@dataclass(frozen=True, slots=True)
class PartSites:
    """What becomes of the tensors that a layer, or one of its phases, saves."""

    label: str
    """The phase's name, for reports."""
    action: Action
    """For what is saved outside of `modules`. If it recomputes, the whole part is computed again."""
    modules: dict[int, "ModuleSite"]
    """By the module's id, the modules about which another pattern decides than about the part."""
    lane: str = "compute"
    pattern: int = -1
    """The number of the pattern that decides about it."""

    def staying(self) -> "PartSites":
        """Return the same sites, where nothing is offloaded."""
        modules = {key: site._replace(action=without_offload(site.action)) for key, site in self.modules.items()}
        return PartSites(self.label, without_offload(self.action), modules, self.lane, self.pattern)


class ModuleSite(NamedTuple):
    """A module about which another pattern decides than about its phase."""

    name: str
    """As users see it."""
    label: str
    """For reports, the name within its phase of the module that the pattern matches: this one, or one around it."""
    module: nn.Module
    action: Action
    pattern: int


class Decisions:
    """Asks a memory policy about sites, and remembers which of its patterns decided."""

    def __init__(self, policy: Memory) -> None:
        self._policy, self._patterns = policy, policy.patterns
        self.reasons: dict[str, str] = {}
        """For each pattern that matched a site, why it decided nothing; empty if it decided."""
        self._names: dict[str, None] = {}

    def about(self, names: Sequence[str], around: Decision | None = None, *, repeats: bool = True) -> Decision:
        """Return what the policy says about a site, given what it says about what is around it: the first pattern that
        matches either decides. Without `repeats` a site is kept instead of recomputed.
        """
        self._names |= dict.fromkeys(names)
        patterns = list(self._patterns)
        number, action = around or (len(patterns), "keep")
        matching = [at for at, pattern in enumerate(patterns) if self._policy.matches(pattern, *names)]
        if matching and matching[0] < number:
            number = matching.pop(0)
            action = self._patterns[patterns[number]]
            if recomputes(action) and not repeats:
                why = f"{names[0]} is communication, which is not recomputed; keep or offload it"
                self.reasons.setdefault(patterns[number], why)
                action = "keep"
            else:
                self.reasons[patterns[number]] = ""
        for other in (patterns[at] for at in matching if at != number):
            why = f"{patterns[number]!r:.60} decides about all that {other!r:.60} matches; put the narrower one first"
            self.reasons.setdefault(other, why)
        return number, action

    def near(self, pattern: str) -> list[str]:
        """Return what may be meant by a pattern that matches no site."""
        ending = [f"*{pattern}"] if any(self._policy.matches(f"*{pattern}", name) for name in self._names) else []
        last = {name.rpartition(".")[2] for name in self._names}
        word = pattern.strip("*").rpartition(".")[2]
        wild = [f"*{name}" for name in get_close_matches(word, last, 2)] if pattern.startswith("*") else []
        return ending + wild + get_close_matches(pattern, self._names, 3)


def find_sites(decisions: Decisions, layers: Mapping[int, nn.Module], *, in_phases: bool) -> dict[Part, PartSites]:
    """Return the sites of all parts of these layers."""
    sites: dict[Part, PartSites] = {}
    for number, layer in layers.items():
        anatomy = anatomy_of(layer)
        split = in_phases and is_phased(layer)
        runs_whole = is_phased(layer) and not split  # then its phases are not known to us
        layer_names = _layer_names(number, layer, split=split)
        for at, phase in enumerate(anatomy.phases[:1] if runs_whole else anatomy.phases):
            name = anatomy.name if runs_whole else phase.name
            names = [name, f"{anatomy.name}.{name}"]
            root = decisions.about([*names, *layer_names], repeats=runs_whole or phase.lane == "compute")
            modules = _modules(decisions, number, layer, names, root, split=split)
            lane = "compute" if runs_whole else phase.lane
            sites[number, at] = PartSites(name, root[1], {id(site.module): site for site in modules}, lane, root[0])
    return sites


def unknown(policy: Memory, reasons: Sequence[Mapping[str, str]]) -> str | None:
    """Return a pattern that matches no site on any rank, given each rank's `Decisions.reasons`, or None."""
    return next((pattern for pattern in policy.sites if not any(pattern in of_rank for of_rank in reasons)), None)


def not_found(pattern: str, near: Iterable[str]) -> str:
    """Return the error text for a pattern that matches no site, with what may be meant by it."""
    if pattern == "loss":
        return "memory names 'loss', but the loss is no site: what it saves goes with the last layer, or its last phase"
    meant = dict.fromkeys(near)
    ordered = sorted(meant, key=lambda name: SequenceMatcher(None, name, pattern).ratio(), reverse=True)[:3]
    hint = f"; near it are {', '.join(map(repr, ordered))}" if ordered else ""
    return (
        f"memory names {pattern!r:.60}, but no phase or module is called that{hint} (phases have names such as 'attn', "
        "and pipe.named_modules() of a pipeline made without memory= has those of modules)"
    )


def unused(policy: Memory, reasons: Iterable[Mapping[str, str]]) -> str | None:
    """Return an error text if another pattern decides about all that a pattern matches, or none can."""
    every = list(reasons)
    for pattern in policy.sites:
        why = [of_rank[pattern] for of_rank in every if pattern in of_rank]
        if why and all(why):
            return why[0]
    return None


def _layer_names(number: int, layer: nn.Module, *, split: bool) -> list[str]:
    """Return the names by which users know a layer as a whole."""
    if not isinstance(layer, NamedLayer):
        return [str(number)]
    return [name for name in bypassed(number, layer) if not name.startswith("layer ")] if split else []


def _modules(
    decisions: Decisions, number: int, layer: nn.Module, phase_names: list[str], root: Decision, *, split: bool
) -> Iterator[ModuleSite]:
    """Return the modules within a layer about which another pattern decides than about the phase.

    Those within a module that a pattern matches are among them: it may be that only they are called.
    """
    silent = {id(layer), *(id(module) for module in bypassed(number, layer).values() if split)}
    around: list[tuple[str, Decision, str]] = []
    for _, seen, module in modules_of(number, layer):
        if id(module) in silent:
            continue
        while around and not seen.startswith(f"{around[-1][0]}."):
            around.pop()
        _, outer, label = around[-1] if around else ("", root, "")
        inner = _within(seen, number, layer)
        short = {inner, inner.rpartition(".")[2]}
        decision = decisions.about([seen, *(f"{phase}.{name}" for phase in phase_names for name in short)], outer)
        label = label if decision == outer else f"{phase_names[0]}.{inner}"
        if decision[0] != root[0]:
            yield ModuleSite(seen, label, module, decision[1], decision[0])
        around.append((seen, decision, label))


def _within(seen: str, number: int, layer: nn.Module) -> str:
    """Return the name of a module within its layer."""
    paths = layer.paths if isinstance(layer, NamedLayer) else (str(number),)
    for path in paths:
        if seen.startswith(f"{path}."):
            return seen.removeprefix(f"{path}.")
    return seen.rpartition(".")[2]
