"""The training example under torchrun, with a schedule of each family; the model of the demo is that of its engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import loop
import stretto
from mini_engine.model import checkpoint, reference
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


def test_the_demos_model_begins_and_ends_as_a_checkpoint_of_its_engines() -> None:
    expected = checkpoint(loop.CONFIG, seed=0)
    held = {shard.entry.name: shard.read() for shard in loop.EXPORT(nn.Sequential(*loop.layers())).held()}
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())


@torch.no_grad()
def test_the_demos_model_computes_what_its_engines_generate() -> None:
    model, weights = nn.Sequential(*loop.layers()).double(), checkpoint(loop.CONFIG, seed=0)
    for start in range(5, 85, 10):
        prompt = [start, start + 1, start + 2]
        (following,) = reference(loop.CONFIG, weights, prompt, 1)
        assert int(model(torch.tensor([prompt]))[0, -1].argmax()) == following
