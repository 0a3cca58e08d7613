"""The tests that each rank runs for `stretto doctor`; it writes each result to a file at once, in case it hangs."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stretto.doctor.report import Check, Note
from stretto.ir.errors import PlanError, named
from stretto.ir.plan import Plan
from stretto.pipeline.pipeline import Pipeline
from stretto.schedules.registry import SCHEDULES
from stretto.weights.send.sender import Sender

WIDTH, ROWS, STEPS, RATE = 16, 2, 2, 0.1
BOUND = 1e-12
"""The relative error up to which float64 losses and gradients count as equal."""
PUSHED = 64 * 2**20


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Notes:
    """The file that this rank writes its results to."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def add(self, part: Any, check: Check) -> None:
        self._file.write(msgspec.json.encode(Note(part, check)) + b"\n")
        self._file.flush()

    def attempt(self, part: Any, what: str, act: Callable[[], Check]) -> None:
        """Run a test and write its result; a test that raises has failed."""
        try:
            check = act()
        except Exception as error:
            check = Check(what, "failed", named(error))
        self.add(part, check)


def train(notes: Notes, mesh: DeviceMesh, what: str, make: Callable[[], Plan]) -> None:
    """Test a schedule: skipped if it cannot be made for this number of ranks, failed on any later error."""
    try:
        plan = make()
    except PlanError as error:
        notes.add("training", Check(what, "skipped", str(error)))
    else:
        notes.attempt("training", what, partial(check_training, mesh, what, plan))


def check_training(mesh: DeviceMesh, what: str, plan: Plan) -> Check:
    """Train two steps; compare losses and gradients with those of the same layers in this process alone."""
    device = torch.device(mesh.device_type)

    def block(number: int) -> Block:
        return Block(number).to(device, torch.float64)

    alone = nn.Sequential(*(block(number) for number in range(plan.stages)))
    pipe = Pipeline(block, layer_count=plan.stages, plan=plan, loss=loss, mesh=mesh, timeout=30)
    expected, worst = dict(alone.named_parameters()), 0.0
    try:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            shape = (ROWS * plan.microbatches, WIDTH)
            x, y = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for _ in range(2))
            alone.zero_grad()
            expected_loss = torch.stack([loss(alone(a), b) for a, b in _chunks(x, y, plan.microbatches)]).mean()
            torch.autograd.backward(expected_loss)
            pipeline_loss = torch.tensor(pipe.step(x, y).loss, dtype=torch.float64)
            worst = max(worst, relative_error(pipeline_loss, expected_loss.detach().cpu()))
            for name, parameter in pipe.named_parameters():
                worst = max(worst, relative_error(parameter.grad, expected[name].grad))
            with torch.no_grad():
                for parameter in (*pipe.parameters(), *alone.parameters()):
                    if parameter.grad is not None:
                        parameter.sub_(RATE * parameter.grad)
    finally:
        pipe.close()
    if worst > BOUND:
        return Check(what, "failed", f"losses and gradients are {worst:.1e} off those of one process", worst)
    return Check(what, "ok", f"{worst:.1e}", worst)


