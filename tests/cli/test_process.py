"""The command line as a process: pipes, encodings, exit codes."""

import subprocess
import sys
from pathlib import Path

import stretto
from commands import run

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(stretto.__file__).parent.parent)}


def test_output_without_unicode_is_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "show", "gpipe"],
        capture_output=True,
        timeout=60,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_process_prints_what_a_call_does() -> None:
    for arguments in (["simulate", "dualpipe"], ["show", "dualpip"], ["check", "none.csv"]):
        process = subprocess.run(
            [sys.executable, "-m", "stretto", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**ENVIRONMENT, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"},
        )
        call = run(*arguments)
        assert (process.returncode, process.stdout, process.stderr) == (call.returncode, call.stdout, call.stderr)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m stretto show gpipe -d 64 -m 512 | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
