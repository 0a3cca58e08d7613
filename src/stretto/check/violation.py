"""One thing that is wrong with a program."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong, by which rule, and at which tasks.

    >>> from stretto import check, parse_plan
    >>> check(parse_plan("0F0,0B0\\n1F0"))[0].rule
    'coverage'
    """

    rule: str
    """coverage, placement, transfers, dependencies, buffers, sums, deadlock or memory."""
    message: str
    at: tuple[int, ...] = ()
    """The tasks it concerns, by index."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"
