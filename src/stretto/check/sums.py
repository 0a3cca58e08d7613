"""Rule: gradients that several devices hold are summed over them once, when the last is ready."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise

from stretto.check.violation import Violation
from stretto.check.waits import Waits
from stretto.program.program import Program
from stretto.program.sums import Sums, reduces, sum_needs

_Sum = tuple[int, int]
"""A stage, and 0 or the number of its tie."""


def sums(program: Program, waits: Waits) -> Iterator[Violation]:
    """Check programs that sum anything; PyTorch's CSV may leave sums out."""
    tasks = reduces(program.work).tolist()
    if not tasks:
        return
    expected = Sums(program.placement, program.anatomy)
    there: dict[_Sum, dict[int, list[int]]] = defaultdict(dict)  # the tasks of each sum, by device
    for stage, part, device in zip(
        *(column.tolist() for column in (expected.stage, expected.part, expected.device)), strict=True
    ):
        there[stage, part][device] = []
    for task in tasks:
        device, homes = int(program.device[task]), there.get(_sum(program, task), {})
        if device in homes:
            homes[device].append(task)
        else:
            lives = f"lives on devices {', '.join(map(str, homes))}" if homes else "lives on one device only"
            message = f"{program.task(task)} is on device {device}, but what it sums {lives}"
            yield Violation("placement", message, (task,))
    for (stage, part), homes in there.items():
        for device, ends in homes.items():
            if len(ends) != 1:
                times = f"runs {len(ends)} times" if ends else "never runs"
                tied = f" tied to {', '.join(map(str, program.anatomy.ties[part - 1][1:]))}" if part else ""
                message = f"the sum of the gradients of stage {stage}{tied} {times} on device {device}"
                yield Violation("coverage", message, tuple(ends))
    yield from _meetings(program, there)
    yield from _orders(program, there)
    yield from waits.missing(*sum_needs(program.work, program.anatomy, program.lane, program.device))


def _sum(program: Program, task: int) -> _Sum:
    return program.work.stage.item(task), program.work.part.item(task)


def _meetings(program: Program, there: dict[_Sum, dict[int, list[int]]]) -> Iterator[Violation]:
    """Require the ends of each sum to meet, one on every device that holds its gradients."""
    for homes in there.values():
        if all(len(tasks) == 1 for tasks in homes.values()):
            ends = [tasks[0] for tasks in homes.values()]
            if sorted(ends) != sorted(program.ends(ends[0])):
                message = f"the ends of {program.task(ends[0])} do not meet, one on every device that has those weights"
                yield Violation("transfers", message, tuple(ends))


def _orders(program: Program, there: dict[_Sum, dict[int, list[int]]]) -> Iterator[Violation]:
    """Require devices that have several sums in common to have them in the same order."""
    common: dict[tuple[int, int], list[_Sum]] = defaultdict(list)
    for name, homes in there.items():
        for two in combinations([device for device, tasks in homes.items() if len(tasks) == 1], 2):
            common[two].append(name)
    for (one, other), names in common.items():
        for a, b in pairwise(sorted(names, key=lambda name: there[name][one])):
            if there[a][other] > there[b][other]:
                first, second = there[a][one][0], there[b][one][0]
                message = (
                    f"device {one} has {program.task(first)} before {program.task(second)}, "
                    f"but device {other} has {program.task(second)} first"
                )
                yield Violation("transfers", message, (first, second))
