"""All rules, in the order in which a reader wants to hear of them."""

from stretto.check.buffers import buffers
from stretto.check.coverage import coverage
from stretto.check.deadlock import action_graph, deadlock
from stretto.check.dependencies import dependencies
from stretto.check.memory import memory
from stretto.check.placement import judged_transfers, lanes, placement
from stretto.check.sums import sums
from stretto.check.transfers import transfer_order, transfers
from stretto.check.update import update
from stretto.check.violation import Violation
from stretto.check.waits import Waits
from stretto.costs import Costs
from stretto.ir.errors import ProgramError
from stretto.ir.plan import Plan
from stretto.program.lower import lowered
from stretto.program.program import Program


def demand_sound(program: Program, what: str = "program") -> None:
    """Raise if anything is wrong with a program, which is called so."""
    if found := check(program):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ProgramError(f"the {what} is not sound: {found[0]}{more}")


def check(program: Plan | Program, *, costs: Costs | None = None, memory_limit: float | None = None) -> list[Violation]:
    """Everything that is wrong with a program; an empty list proves it sound.

    Sound means: every action runs exactly once and where its stage lives; everything has what it
    needs before it starts; every transfer has both ends, in the same order on both sides; what left for
    host memory is back before it is used; no buffer is filled before what it held was used or has
    left; gradients are summed over all devices that have them, once the last is there, if the program sums any;
    and the program ends even if each device moves one transfer at a time and every transfer
    blocks until its other end is there. A deadlock is looked for once the rest holds. Where actions
    wait for each other in a circle, nothing is said of the order of transfers, which cannot be right then.
    Of a user's own program (`program_of`): everything comes after what it needs, and nothing waits in a circle.

    With `memory_limit`, no device may hold more bytes than that, by the bytes in `costs`.

    >>> from stretto.ir.text import parse_plan
    >>> for violation in check(parse_plan("0F0,0B0\\n1B0,1F0")):
    ...     print(violation)
    dependencies: 1B0 comes before 1F0 on device 1, but needs its result
    """
    program = lowered(program)
    if (wrong := program.malformed) is not None:
        return [Violation("transfers" if "rings" in wrong else "dependencies", wrong)]
    waits, actions = Waits(program), action_graph(program)
    if program.is_update:
        found = [*update(program, waits), *buffers(program, waits)]
    elif program.is_own:
        found = list(waits.missing(program.needing, program.need))
    else:
        judged = judged_transfers(program)
        circular = bool(actions.stuck())
        found = [
            *coverage(program),
            *lanes(program),
            *placement(program, judged),
            *transfers(program, judged),
            *(() if circular else transfer_order(program)),
            *dependencies(program, waits, transfers=not circular),
            *buffers(program, waits),
            *sums(program, waits),
        ]
    if not found:
        found += deadlock(program, actions)
    if memory_limit is not None:
        found += memory(program, costs or Costs(), memory_limit)
    return found
