"""A rank that fails, dies, stops or stalls is named by every other within seconds, and nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PATHS = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}


@contextmanager
def started(*arguments: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, *given], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENVIRONMENT
        )
        for given in arguments
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


WORDS = {
    "raises": "rank {} stopped at {}: RuntimeError: out of luck",
    "leaves": "rank {} stopped at {}: SystemExit: 3",
    "dies": "rank {} died; it was last heard of at {}",
    "stops": "rank {} has not been heard of for",
    "stalls": "rank {} has been at {} for",
}


@pytest.mark.parametrize("how", sorted(WORDS))
@pytest.mark.parametrize("victim", [0, 2])
def test_every_other_rank_names_it(tmp_path: Path, how: str, victim: int) -> None:
    script = str(TESTS / "failing.py")
    ranks = [[script, str(rank), "4", str(tmp_path / "meeting"), str(victim), how] for rank in range(4)]
    with started(*ranks) as processes:
        said = {}
        for rank, process in enumerate(processes):
            if rank != victim:
                _, said[rank] = process.communicate(timeout=60)
    task = r"(\d+[FB]\d+(\.wgrad)?|\d+(SEND|RECV)_[FB]\d+)"
    expected = re.escape(WORDS[how]).replace(r"\{\}", str(victim), 1).replace(r"\{\}", task)
    for rank, text in said.items():
        line = next((line for line in text.splitlines() if line.startswith("PipelineError")), "")
        assert re.search(expected, line), (rank, text)
        if how in ("dies", "stops", "stalls"):  # of the others a rank may hear between two steps, waiting for nothing
            assert f"; rank {rank} was waiting for " in line


def test_whoever_catches_it_can_close_the_pipeline_and_end_in_peace(tmp_path: Path) -> None:
    script = str(TESTS / "failing.py")
    ranks = [[script, str(rank), "4", str(tmp_path / "meeting"), "2", "caught"] for rank in range(4)]
    with started(*ranks) as processes:
        ended = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]
    assert [code for _, code in ended] == [0, 0, 0, 0], ended


def test_it_takes_less_than_ten_seconds(tmp_path: Path) -> None:
    """From the moment a rank is stopped, which of all ways is found last."""
    script = str(TESTS / "failing.py")
    ranks = [[script, str(rank), "4", str(tmp_path / "meeting"), "1", "stops"] for rank in range(4)]
    with started(*ranks) as processes:
        while _state(processes[1].pid) != "T":
            time.sleep(0.05)
        stopped = time.monotonic()
        for rank in (0, 2, 3):
            assert processes[rank].wait(timeout=10) == 7
        assert time.monotonic() - stopped < 10
        os.kill(processes[1].pid, signal.SIGKILL)


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_under_torchrun(how: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(TESTS / "failing.py"), "2", how]
    with started(command) as (process,):
        _, said = process.communicate(timeout=90)
    assert said.count("PipelineError: rank 2") == 3, said
