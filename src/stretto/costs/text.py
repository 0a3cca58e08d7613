"""Read and write cost tables: the command line's short form, and TOML files."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from stretto.costs.parts import BYTES, TIMES
from stretto.costs.table import Costs
from stretto.ir.errors import CostError, TextError
from stretto.ir.files import file_path, read_text, write_text
from stretto.ir.units import parse_bytes


def parse_costs(text: str) -> Costs:
    """Read the command line's short form.

    >>> parse_costs("F=1,B=2.5").B
    2.5
    """
    table: dict[str, float | str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        if name in Costs.__struct_fields__ and name not in ("unit", *TIMES, *BYTES):
            example = f", as a list: {name} = [1.2, 0.8]" if name in ("slowdown", "loads") else ""
            raise CostError(f"cost {name} is given in a TOML file (--costs costs.toml){example}")
        if name not in ("unit", *TIMES, *BYTES):
            raise CostError(f"unknown cost {name!r:.40}; known are {', '.join((*TIMES, *BYTES, 'unit'))}")
        if name in table:
            raise CostError(f"cost {name} is given twice")
        try:
            table[name] = value if name in ("unit", *BYTES) else float(value)
        except ValueError:
            raise CostError(f"cost {name} must be a number (got {value!r:.40})") from None
    return costs_from(table)


def parse_costs_toml(text: str) -> Costs:
    """Read a TOML table with the fields of `Costs`."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also covers numbers with thousands of digits
        raise CostError(f"not valid TOML: {error}") from None
    return costs_from(table)


def load_costs(path: str | Path) -> Costs:
    """Read the TOML file that `Costs.save` writes, or one written by hand.

    >>> from tempfile import TemporaryDirectory
    >>> from stretto import Costs, load_costs
    >>> with TemporaryDirectory() as folder:
    ...     Costs(F=1, I=1.1, W=0.9).save(f"{folder}/costs.toml")
    ...     print(load_costs(f"{folder}/costs.toml").I)
    1.1
    """
    try:
        return parse_costs_toml(read_text(path))
    except CostError as error:
        raise CostError(f"{path}: {error}") from None


def costs_from(table: Mapping[str, Any]) -> Costs:
    if table.get("unit") not in (None, "s"):
        raise CostError(f"unit is s if times are seconds, or left out (got {table['unit']!r:.40})")
    sized = {name: _sized(name, value, seconds=table.get("unit") == "s") for name, value in table.items()}
    try:
        return msgspec.convert(sized, Costs)
    except msgspec.ValidationError as error:
        raise CostError(f"bad cost table: {error}") from None


def _sized(name: str, value: Any, *, seconds: bool) -> Any:
    """Read numbers of bytes that have a unit, such as "2GB", and with times in seconds, bandwidths such as "50GB/s"."""
    if isinstance(value, dict):
        return {key: _sized(key, item, seconds=seconds) for key, item in value.items()}
    if name in BYTES and isinstance(value, list):
        return [_sized(name, number, seconds=seconds) for number in value]
    if not isinstance(value, str) or name not in (*BYTES, "bandwidth"):
        return value
    if name == "bandwidth" and not (seconds and value.endswith("/s")):
        raise CostError(f'bandwidth must be a number, or with unit = "s" a speed such as 50GB/s (got {value!r:.40})')
    try:
        return parse_bytes(value.removesuffix("/s") if name == "bandwidth" else value)
    except TextError:
        example = "speed such as 50GB/s" if name == "bandwidth" else "size such as 2GB"
        raise CostError(f"cost {name} must be a number, or a {example} (got {value!r:.40})") from None


def save_costs(costs: Costs, path: str | Path) -> None:
    """Write what differs from the defaults."""
    if file_path(path).suffix.lower() != ".toml":
        raise TextError(f"costs are saved as .toml (got {path})")
    defaults = msgspec.to_builtins(Costs())
    table = {
        name: _without_none(value)
        for name, value in msgspec.to_builtins(costs, enc_hook=float).items()
        if value != defaults[name]
    }
    write_text(path, tomli_w.dumps(table))


def _without_none(value: Any) -> Any:
    """Leave out None values: TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
