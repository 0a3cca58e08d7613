"""What must hold of the runtime on CUDA, shown on ranks that share one GPU.

    stretto onegpu run --devices 4 benchmarks/onegpu/prove.py numerics compare memory overlap

bitwise: the same against one process with the same stages, to the bit.
numerics: every schedule trains a small transformer; its gradients against one process that runs the same microbatches.
compare: step time beside torch.distributed.pipelining on the same model. memory: what 100 steps leave behind.
overlap: a step by CUDA events, and how much of its communication is hidden. kill: a rank dies; what the others say.
small: a few steps under compute-sanitizer.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import stretto
import stretto.onegpu
from stretto.layers import cut_layers
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.losses import Losses
from stretto.pipeline.microbatches import Microbatches
from stretto.pipeline.pytree import Tree
from stretto.pipeline.rng import RngKey
from stretto.pipeline.stage import Stage
from stretto.schedules import dualpipe, dualpipev, interleaved, zb_v

VOCABULARY, WIDTH, TOKENS, ROWS = 512, 256, 128, 2
SCHEDULES: dict[str, Callable[..., stretto.Plan]] = {
    name: getattr(stretto.schedules, name)
    for name in ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe", "dualpipev")
} | {"interleaved": lambda **sizes: interleaved(**sizes, overlap=True)}
PEERS = {
    "interleaved": (interleaved, torch_schedules.ScheduleInterleaved1F1B),
    "dualpipev": (dualpipev, torch_schedules.ScheduleDualPipeV),
    "zb_v": (zb_v, torch_schedules.ScheduleZBVZeroBubble),
}


class Block(nn.Module):
    """A transformer block, in phases of which the middle two would communicate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + y

    def think(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y

    def forward(self, x: Tensor) -> Tensor:
        return self.think(self.attend(x))


class Phased(Block):
    def phases(self) -> list[tuple[stretto.Phase, Callable[[Tensor], Tensor]]]:
        return [
            (stretto.Phase("attn"), self.attend),
            (stretto.Phase("dispatch", "comm"), lambda x: x.flip(1)),
            (stretto.Phase("mlp"), self.think),
            (stretto.Phase("combine", "comm"), lambda x: x.flip(1)),
        ]

    def forward(self, x: Tensor) -> Tensor:
        for _, phase in self.phases():
            x = phase(x)
        return x


def layers(count: int, dtype: torch.dtype, *, phased: bool = False, width: int = WIDTH) -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [(Phased if phased else Block)(width) for _ in range(count - 2)]
    made = [nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY)]
    return [layer.to(dtype) for layer in made]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    inputs, targets = torch.randint(VOCABULARY, (2, ROWS * microbatches, TOKENS), device="cuda")
    return inputs, targets


def alone(model: nn.Module, inputs: Tensor, targets: Tensor, microbatches: int) -> dict[str, Tensor]:
    """The gradients of one process, microbatch by microbatch, summed in float32."""
    sums: dict[str, Tensor] = {}
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        model.zero_grad()
        torch.autograd.backward(loss(model(x), y) / microbatches)
        for name, p in model.named_parameters():
            assert p.grad is not None
            sums[name] = sums[name] + p.grad.float() if name in sums else p.grad.float()
    return sums


def numerics(mesh: DeviceMesh) -> None:
    say("| schedule | float32 | bfloat16 | in phases | W together | W together, in phases |\n|---|---|---|---|---|---|")
    for name, schedule in SCHEDULES.items():
        plan = schedule(devices=mesh.size(), microbatches=2 * mesh.size() + 2)
        errors = []
        for dtype, phased, together in (
            (torch.float32, False, 1),
            (torch.bfloat16, False, 1),
            (torch.float32, True, 1),
            (torch.float32, False, 3),
            (torch.float32, True, 3),
        ):
            count = max(plan.stages, 4)
            model = nn.Sequential(*layers(count, dtype, phased=phased)).cuda()
            inputs, targets = batch(plan.microbatches)
            expected = alone(model, inputs, targets, plan.microbatches)
            given = layers(count, dtype, phased=phased)
            pipe = stretto.Pipeline(given, plan=plan, loss=loss, mesh=mesh, wgrad_microbatches=together, timeout=30)
            pipe.step(inputs, targets)
            pipe.step(inputs, targets)
            worst = torch.zeros(1, device="cuda")
            for key, p in pipe.named_parameters():
                assert p.grad is not None
                off = (p.grad.float() - expected[key]).abs().max() / expected[key].abs().max()
                worst = torch.maximum(worst, off.reshape(1))
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            errors.append(f"{float(worst):.1e}")
            pipe.close()
        say(f"| {name} | {' | '.join(errors)} |")


