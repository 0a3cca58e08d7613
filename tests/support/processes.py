"""Processes that begin with everything imported, and which processes run."""

import atexit
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
"""Starts processes as copies of one that has imported what tests need: importing it anew takes seconds."""
FORKS.set_forkserver_preload(
    [
        "pytest",
        "stretto.onegpu",
        "stretto.pipeline.pipeline",
        "stretto.weights.receive.receiver",
        "stretto.weights.send.sender",
        "torch.distributed.checkpoint",
        "torch.distributed.device_mesh",
    ]
)


class Script:
    """A Python script that runs in a process of its own; its errors go to a file."""

    def __init__(self, path: Path, *arguments: Any, errors: Path) -> None:
        self._errors = errors
        self._process = FORKS.Process(
            target=_run, args=(str(path), list(map(str, arguments)), str(errors)), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(self._errors.name, timeout)
        return self._process.exitcode

    def said(self, timeout: float) -> str:
        """What it has written to its standard error, once it has ended."""
        self.wait(timeout)
        return self._errors.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(path: str, arguments: list[str], errors: str) -> None:
    file = os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    sys.argv = [path, *arguments]
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which copies of a process would leave out


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
