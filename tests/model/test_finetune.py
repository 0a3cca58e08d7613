"""The example that trains a cut model, under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "finetune.py"


def test_it_learns_and_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss")[1]) for line in done.stdout.splitlines()]
    assert losses[0] > 3
    assert losses[-1] < 1