def bitwise(mesh: DeviceMesh) -> None:
    """Against one process with the same stages, each microbatch whole after the other; the same steps on both sides."""
    for name, schedule in SCHEDULES.items():
        plan = schedule(devices=mesh.size(), microbatches=2 * mesh.size() + 2)
        inputs, targets = batch(plan.microbatches)
        count = max(plan.stages, 4)
        pipe = stretto.Pipeline(layers(count, torch.float32), plan=plan, loss=loss, mesh=mesh, timeout=30)
        pipe.step(inputs, targets)
        given = nn.Sequential(*layers(count, torch.float32)).cuda()
        shares = cut_layers(range(count), stages=plan.stages)
        anatomy = stretto.lower(plan).anatomy
        device = torch.device("cuda")
        gradients = Gradients()
        stages = [
            Stage({k: given[k] for k in share}, anatomy, index, gradients=gradients, device=device)
            for index, share in enumerate(shares)
        ]
        gradients.begin({index: stage.parameters() for index, stage in enumerate(stages)})
        losses = Losses(loss, list(targets.chunk(plan.microbatches)), Microbatches.of(plan.placement, 0), device)
        with ExitStack() as running:
            for stage in stages:
                running.enter_context(stage.running(RngKey(), training=True))
            for k, x in enumerate(inputs.chunk(plan.microbatches)):
                tree = Tree.whole(x)
                for index, stage in enumerate(stages):
                    tree = stage.forward(k, 0, tree, losses.of(k) if index == len(stages) - 1 else None)
                grads: Any = [losses.seed(tree.leaves[0], k)]
                for stage in reversed(stages):
                    grads = stage.backward(k, 0, grads)
                    stage.weight(k, 0)
        gradients.give_out()
        expected: dict[str, Any] = dict(given.named_parameters())
        found: dict[str, Any] = dict(pipe.named_parameters())
        different = [key for key, p in found.items() if not torch.equal(p.grad, expected[key].grad)]
        total = torch.tensor([len(different), len(found)], device="cuda")
        dist.all_reduce(total)
        say(f"{name}: {int(total[0])} of {int(total[1])} parameters differ in any bit")
        pipe.close()


def compare(mesh: DeviceMesh) -> None:
    say("| schedule | ours, ms | torch, ms | ratio | ours, GiB | torch, GiB | ratio |\n|---|---|---|---|---|---|---|")
    width, rank = 1024, mesh.get_local_rank()
    torch.set_float32_matmul_precision("high")
    for name, (schedule, peer) in PEERS.items():
        plan = schedule(devices=mesh.size(), microbatches=4 * mesh.size())
        here = sorted({stage for device, stage in plan.placement.homes if device == rank})
        torch.manual_seed(1)
        inputs, targets = torch.randn(2, 8 * plan.microbatches, TOKENS, width, device="cuda")

        def distance(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target)

        pipe = stretto.Pipeline(
            lambda _: Block(width), layer_count=plan.stages, plan=plan, loss=distance, mesh=mesh, timeout=30
        )
        stages: list[Any] = [
            PipelineStage(Block(width).cuda(), index, plan.stages, torch.device("cuda", 0)) for index in here
        ]
        made = peer(stages, n_microbatches=plan.microbatches, loss_fn=distance)
        first, last = 0 in here, plan.stages - 1 in here

        def ours(pipe: Any = pipe, x: Tensor = inputs, y: Tensor = targets) -> None:
            pipe.step(x, y, check_finite=False)

        def theirs(made: Any = made, x: Tensor = inputs, y: Tensor = targets, ends: Any = (first, last)) -> None:
            made.step(*([x] if ends[0] else []), **({"target": y, "losses": []} if ends[1] else {}))

        steps: list[Any] = [ours, theirs]
        best, most = torch.full((2,), float("inf")), torch.zeros(2)
        for k in range(12):
            for at, step in enumerate(steps):
                for stage in stages:
                    stage.submod.zero_grad()
                for p in pipe.parameters():
                    p.grad = None
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                dist.barrier()
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                took = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if k > 1:
                    best[at] = torch.minimum(best[at], took)
                most[at] = max(float(most[at]), torch.cuda.max_memory_allocated() - before)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        mine, their = (float(number) * 1e3 for number in best)
        held, kept = (float(number) / 2**30 for number in most)
        say(f"| {name} | {mine:.1f} | {their:.1f} | {mine / their:.2f} | {held:.2f} | {kept:.2f} | {held / kept:.2f} |")
        pipe.close()


