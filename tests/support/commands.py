"""The command line within this process: what a user types, and what comes back."""

import io
import os
import sys
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from stretto.cli.console import err, out
from stretto.cli.main import main


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str, cwd: Path | None = None) -> Done:
    """Run `stretto` with these arguments, on a terminal's width of 100 columns but without a terminal."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code: object = None
    with (
        nullcontext() if cwd is None else chdir(cwd),
        mock.patch.object(sys, "argv", ["stretto", *arguments]),
        mock.patch.dict(os.environ, {"COLUMNS": "100"}),
        mock.patch.object(out, "_width", 100),
        mock.patch.object(err, "_width", 100),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return Done(code, stdout.getvalue(), stderr.getvalue())
