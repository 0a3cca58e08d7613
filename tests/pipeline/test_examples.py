"""The training examples under torchrun; the model of the demo is that of its engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import loop
import stretto
import train_moe
from mini_engine.model import checkpoint, reference
from stretto.model import CausalLM, causal_lm_loss
from stretto.timeline.trace import parse_trace

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def trained(ranks: int, example: str, *arguments: str) -> list[float]:
    """The losses that an example prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / example), *arguments], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [float(line.split("loss")[1]) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zb_h1", "v_half", "dualpipe", "dualpipev"])
def test_it_learns(schedule: str, tmp_path: Path) -> None:
    trace = tmp_path / "step.trace.json"
    losses = trained(2, "train.py", schedule, str(trace))
    assert losses[0] > 4
    assert losses[-1] < 0.1
    assert stretto.check(parse_trace(trace.read_text()).program) == []


@pytest.mark.parametrize("mesh", ["pp=2,ep=2", "dp=2,ep=2"])
def test_the_mixture_of_experts_learns_on_a_mesh_and_is_saved_whole(mesh: str, tmp_path: Path) -> None:
    losses = trained(4, "train_moe.py", mesh, str(tmp_path / "last"))
    assert losses[0] > 5
    assert losses[-1] < 3
    model = CausalLM(train_moe.CONFIG)
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "last", no_dist=True)
    tokens = torch.arange(100, 117)[None]
    total, count = causal_lm_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert total / count < 3


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
