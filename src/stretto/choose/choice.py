"""What `choose_memory` returns: a memory policy, what it changes, and why it is so."""

import msgspec

from stretto.costs import Unit
from stretto.ir.tables import table_text
from stretto.ir.units import bytes_text
from stretto.memory import Memory
from stretto.timeline.units import time_text


class StageChoice(msgspec.Struct, frozen=True):
    """What a stage offloads, and why it is not more or less."""

    stage: int
    held: float
    """The mean time from the end of a forward to the start of its backward, without offload."""
    may_leave: float
    """The bytes of a pass that may leave."""
    leaves: float
    """The bytes of a pass that leave."""
    fraction: float
    why: str


class DeviceChoice(msgspec.Struct, frozen=True):
    """What a device gains by offloading, and what it takes. All numbers are bytes."""

    device: int
    peak_before: float
    """The simulated peak without offload."""
    peak_after: float
    copied: float
    """What a step copies to host memory; it copies as much back."""
    link: float
    """The most that the link could carry during the step, in one direction alone."""
    host: float
    """The host memory that this takes."""


class MemoryChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A memory policy that costs have chosen. `print(choice)` says what it offloads and why."""

    memory: Memory
    """The policy, for `Pipeline(memory=…)`."""
    step_before: float
    """The simulated time of a step without offload."""
    step_after: float
    unit: Unit
    slower: float
    """How much longer the step was allowed to become."""
    limit: float | None
    """The most bytes that a device was allowed to hold."""
    stages: tuple[StageChoice, ...]
    devices: tuple[DeviceChoice, ...]

    @property
    def offload_bytes(self) -> tuple[float, ...]:
        """The bytes that leave, for `Costs(offload_bytes=…)`."""
        return tuple(stage.leaves for stage in self.stages)

    def __str__(self) -> str:
        stages = [["stage", "held for", "may leave", "leaves", "why"]]
        for stage in self.stages:
            share = f" ({stage.fraction:.1%})" if 0 < stage.fraction < 1 else ""
            held, may_leave = time_text(stage.held, self.unit), _size(stage.may_leave)
            stages.append([str(stage.stage), held, may_leave, _size(stage.leaves) + share, stage.why])
        devices = [["device", "peak before", "peak after", "copied each way", "link could carry", "host memory"]]
        for one in self.devices:
            sizes = (one.peak_before, one.peak_after, one.copied, one.link, one.host)
            devices.append([str(one.device), *map(_size, sizes)])
        parts = [self._headline, _table_with_text(stages), table_text(devices, left=1)]
        if self.memory.offloads:
            parts.append(
                "Whole tensors leave, so a pass may keep one more than its share; a dry run with this policy counts "
                "exactly."
            )
        return "\n\n".join(parts)

    @property
    def _headline(self) -> str:
        within = "" if self.limit is None else f", to hold at most {bytes_text(self.limit)} per device"
        if not self.memory.offloads:
            return f"Offload nothing{within}. A simulated step takes {time_text(self.step_before, self.unit)}."
        return (
            f"Offload what makes the step at most {percent_text(self.slower)} longer{within}. A simulated step takes "
            f"{time_text(self.step_after, self.unit)}, and {time_text(self.step_before, self.unit)} without offload."
        )


def percent_text(share: float) -> str:
    """Return a share as a text such as "1 %"."""
    return f"{round(100 * share, 3):g} %"


def _size(nbytes: float) -> str:
    return bytes_text(nbytes) if nbytes else "0"


def _table_with_text(rows: list[list[str]]) -> str:
    """Return a table whose last column is text."""
    lines = table_text([row[:-1] for row in rows], left=1).splitlines()
    return "\n".join(f"{line}  {row[-1]}" for line, row in zip(lines, rows, strict=True))
