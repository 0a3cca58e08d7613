"""Rule: no device holds more bytes than the limit."""

from collections.abc import Iterator

from stretto.check.violation import Violation
from stretto.costs import Costs
from stretto.ir.errors import CostError
from stretto.ir.units import bytes_text
from stretto.program.program import Program
from stretto.timeline import memory_bound


def memory(program: Program, costs: Costs, limit: float) -> Iterator[Violation]:
    if not isinstance(limit, int | float) or not limit >= 0:
        raise CostError(f"a memory limit is a number of bytes of at least 0 (got {limit!r:.40})")
    if program.is_update or program.is_own:
        raise CostError("a memory limit goes with a training step; of other programs no memory is known")
    for device, held in enumerate(memory_bound(program, costs)):
        if held.bytes is None:
            raise CostError("a memory limit needs bytes in the costs, such as activation_bytes")
        if held.bytes.max(initial=0.0) > limit:
            event = int((held.bytes > limit).argmax())
            task = int(held.task[event])
            message = (
                f"device {device} holds {bytes_text(held.bytes[event])} at {program.task(task)} "
                f"and up to {bytes_text(held.bytes.max())} in all, over the limit of {bytes_text(limit)}"
            )
            yield Violation("memory", message, (task,))
