"""The example that trains a cut model, under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import stretto

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "finetune.py"


CLIPPING = """
import runpy, stretto, torch
stretto.Pipeline.clip_grad_norm_ = lambda pipe, most: torch.nn.utils.clip_grad_norm_(pipe.parameters(), most)
runpy.run_path({!r}, run_name="__main__")
"""
"""Runs the example with clipping on each rank alone, while `Pipeline` has none of its own."""


def test_it_learns_and_is_short(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    script = EXAMPLE
    if not hasattr(stretto.Pipeline, "clip_grad_norm_"):
        script = tmp_path / "clipping.py"
        script.write_text(CLIPPING.format(str(EXAMPLE)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss")[1]) for line in done.stdout.splitlines()]
    assert losses[0] > 3
    assert losses[-1] < 1
