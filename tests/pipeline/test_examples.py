"""The training example under torchrun, with a schedule of each family."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stretto
from stretto.timeline.trace import parse_trace

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "train.py"


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zb_h1", "v_half", "dualpipe", "dualpipev"])
def test_it_learns(schedule: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    trace = tmp_path / "step.trace.json"
    done = subprocess.run(
        [*command, str(EXAMPLE), schedule, str(trace)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss")[1]) for line in done.stdout.splitlines()]
    assert losses[0] > 4
    assert losses[-1] < 0.1
    assert stretto.check(parse_trace(trace.read_text()).program) == []
