"""Times in words."""

from stretto.costs import Unit

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def time_scale(length: float, unit: Unit) -> tuple[float, str]:
    """In what to give times of up to this length: how many of their unit that is, and its name, "" for none."""
    if unit is None:
        return 1.0, ""
    return next((scale for scale in _SECONDS if length >= scale[0]), _SECONDS[-1])


def time_text(time: float, unit: Unit) -> str:
    """A time for people: seconds with three digits, times without a unit as they are.

    >>> time_text(0.01234, "s"), time_text(26.0, None)
    ('12.3 ms', '26')
    """
    size, name = time_scale(time, unit)
    return f"{time / size:.3g} {name}" if name else f"{time:g}"
