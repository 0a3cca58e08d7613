"""Which processes run."""

from pathlib import Path


def running(command: str, mark: str) -> set[int]:
    """The processes with these words in their command line and this mark in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if command.encode() in (path / "cmdline").read_bytes() and mark.encode() in (path / "environ").read_bytes():
                found.add(int(path.name))
        except OSError:
            continue
    return found