def _chunks(x: Tensor, y: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.chunk(count), y.chunk(count), strict=True))


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest error over the largest expected value; infinity if that is not finite, or if a tensor is
    missing."""
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    if torch.equal(actual, expected):
        return 0.0
    error = float((actual - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf


def check_link(mesh: DeviceMesh, source: int, target: int) -> Check:
    """Measure bandwidth and latency from one rank to another, by the receiver's clock."""
    cuda = mesh.device_type == "cuda"
    rank, seconds = dist.get_rank(), []
    pattern = torch.arange(2**26 // 4, dtype=torch.int32, device=mesh.device_type)
    large = pattern.clone() if rank == source else torch.zeros_like(pattern)
    small = torch.zeros(2**10, dtype=torch.uint8, device=mesh.device_type)
    for tensor, times in ((large, 5), (small, 20)):
        for k in range(times + 2):
            if k == 2:  # the first two open the connection
                began = _now(cuda)
            if rank == source:
                dist.send(tensor, target)
            elif rank == target:
                dist.recv(tensor, source)
        seconds.append((_now(cuda) - began) / times)
    speed, latency = large.nbytes / seconds[0] / 1e9, seconds[1] * 1e6
    if not torch.equal(large, pattern):
        return Check(f"{source} → {target}", "failed", "what arrives is not what was sent")
    if rank == source:
        return Check(f"{source} → {target}", "ok", "")
    return Check(f"{source} → {target}", "ok", f"{speed:.1f} GB/s, {latency:.0f} µs", speed)


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def check_push(mesh: DeviceMesh, folder: Path) -> Check:
    """Push weights from all ranks into a process that holds other values."""
    what, address = "a process of its own", f"unix://{folder}/engine"
    engine = _start_engine(address, mesh.device_type) if dist.get_rank() == 0 else None
    started = [engine is not None and _is_ready(engine)]
    dist.broadcast_object_list(started, src=0)
    sender = Sender(mesh, timeout=30)
    try:
        if not started[0]:
            return Check(what, "failed", "the process to push into did not start")
        sender.register("1", weights(mesh.device_type, 1.0).items())
        sender.push("1", [address])  # the first push also measures speeds
        sender.register("2", weights(mesh.device_type, 2.0).items())
        report = sender.push("2", [address])
        assurance = report.receivers[address]
        summary = f"{report.nbytes / 2**20:.0f} MiB at {report.gb_per_second:.1f} GB/s, {assurance}"
        if engine is not None and not _holds(engine, 2.0):
            return Check(what, "failed", f"{summary}, but it holds other values")
        return Check(what, "ok" if assurance == "verified" else "failed", summary, report.gb_per_second)
    finally:
        sender.close()
        if engine is not None:
            engine.kill()
            engine.wait()


def _start_engine(address: str, device: str) -> "subprocess.Popen[str]":
    """Start the process to push into. It exits when this process ends and so closes its input."""
    command = [sys.executable, "-m", "stretto.doctor.engine", address, device]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _is_ready(engine: "subprocess.Popen[str]") -> bool:
    assert engine.stdout is not None
    return engine.stdout.readline().strip() == "ready"


def _holds(engine: "subprocess.Popen[str]", value: float) -> bool:
    """Ask the process whether its tensors equal `weights(…, value)`."""
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write(f"{value}\n")
    engine.stdin.flush()
    return engine.stdout.readline().strip() == "same"


def weights(device: str, value: float) -> dict[str, Tensor]:
    """Return the tensors to push, 16 of different content, all multiplied by `value`."""
    count = PUSHED // 16 // 4
    return {f"w{k}": torch.arange(k * count, (k + 1) * count, device=device) * value for k in range(16)}


def main() -> None:
    folder, backend, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    signal.alarm(seconds)  # ends this process even if it hangs or loses its parent
    local = int(os.environ["LOCAL_RANK"])
    (folder / f"process-{local}").write_text(str(os.getpid()))
    if backend != "gloo":
        torch.cuda.set_device(local if backend == "nccl" else 0)
    if backend == "onegpu":
        import stretto.onegpu  # noqa: F401
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu" if backend == "gloo" else "cuda", (size,), mesh_dim_names=("pp",))
    notes = Notes(folder / f"rank-{rank}.jsonl")
    for schedule in SCHEDULES.values():
        make = partial(schedule.make, devices=size, microbatches=2 * size)
        plans = {schedule.name: make}
        if schedule.variable:
            plans[f"{schedule.name} +overlap"] = partial(make, overlap=True)
        for name, plan in plans.items():
            train(notes, mesh, name, plan)
    for source in range(size if size > 1 else 0):
        target = (source + 1) % size
        if rank in (source, target):
            notes.attempt("links", f"{source} → {target}", partial(check_link, mesh, source, target))
        dist.barrier()
    notes.attempt("push", "a process of its own", partial(check_push, mesh, folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
