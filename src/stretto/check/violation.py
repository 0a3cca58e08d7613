"""One thing that is wrong with a program."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    """coverage, placement, transfers, dependencies, buffers, deadlock or memory."""
    message: str
    at: tuple[int, ...] = ()
    """The tasks it concerns, by index."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"
