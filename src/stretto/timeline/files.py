"""Timelines in files: traces, which can be read back, and figures, which `stretto.draw` writes."""

from collections.abc import Callable
from pathlib import Path

from stretto.costs import Costs
from stretto.ir.errors import StrettoError, TextError
from stretto.ir.files import file_path, read_text, write_text
from stretto.timeline.timeline import Timeline
from stretto.timeline.trace import parse_trace, trace_json

FIGURES: dict[str, Callable[..., None]] = {}
"""The function that writes a figure, by file extension; `stretto.draw` fills this table."""


def save_timeline(
    timeline: Timeline, path: str | Path, *, costs: Costs | None = None, lanes: bool = False, memory: bool = False
) -> None:
    """Write a figure (.svg, .png) or a trace (.json), by the path's extension."""
    path = file_path(path)
    extension = path.suffix.lower()
    if extension == ".json":
        write_text(path, trace_json(timeline, costs=costs))
    elif extension in FIGURES:
        FIGURES[extension](timeline, path, costs=costs, lanes=lanes, memory=memory)
    else:
        raise StrettoError(f"a timeline is saved as .svg, .png or .trace.json (got {path})")


def load_timeline(path: str | Path) -> Timeline:
    """Read a trace that `Timeline.save` wrote: the same program with bit-identical times.

    >>> from tempfile import TemporaryDirectory
    >>> from stretto import load_timeline, simulate
    >>> from stretto.schedules import gpipe
    >>> with TemporaryDirectory() as folder:
    ...     simulate(gpipe(devices=2, microbatches=3)).save(f"{folder}/gpipe.trace.json")
    ...     print(load_timeline(f"{folder}/gpipe.trace.json").makespan)
    12.0
    """
    text = read_text(path)
    try:
        return parse_trace(text)
    except TextError as error:
        raise TextError(f"{path}: {error}") from None
