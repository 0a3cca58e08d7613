"""Tables of text."""

from collections.abc import Sequence


def table_text(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return rows as aligned columns, the first `left` ones to the left and the others to the right.

    >>> print(table_text([["stage", "bytes"], ["0", "12"]], left=1))
    stage  bytes
    0         12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
