"""Whether a cost table makes sense: numbers of at least 0, of the right kind, under known names."""

import math
from collections.abc import Iterable
from typing import Any

from stretto.costs.parts import BYTES, LANES, OPTIONAL, TIMES, BucketTimes, Link, PhaseTimes, SharedResource, WovenTimes
from stretto.ir.errors import CostError


def validate(costs: Any) -> None:
    """Raise CostError for the first field of a cost table that is wrong."""
    if costs.unit not in (None, "s"):
        raise CostError(f'unit is "s" if times are seconds, or left out (got {costs.unit!r:.40})')
    for name in (*TIMES, *BYTES):
        value = getattr(costs, name)
        if isinstance(value, tuple):
            if not value:
                raise CostError(f"{name} is an empty list; give a number, or one for each stage")
            for number in value:
                _validate_number(name, number)
        elif value is not None or name not in OPTIONAL:
            _validate_number(name, value)
    _validate_number("reduce_tied", costs.reduce_tied)
    if costs.slowdown is not None:
        if not isinstance(costs.slowdown, tuple):
            raise CostError(f"slowdown is a list with a factor for each device (got {costs.slowdown!r:.40})")
        for number in costs.slowdown:
            _validate_number("slowdown", number)
    if costs.loads is not None:
        if not isinstance(costs.loads, tuple) or not costs.loads or () in costs.loads:
            raise CostError(f"loads is a list with an entry for each expert-parallel rank (got {costs.loads!r:.40})")
        for load in costs.loads:
            for number in load if isinstance(load, tuple) else (load,):
                _validate_number("loads", number)
    for name in ("links", "phases", "woven", "calls", "shared"):
        table = getattr(costs, name)
        if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
            raise CostError(f"{name} is a table with names as keys (got {table!r:.40})")
    _validate_links({"link": costs.link, "host": costs.host})
    _validate_links({f"links.{key}": link for key, link in costs.links.items()})
    for key in costs.links:
        link_ends(key)
    _validate_phases(costs)
    for key, time in costs.calls.items():
        _validate_number(f"calls.{key}", time)
    _validate_fields("bucket", costs.bucket, BucketTimes, BucketTimes.__struct_fields__)
    for key, shared in costs.shared.items():
        _validate_shared(f"shared.{key}", shared, any_lane=bool(costs.calls))


def link_ends(key: str) -> tuple[int, int]:
    """Return the source and target device in a link's name."""
    source, arrow, target = key.partition(">")
    if not (arrow and source.isdecimal() and target.isdecimal() and len(key) < 20):
        raise CostError(f'a link is named "source>target", e.g. "3>4" (got {key!r:.40})')
    return int(source), int(target)


def _validate_links(links: dict[str, Any]) -> None:
    for name, link in links.items():
        _validate_fields(name, link, Link, ("latency",))
        if not _is_number(link.bandwidth) or math.isnan(link.bandwidth) or link.bandwidth <= 0:
            raise CostError(f"{name}.bandwidth must be a number above 0 (got {link.bandwidth!r:.40})")


def _validate_phases(costs: Any) -> None:
    for key, times in costs.phases.items():
        _validate_fields(f"phases.{key}", times, PhaseTimes, ("F", "I", "W", "recompute"))
    for key, times in costs.woven.items():
        given = [name for name in WovenTimes.__struct_fields__ if getattr(times, name, None) is not None]
        _validate_fields(f"woven.{key}", times, WovenTimes, given)
    known = {key.rpartition(".")[2] for key in costs.phases}
    if unknown := [key for key in costs.woven if key.rpartition(".")[2] not in known]:
        raise CostError(f"woven has times of {unknown[0]!r:.40} in pairs, but phases has none of it outside of pairs")


def _validate_fields(name: str, value: Any, kind: type, fields: Iterable[str]) -> None:
    if not isinstance(value, kind):
        raise CostError(f"{name} must be {'a ' if kind is Link else ''}{kind.__name__} (got {value!r:.40})")
    for field in fields:
        _validate_number(f"{name}.{field}", getattr(value, field))


def _validate_shared(name: str, shared: Any, *, any_lane: bool) -> None:
    if not isinstance(shared, SharedResource):
        raise CostError(f"{name} must be a SharedResource (got {shared!r:.40})")
    if not isinstance(shared.lanes, dict):
        raise CostError(f"{name}.lanes says how much each lane draws, by its name (got {shared.lanes!r:.40})")
    for lane, draws in (("capacity", shared.capacity), *shared.lanes.items()):
        _validate_number(f"{name}.{lane}", draws)
        if draws <= 0:
            raise CostError(f"{name}.{lane} must be above 0 (got {draws})")
    if not any_lane and (unknown := [lane for lane in shared.lanes if lane not in LANES]):
        raise CostError(f"{name} names lane {unknown[0]!r:.40}; known are {', '.join(LANES)}")
    if type(shared.devices) is not int or shared.devices < 1:
        raise CostError(f"{name}.devices must be a whole number of at least 1 (got {shared.devices!r:.40})")


def _validate_number(name: str, value: Any) -> None:
    if not _is_number(value) or not math.isfinite(value) or value < 0:
        raise CostError(f"{name} must be a number of at least 0 (got {value!r:.40})")


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True
