"""Benchmarks that need more than this machine may have say what they need, and how they are run."""

import os
import subprocess
import sys

from doc_pages import ROOT


def started(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / "moe" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_predict_says_what_it_does() -> None:
    done = started("predict.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "How well costs from two recorded steps predict other schedules" in done.stdout


def test_without_a_gpu_the_moe_benchmark_says_so_in_one_line() -> None:
    done = started("run.py")
    assert (done.returncode, done.stderr) == (1, "this benchmark needs a CUDA GPU, and there is none\n")
