"""Output of commands: consoles, a spinner, tables, drawings."""

from contextlib import AbstractContextManager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.draw import draw_rich, draw_text
from stretto.ir.units import bytes_text
from stretto.timeline import Timeline

# No markup: names of files and schedules are printed as they are.
out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def working(what: str) -> AbstractContextManager[object]:
    """Show a spinner on a terminal while something runs; elsewhere, nothing."""
    return err.status(Text(what))


def print_table(headings: list[str], rows: list[list[str]]) -> None:
    """Print a plain table; all columns but the first align right. Only a terminal cuts it to its width."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    if out.is_terminal:
        out.print(table)
    else:
        Console(width=1000, highlight=False, markup=False, emoji=False).print(table)


DRAWN = 160
"""The most tasks of a weight update that a terminal shows."""


def print_timeline(timeline: Timeline, *, width: int | None = None, lanes: bool = False) -> None:
    """Draw a timeline, in colour where the terminal has any."""
    coloured = out.is_terminal and not out.no_color
    out.print((draw_rich if coloured else draw_text)(timeline, width=width or out.width, lanes=lanes))


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def size_text(nbytes: float | None) -> str:
    return "–" if nbytes is None else bytes_text(nbytes)
