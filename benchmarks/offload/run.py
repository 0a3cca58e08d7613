"""What memory policies cost and gain: eight layers of Kimi K2's size on one GPU, in bfloat16.

    python benchmarks/offload/run.py [--microbatches 16] [--tokens 4096] [--only CASE]… [--out FOLDER]

The GPU does what the first of four devices does by interleaved 1F1B with pairs woven, with a layer in each of its eight
stages, so up to 36 passes are in flight. It does so by several policies. Plain PyTorch accumulates gradients over the
same microbatches, one pass after the other: with everything kept, with torch.autograd.graph.save_on_cpu, and with
torch.utils.checkpoint around every layer. Cases run one after the other, the targets and PyTorch first, and "none"
again at the end.

The table has the least and the median time of a step, how much of it the host took to issue it, the ratio to the kept
case, the most bytes that a step takes beyond what was allocated before it, and their share of the kept case. For "auto"
it also prints the choice, and what the link allows. With --out, recorded timelines are saved.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "moe"))
from k2_layers import K2, Layer, loss

import stretto
from stretto.choose import MemoryChoice
from stretto.costs import Link
from stretto.ir.action import Action, Pair
from stretto.ir.placement import looped
from stretto.ir.plan import Cell
from stretto.program.task import Kind
from stretto.schedules import interleaved

LAYERS, DEVICES, WARM_UP, ROUNDS, SECONDS = K2.num_hidden_layers, 4, 1, 4, 12
LINK = 48e9
"""Bytes per second each way, while both directions are busy: what an H200's link to its host gives then."""
POLICIES: dict[str, Any] = {
    "none": "none",
    "all offloaded": {"*": "offload"},
    "all recomputed": {"*": "recompute"},
    "experts in float8": {"*.experts": "fp8", "*.shared_experts": "fp8"},
    "k2": "k2",
}


@dataclass
class Case:
    """A way to train, and what its steps took."""

    step: Callable[[], object]
    parameters: list[nn.Parameter]
    close: Callable[[], object] = lambda: None
    record: Callable[[], None] | None = None
    gradients: int = 0
    """The bytes of gradients that a step makes beside activations. (Ours are summed in memory that stays.)"""
    times: list[float] = field(default_factory=list)
    queued: float = 0.0
    held: int = 0
    first_backward: float = 0.0
    """When the first backward of a recorded step began."""

    def measure(self) -> None:
        for weight in self.parameters:
            weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        self.step()
        self.queued = time.perf_counter() - start
        torch.cuda.synchronize()
        self.times.append(time.perf_counter() - start)
        self.held = max(self.held, torch.cuda.max_memory_allocated() - before - self.gradients)

    def row(self, name: str, plain: "Case") -> str:
        least, held = min(self.times), self.held / 2**30
        return (
            f"| {name} | {least * 1e3:.0f} | {statistics.median(self.times) * 1e3:.0f} | {self.queued * 1e3:.0f} "
            f"| {least / min(plain.times):.3f} | {held:.2f} | {self.held / plain.held:.0%} |"
        )


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("pp",))
        torch.manual_seed(1)
        shape = options.microbatches, options.tokens, K2.hidden_size
        self.x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.y = torch.randn_like(self.x)
        self.plan = first_of(DEVICES, options.microbatches)
        self.costs: stretto.Costs | None = None

    def pipeline(self, memory: Any) -> stretto.Pipeline:
        return stretto.Pipeline(
            lambda number: Layer(number, config=K2),
            layer_count=LAYERS,
            plan=self.plan,
            loss=loss,
            mesh=self.mesh,
            memory=memory,
            gradients="float32",
            costs=self.costs,
            timeout=60,
        )

    def ours(self, name: str, memory: Any, out: Path | None) -> Case:
        pipe = self.pipeline(memory)
        case = Case(lambda: pipe.step(self.x, self.y, check_finite=False), list(pipe.parameters()), pipe.close)

        def record() -> None:
            for _ in range(2):  # the first allocates
                timeline = pipe.step(self.x, self.y, record=True).timeline
            assert timeline is not None
            device = timeline.summary().devices[0]
            backwards = timeline.program.work.kind == Kind.B
            case.first_backward = float(timeline.start[backwards].min() - timeline.start.min())
            print(
                f"({name}: {timeline.makespan * 1e3:.0f} ms recorded; compute waited {device.exposed_copy * 1e3:.0f} "
                f"for copies and {device.host_late * 1e3:.0f} for its host; the first backward began after "
                f"{case.first_backward * 1e3:.0f})",
                file=sys.stderr,
            )
            if out is not None:
                timeline.save(out / f"{name.replace(' ', '-')}.trace.json")

        case.record = record
        return case

    def choose(self) -> MemoryChoice:
        """The choice by the costs of a step that keeps everything, by which all pipelines weave from now on."""
        pipe = self.pipeline("none")
        report = pipe.dry_run(self.x, self.y)
        for _ in range(3):
            timeline = pipe.step(self.x, self.y, record=True).timeline
        layers = pipe.program.anatomy.layers
        pipe.close()
        del pipe
        release()
        assert timeline is not None
        self.costs = report.costs(stretto.fit(timeline), host=Link(bandwidth=LINK))
        return stretto.choose_memory(self.plan, self.costs, layers=layers)

    def plain(self, around: Callable[[Layer, Tensor], Tensor]) -> Case:
        """PyTorch's autograd, which adds the gradients of one microbatch after the other."""
        layers = [Layer(number, config=K2) for number in range(LAYERS)]

        def step() -> None:
            for x, y in zip(self.x[:, None], self.y[:, None], strict=True):
                value = x
                for layer in layers:
                    value = around(layer, value)
                (loss(value, y) / len(self.x)).backward()

        parameters = [weight for layer in layers for weight in layer.parameters()]
        return Case(step, parameters, gradients=sum(weight.nbytes for weight in parameters))


