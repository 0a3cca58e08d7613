"""Step time and peak memory of four processes over gloo, ours and PyTorch's, on the same model by the same plan.

Both runtimes stand ready in the same four processes and take turns, step by step, so that a slow moment of the machine
meets both; a step's time is that of its slowest rank, and the least of many counts. Memory is the most that a rank's
process grew by in a step, above what it held before the first; each runtime then has its processes to itself.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import stretto
from stretto.schedules import dualpipev, interleaved, zb_v

RANKS, MICROBATCHES = 4, 16
SCHEDULES: dict[str, tuple[Callable[..., stretto.Plan], type[Any]]] = {
    "interleaved 1F1B": (interleaved, torch_schedules.ScheduleInterleaved1F1B),
    "DualPipeV": (dualpipev, torch_schedules.ScheduleDualPipeV),
    "ZB-V": (zb_v, torch_schedules.ScheduleZBVZeroBubble),
}
SIZES = {"small": (2, 8, 32), "large": (4, 64, 256)}  # rows of a microbatch, tokens, width


class Block(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def ours(plan: stretto.Plan, width: int, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    pipe = stretto.Pipeline(lambda _: Block(width), layer_count=plan.stages, plan=plan, loss=loss, mesh=mesh["pp"])
    return lambda: (pipe.step(inputs, targets, check_finite=False), None)[1]


def theirs(plan: stretto.Plan, schedule: type[Any], width: int, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    rank = dist.get_rank()
    here = sorted({stage for device, stage in plan.placement.homes if device == rank})
    stages = [PipelineStage(Block(width), index, plan.stages, torch.device("cpu")) for index in here]
    made = schedule(stages, n_microbatches=plan.microbatches, loss_fn=loss)
    first, last = 0 in here, plan.stages - 1 in here

    def step() -> None:
        for stage in stages:
            stage.submod.zero_grad()
        losses: list[Tensor] = []
        made.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))

    return step


def grown(step: Callable[[], None]) -> int:
    """The most bytes that this process grew by in a step."""

    def status(name: str) -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    step()
    return status("VmHWM") - before


def rank(schedule: str, size: str, what: str, *, repeat: int) -> None:
    """What one process does; rank 0 prints what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, tokens, width = SIZES[size]
    make, peer = SCHEDULES[schedule]
    plan = make(devices=RANKS, microbatches=MICROBATCHES)
    torch.manual_seed(0)
    inputs, targets = (torch.randn(rows * MICROBATCHES, tokens, width) for _ in range(2))
    found: list[Tensor] = []
    if what == "time":
        steps = [ours(plan, width, inputs, targets), theirs(plan, peer, width, inputs, targets)]
        for step in steps * 2:
            step()
        best = torch.full((len(steps),), float("inf"), dtype=torch.float64)
        for _ in range(repeat):
            for k, step in enumerate(steps):
                dist.barrier()
                start = time.perf_counter()
                step()
                took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                best[k] = min(best[k], took)
        found = list(best)
    else:
        step = ours(plan, width, inputs, targets) if what == "ours" else theirs(plan, peer, width, inputs, targets)
        most = torch.tensor(grown(step))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        found = [most]
    if dist.get_rank() == 0:
        print(json.dumps([float(number) for number in found]), flush=True)
    dist.barrier()
    os._exit(0)


def run(schedule: str, size: str, what: str, repeat: int) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    # Memory that is freed goes back at once, so that a process is as large as what it holds.
    held = {} if what == "time" else {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(
        [*command, "--rank", schedule, size, what, "--repeat", str(repeat)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", **held},
    )
    if done.returncode:
        sys.exit(done.stderr)
    numbers: list[float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20, help="steps per figure, of which the least counts")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(*given.rank, repeat=given.repeat)
    cores = len(os.sched_getaffinity(0))
    print(
        f"{date.today()}, {platform.machine()}, {cores} cores, PyTorch {torch.__version__}, least of {given.repeat}\n"
    )
    print("| schedule | stages | ours, ms | torch, ms | ratio | ours, MiB | torch, MiB | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for schedule in SCHEDULES:
        for size in SIZES:
            mine, their = run(schedule, size, "time", given.repeat)
            held, kept = run(schedule, size, "ours", 1)[0], run(schedule, size, "torch", 1)[0]
            print(
                f"| {schedule} | {size} | {mine * 1e3:.1f} | {their * 1e3:.1f} | {mine / their:.2f} "
                f"| {held / 2**20:.0f} | {kept / 2**20:.0f} | {held / kept:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
