"""Validates the sizes passed to a schedule."""

from stretto.ir.errors import PlanError


def validate_sizes(schedule: str, **sizes: int) -> None:
    """Raise PlanError unless every size is a whole number of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{schedule} needs {name} to be a whole number of at least 1 (got {value!r})")
