"""Numbers of bytes, as people write and read them."""

import re

from stretto.ir.errors import TextError

_UNITS: dict[str, float] = {"": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
_UNITS |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "PiB": 2.0**50}
_KNOWN = {unit.lower(): size for unit, size in _UNITS.items()}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(text: str) -> float:
    """Read a number of bytes, with a unit or without.

    >>> parse_bytes("80GB"), parse_bytes("512 MiB"), parse_bytes("2e9")
    (80000000000.0, 536870912.0, 2000000000.0)
    """
    match = _SIZE.fullmatch(text)
    if match is None or len(text) > 40 or match[2].lower() not in _KNOWN or match[2].endswith("b"):  # b is a bit
        raise TextError(f"a size is a number of bytes such as 80GB, 512MiB or 2e9 (got {text!r:.40})")
    return float(match[1]) * _KNOWN[match[2].lower()]


def bytes_text(nbytes: float) -> str:
    """Format a number of bytes for people.

    >>> bytes_text(2.1e10), bytes_text(1536), bytes_text(12)
    ('21 GB', '1.54 kB', '12 bytes')
    """
    for unit in ("PB", "TB", "GB", "MB", "kB"):
        if nbytes >= 0.9995 * _UNITS[unit]:  # what is printed as 1000 of the next smaller one
            return f"{nbytes / _UNITS[unit]:.3g} {unit}"
    return f"{nbytes:.3g} bytes"
