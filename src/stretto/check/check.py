"""All rules, in the order in which `check` reports them."""

from stretto.check.buffers import buffers
from stretto.check.coverage import coverage
from stretto.check.deadlock import action_graph, deadlock
from stretto.check.dependencies import dependencies
from stretto.check.experts import experts
from stretto.check.meetings import alone
from stretto.check.memory import memory
from stretto.check.placement import judged_transfers, lanes, placement
from stretto.check.sums import sums
from stretto.check.transfers import transfer_order, transfers
from stretto.check.update import update
from stretto.check.violation import Violation
from stretto.check.waits import Waits
from stretto.costs import Costs, costs_or_default
from stretto.ir.errors import ProgramError
from stretto.ir.plan import Plan
from stretto.program.lower import lowered
from stretto.program.program import Program


def validate_sound(program: Program, what: str = "program") -> None:
    """Raise ProgramError if anything is wrong with a program; `what` names it in the message."""
    if violations := check(program):
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise ProgramError(f"the {what} is not sound: {violations[0]}{more}")


def check(program: Plan | Program, *, costs: Costs | None = None, memory_limit: float | None = None) -> list[Violation]:
    """Return everything that is wrong with a program; an empty list proves it sound.

    Sound means: every action runs exactly once, where its stage lives, and every phase on its lane; every task has what
    it needs before it starts; every transfer has both ends, which meet, in the same order on both sides; offloaded
    activations are back before they are used; no buffer of a device or its host is refilled before its contents were
    used or copied; if the program sums any gradients, it sums them over all devices that hold them, once the last is
    ready; expert-parallel ranks exchange tokens together and in the same order; and the program ends even if each
    device moves one transfer, sum or exchange at a time and each blocks until all its ends are ready.

    `check` looks for a deadlock only if the other rules hold. If actions wait for each other in a circle, it does not
    report the order of transfers, which cannot be right then. In a user-defined program (`program_of`), sound means
    that every call comes after what it needs and nothing waits in a circle.

    With `memory_limit`, no device may hold more bytes than that, by the sizes in `costs`.

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
        violations = [*update(program, waits), *buffers(program, waits)]
    elif program.is_own:
        violations = list(waits.missing(program.needing, program.need))
    else:
        judged = judged_transfers(program)
        circular = bool(actions.stuck())
        violations = [
            *coverage(program),
            *lanes(program),
            *placement(program, judged),
            *transfers(program, judged),
            *alone(program, program.joint),
            *(() if circular else transfer_order(program)),
            *dependencies(program, waits, transfers=not circular),
            *buffers(program, waits),
            *sums(program, waits),
            *experts(program),
        ]
    if not violations:
        violations += deadlock(program, actions)
    if memory_limit is not None:
        violations += memory(program, costs_or_default(costs), memory_limit)
    return violations
