"""Times formatted for people."""

from stretto.costs import Unit

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def time_scale(length: float, unit: Unit) -> tuple[float, str]:
    """Choose a display unit for times up to `length`: return its size in `unit` and its name, "" for none."""
    if unit is None:
        return 1.0, ""
    return next((scale for scale in _SECONDS if length >= scale[0]), _SECONDS[-1])


def time_text(time: float, unit: Unit) -> str:
    """Format a time for people: seconds with three digits, times without a unit as they are.

    >>> time_text(0.01234, "s"), time_text(26.0, None)
    ('12.3 ms', '26')
    """
    size, name = time_scale(time, unit)
    return f"{time / size:.3g} {name}" if name else f"{time:g}"