def on_cpu(layer: Layer, value: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return layer(value)  # type: ignore[no-any-return]


PEERS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "PyTorch, all kept": lambda layer, value: layer(value),
    "PyTorch, save_on_cpu": on_cpu,
    "PyTorch, checkpoint": lambda layer, value: checkpoint(layer, value, use_reentrant=False),
}


def first_of(devices: int, microbatches: int) -> stretto.Plan:
    """What the first of so many devices does, alone on one device: it hands on to itself."""
    row = interleaved(devices=devices, microbatches=microbatches, stages_per_device=LAYERS, overlap=True).rows[0]

    def here(action: Action) -> Action:
        return replace(action, stage=action.stage // devices)

    def cell(one: Cell) -> Cell:
        return Pair(here(one.forward), here(one.backward)) if isinstance(one, Pair) else here(one)

    return stretto.Plan(
        (tuple(map(cell, row)),), looped(devices=1, stages_per_device=LAYERS, microbatches=microbatches)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a microbatch")
    parser.add_argument("--only", action="append", help="only this case and none; may be given several times")
    parser.add_argument("--out", type=Path, help="a folder for recorded timelines and figures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU, and there is none")
    torch.cuda.set_device(0)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29571")
    dist.init_process_group("nccl", rank=0, world_size=1)
    bench = Bench(options)
    choice = bench.choose()
    policies = {**POLICIES, "auto": choice.memory}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {options.microbatches} × {options.tokens}\n")
    print(choice, flush=True)
    ours = {name: partial(bench.ours, name, policy, options.out) for name, policy in policies.items()}
    cases: dict[str, Callable[[], Case]] = {name: ours.pop(name) for name in ("none", "auto", "k2")}
    cases |= {name: partial(bench.plain, around) for name, around in PEERS.items()}
    cases |= {**ours, "none, again": cases["none"]}
    made: dict[str, Case] = {}
    print("\n| | least, ms | median, ms | host, ms | of kept | GiB | of kept |\n|---|---|---|---|---|---|---|")
    for name, make in cases.items():
        kept = "PyTorch, all kept" if name in PEERS else "none"
        if options.only and name not in (*options.only, "none"):
            continue
        made[name] = case = run(make())
        print(case.row(name, made.get(kept, case)), flush=True)
    if "auto" in made:
        most = LINK * made["auto"].first_backward
        gained = made["none"].held - made["auto"].held
        print(
            f"\nauto: {gained / 1e9:.1f} GB less. Until the first backward, when most is held, the link can carry "
            f"{most / 1e9:.1f} GB: {gained / most:.0%} of that"
        )
    dist.destroy_process_group()


def run(case: Case) -> Case:
    """Measure steps, as many as the time allows, and let go of everything."""
    for number in range(WARM_UP + ROUNDS):
        if number == WARM_UP:
            case.times, case.held = [], 0
        if sum(case.times) < SECONDS:
            case.measure()
    if case.record is not None:
        case.record()
    case.close()
    case.step, case.record, case.close, case.parameters = print, None, print, []
    release()
    return case


def release() -> None:
    """Give back to the device and the host what nobody refers to."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()  # what save_on_cpu has pinned


if __name__ == "__main__":
    main()
