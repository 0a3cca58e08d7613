"""`stretto onegpu run`: MPS around torchrun, stopped whatever happens. The GPU's tools are stood in for by scripts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
share, queues, link = map(
    os.environ.get, ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_DEVICE_MAX_CONNECTIONS", "STRETTO_ONEGPU_LINK")
)
os.write(1, f"share {share} queues {queues} link {link}\\n".encode())
if sys.argv[1:] == ["wait"]:
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a script to run, and what a machine with a GPU has."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for name, text in {
        "nvidia-smi": "exit 0",
        "nvidia-cuda-mps-control": f'test -d "$CUDA_MPS_PIPE_DIRECTORY" && echo "${{1:-$(cat)}}" >> {tmp_path}/calls',
    }.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
    return tmp_path


def start(place: Path, *arguments: str, tools: bool = True) -> subprocess.Popen[str]:
    path = f"{place}:{os.environ['PATH']}" if tools else "/nowhere"
    return subprocess.Popen(
        [sys.executable, "-m", "stretto", "onegpu", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )


def calls(place: Path) -> list[str]:
    return [line.strip() for line in (place / "calls").read_text().splitlines()]


@pytest.mark.parametrize("code", [0, 3])
def test_mps_is_started_and_stopped_around_the_ranks(place: Path, code: int) -> None:
    process = start(place, "-d", "2", "--link", "nvlink", "script.py", str(code))
    out, _ = process.communicate(timeout=60)
    assert (process.returncode == 0) == (code == 0)
    assert out.count("share 50 queues 16 link nvlink\n") == 2
    assert calls(place) == ["-d", "quit"]


def test_a_request_to_end_stops_both(place: Path) -> None:
    process = start(place, "-d", "1", "script.py", "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "share 100 queues 16 link None\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert calls(place) == ["-d", "quit"]


def test_without_mps_it_says_that_ranks_take_turns(place: Path) -> None:
    process = start(place, "-d", "1", "--no-mps", "script.py", "0")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "without MPS the ranks take turns on the GPU" in err
    assert out == "share None queues None link None\n"
    assert not (place / "calls").exists()


def test_what_is_missing_is_said_in_one_line(place: Path) -> None:
    for arguments, tools, said in (
        (("script.py",), False, "no NVIDIA GPU is to be seen here"),
        (("--link", "fast", "script.py"), True, "a link is nvlink, network or GB/s:µs such as 400:3 (got 'fast')"),
        (("-d", "0", "script.py"), True, "a script runs on at least one device (got 0)"),
    ):
        process = start(place, *arguments, tools=tools)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert said in err
        assert len(err.splitlines()) == 1
    (place / "nvidia-cuda-mps-control").write_text("#!/bin/sh\necho no such thing; exit 1\n")
    process = start(place, "-d", "1", "script.py", "0")
    _, err = process.communicate(timeout=60)
    assert err == "stretto: CUDA MPS does not start (no such thing); --no-mps runs without\n"