def memory(mesh: DeviceMesh) -> None:
    plan = dualpipe(devices=mesh.size(), microbatches=2 * mesh.size() + 2)
    for phased in (False, True):
        given = layers(max(plan.stages, 4), torch.float32, phased=phased)
        pipe = stretto.Pipeline(given, plan=plan, loss=loss, mesh=mesh, timeout=30)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        inputs, targets = batch(plan.microbatches)
        held, losses = [], []
        for step in range(100):
            losses.append(pipe.step(inputs, targets).loss)
            optimizer.step()
            if step in (9, 99):
                torch.cuda.synchronize()
                time.sleep(0.5)  # until what was sent is let go of
                held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        grown = torch.tensor([after - before for before, after in zip(*held, strict=True)], device="cuda")
        dist.all_reduce(grown, op=dist.ReduceOp.MAX)
        what = "in phases" if phased else "whole"
        say(f"dualpipe, {what}: loss {losses[0]:.3f} → {losses[-1]:.3f} in 100 steps; ")
        say(f"  from step 10 to 100 the worst rank's memory grew by {int(grown[0])} bytes, reserved by {int(grown[1])}")
        pipe.close()


def overlap(mesh: DeviceMesh) -> None:
    plan = dualpipe(devices=mesh.size(), microbatches=4 * mesh.size())
    given = layers(2 * plan.stages, torch.bfloat16, phased=True, width=1024)
    pipe = stretto.Pipeline(given, plan=plan, loss=loss, mesh=mesh, timeout=30)
    inputs, targets = batch(plan.microbatches)
    for _ in range(3):
        pipe.step(inputs, targets)
    timeline = pipe.step(inputs, targets, record=True).timeline
    if timeline is not None:
        folder = Path(os.environ.get("OUT", "out"))
        folder.mkdir(exist_ok=True)
        timeline.save(folder / "onegpu.trace.json")
        for rank, device in enumerate(timeline.summary().devices):
            total = sum(
                end - start
                for start, end, lane in zip(timeline.start, timeline.end, timeline.program.lane, strict=True)
                if timeline.program.lanes[lane].device == rank and timeline.program.lanes[lane].name == "comm"
            )
            say(
                f"device {rank}: {1e3 * timeline.makespan:.1f} ms, "
                f"compute busy {device.busy / timeline.makespan:.0%}, "
                f"comm {1e3 * total:.1f} ms of which exposed {1e3 * device.exposed_comm:.1f} ms"
            )
    dist.barrier()
    pipe.close()


def kill(mesh: DeviceMesh) -> None:
    plan = dualpipe(devices=mesh.size(), microbatches=2 * mesh.size() + 2)
    pipe = stretto.Pipeline(layers(plan.stages, torch.float32), plan=plan, loss=loss, mesh=mesh, timeout=30)
    inputs, targets = batch(plan.microbatches)
    pipe.step(inputs, targets)
    torch.cuda.synchronize()
    dist.barrier()  # or torchrun might end a rank that has not begun the next step
    rank, start = mesh.get_local_rank(), time.monotonic()
    if rank == mesh.size() // 2:
        stage, left = next(iter(pipe._stages.values())), iter(range(4))
        usual = stage.weight

        def weight(microbatch: int, part: int, *, joins: bool = False) -> None:
            if next(left, None) is None:
                torch.cuda.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
            usual(microbatch, part, joins=joins)

        stage.weight = weight  # type: ignore[method-assign]
    try:
        pipe.step(inputs, targets)
        print(f"rank {rank}: nothing happened", flush=True)
    except Exception as error:
        kind = "" if isinstance(error, stretto.PipelineError) else f"{type(error).__name__}: "
        sys.stdout.write(f"rank {rank}, after {time.monotonic() - start:.1f} s: {kind}{error}\n")
        sys.stdout.flush()
    os._exit(1)


def small(mesh: DeviceMesh) -> None:
    """One step of each of three schedules, for a tool that looks at every access."""
    for name in ("one_f_one_b", "zb_v", "dualpipe"):
        plan = SCHEDULES[name](devices=mesh.size(), microbatches=2 * mesh.size())
        given = layers(max(plan.stages, 4), torch.float32, phased=True, width=32)
        pipe = stretto.Pipeline(given, plan=plan, loss=loss, mesh=mesh, timeout=200)
        say(f"{name}: loss {pipe.step(*batch(plan.microbatches)).loss:.4f}")
        pipe.close()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


PARTS = {part.__name__: part for part in (numerics, bitwise, compare, memory, overlap, kill, small)}


def main() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("onegpu")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("pp",))["pp"]
    for name in sys.argv[1:]:
        say(f"\n{name}, {mesh.size()} devices, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n")
        PARTS[name](mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
