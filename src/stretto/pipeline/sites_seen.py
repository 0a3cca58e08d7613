"""Which sites of a memory policy run: known only once a forward has."""

import sys
import warnings
from collections.abc import Iterable, Mapping

from torch import nn

from stretto.execute.team import Team
from stretto.ir.errors import PipelineError
from stretto.ir.units import bytes_text
from stretto.memory import Memory
from stretto.pipeline.memory_sites import ModuleSite, Part, PartSites


class SitesSeen:
    """The patterns that decided about a site that ran, and modules that ran where no pattern names them."""

    def __init__(self) -> None:
        self.patterns: set[int] = set()
        self.compressed = False
        """Whether anything was stored in float8."""
        self.left = False
        """Whether anything left the device."""
        self._elsewhere: dict[int, str] = {}

    def note(self, module: nn.Module, site: ModuleSite | None, part: PartSites) -> None:
        """Note that a module runs in a part, where it is a site or not, and a policy can act."""
        if site is not None:
            self.patterns.add(site.pattern)
        else:
            self._elsewhere.setdefault(id(module), part.label)

    def told(self, policy: Memory, sites: Mapping[Part, PartSites]) -> dict[str, str]:
        """Return an empty text for each pattern that decided, and for others where their modules run, if they do."""
        patterns = list(policy.patterns)
        found = {patterns[number]: "" for number in self.patterns if number < len(patterns)}
        for part in sites.values():
            for site in part.modules.values():
                if (where := self._elsewhere.get(id(site.module))) is not None:
                    pattern = patterns[site.pattern]
                    why = (
                        f"memory names {pattern!r:.60}, but {site.name} runs in the phase {where}, not in {part.label}"
                    )
                    found.setdefault(pattern, why)
        return found


class PatternCheck:
    """Finds what a policy says to no effect, in the first step or dry run: patterns that decide about nothing that
    runs, float8 where no tensor can be stored so, and offload where none can leave.
    """

    def __init__(self, policy: Memory, team: Team) -> None:
        self._policy, self._team, self._done = policy, team, not policy.patterns

    def run(self, every_seen: Iterable[tuple[SitesSeen, Mapping[Part, PartSites]] | None]) -> None:
        """Raise PipelineError if what a pattern names runs in other phases only, and warn if it runs nowhere.

        All ranks call this together, each with its stages. Only the first call does anything.
        """
        stages = [each for each in every_seen if each is not None]
        if self._done:
            return
        self._done = True
        told: dict[str, str] = {}
        for seen, sites in stages:
            for pattern, why in seen.told(self._policy, sites).items():
                told[pattern] = why and told.get(pattern, why)
        every = self._team.gather(told, dict[str, str])
        done = any(seen.compressed for seen, _ in stages), any(seen.left for seen, _ in stages)
        compressed, left = zip(*self._team.gather(done, tuple[bool, bool]), strict=True)
        if self._policy.compresses and not any(compressed) and self._team.rank == 0:
            _warn(
                "memory names fp8, but nothing was stored in float8: only bfloat16 and float16 tensors of at least "
                f"min_bytes ({bytes_text(self._policy.min_bytes)}) are, with rows of at least 128 numbers, and no "
                "parameters and inputs of stages"
            )
        if self._policy.offloads and not any(left) and self._team.rank == 0:
            _warn(
                "memory names offload, but nothing leaves the device: only tensors of at least min_bytes "
                f"({bytes_text(self._policy.min_bytes)}) do, if they are not needed again at once, and no parameters, "
                "inputs of the step and received messages, and no more than fraction and max_in_flight allow; "
                "pipe.dry_run(inputs, targets) says what each site saves"
            )
        for pattern in self._policy.sites:
            texts = [of_rank[pattern] for of_rank in every if pattern in of_rank]
            if texts and all(texts):
                raise PipelineError(texts[0])
            if not texts and self._team.rank == 0:
                _warn(
                    f"memory names {pattern!r:.60}, but nothing that it decides about has run: these modules are not "
                    "called, or only for other data, without gradients, within a checkpoint of your own, or as part "
                    "of compiled code"
                )


def _warn(text: str) -> None:
    """Warn of something in the line of the user's that called Stretto."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "stretto":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
