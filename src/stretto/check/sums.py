"""Rule: gradients that several devices hold are summed over them once, when the last is ready."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise

from stretto.check.meetings import in_order, meet
from stretto.check.violation import Violation
from stretto.check.waits import Waits
from stretto.program.program import Program
from stretto.program.sums import Sums, reduces, sum_needs, sum_share
from stretto.program.task import EXPERT_SUM

_FEW = 16
_Sum = tuple[int, int, int]
"""A stage, the part of its gradients that is summed, and which of the devices that hold it sum this part together."""


def sums(program: Program, waits: Waits) -> Iterator[Violation]:
    """Check programs that sum anything; PyTorch's CSV may leave sums out."""
    tasks = reduces(program.work).tolist()
    if not tasks:
        return
    expected, devices = Sums(program.placement, program.anatomy), program.device.tolist()
    there: dict[_Sum, dict[int, list[int]]] = defaultdict(dict)  # the tasks of each sum, by device
    for stage, part, device in zip(
        *(column.tolist() for column in (expected.stage, expected.part, expected.device)), strict=True
    ):
        there[stage, part, sum_share(device, part, program.placement)][device] = []
    for task in tasks:
        device, part = devices[task], program.work.part.item(task)
        name = program.work.stage.item(task), part, sum_share(device, part, program.placement)
        homes = there.get(name, {})
        if device in homes:
            homes[device].append(task)
        else:
            lives = f"lives on devices {', '.join(map(str, homes))}" if homes else "lives on one device only"
            message = f"{program.task(task)} is on device {device}, but what it sums {lives}"
            yield Violation("placement", message, (task,))
    for (stage, part, _), homes in there.items():
        for device, ends in homes.items():
            if len(ends) != 1:
                times = f"runs {len(ends)} times" if ends else "never runs"
                which = f"stage {stage}'s experts" if part == EXPERT_SUM else f"stage {stage}"
                tied = f" tied to {', '.join(map(str, program.anatomy.ties[part - 1][1:]))}" if part > 0 else ""
                message = f"the sum of the gradients of {which}{tied} {times} on device {device}"
                yield Violation("coverage", message, tuple(ends))
    yield from meet(program, there, "one on every device that has those weights")
    yield from in_order(program, there, _pairs)
    yield from waits.missing(*sum_needs(program.work, program.anatomy, program.lane, program.device))


def _pairs(devices: list[int]) -> Iterable[tuple[int, int]]:
    """Return the pairs of devices whose orders are compared: all of a few, else neighbours. What neighbours have in
    common with others only, the deadlock rule finds.
    """
    return combinations(devices, 2) if len(devices) <= _FEW else pairwise(devices)
