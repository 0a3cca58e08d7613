"""Where commands print."""

from contextlib import AbstractContextManager

from rich.console import Console
from rich.table import Table

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def working(what: str) -> AbstractContextManager[object]:
    """A spinner on a terminal while something runs; nothing elsewhere."""
    return err.status(what)


def table(*headings: str, left: int = 1) -> Table:
    """A plain table; all but the first columns align right."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="left" if index < left else "right", no_wrap=True)
    return made


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
