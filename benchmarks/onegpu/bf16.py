"""bfloat16 blocks of a realistic size: ours with each kind of sum, PyTorch's pipelines, and DeepSeek's DualPipe.

    stretto onegpu run --devices 4 benchmarks/onegpu/bf16.py [TOKENS …] [--only "ours, ZB-V, cast"] [--compile]

8 blocks of RMSNorm + Linear(4096 → 8192) + SiLU + Linear(8192 → 4096), 16 microbatches of so many tokens (512 and
2048), the same groups for all. The least and the median of 10 steps, all ranks together; the least time after which the
slowest rank's host had queued its step; of ours, from a recorded step, for how long the worst device was idle because
its host was late; and the most that a rank held beyond the weights, sums that stay between steps included. DeepSeek's
is run if `dualpipe` can be imported, and sums over its replicas in the end, as ours does. With --compile, each block of
ours and of PyTorch's is compiled, where PyTorch's can run it. With --profile, what the GPU did for rank 0 in a step,
and what its host did.
"""

import argparse
import cProfile
import gc
import io
import pstats
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
from stretto.schedules import dualpipev, interleaved, one_f_one_b, zb_v

WIDTH, LAYERS, MICROBATCHES, WARM_UP, STEPS = 4096, 8, 16, 3, 10
PLANS: dict[str, Callable[..., stretto.Plan]] = {
    "1F1B": one_f_one_b,
    "interleaved": interleaved,
    "interleaved overlapped": lambda **sizes: interleaved(**sizes, overlap=True),
    "ZB-V": zb_v,
    "DualPipe": stretto.schedules.dualpipe,
    "DualPipeV": dualpipev,
}
PEERS: dict[str, tuple[type[Any], int]] = {
    "1F1B": (torch_schedules.Schedule1F1B, 1),
    "interleaved": (torch_schedules.ScheduleInterleaved1F1B, 2),
    "ZB-V": (torch_schedules.ScheduleZBVZeroBubble, 2),
    "DualPipeV": (torch_schedules.ScheduleDualPipeV, 2),
}
SPLIT = ("ZB-V", "DualPipeV")
"""Where PyTorch runs a backward in two halves, which it cannot do with compiled blocks."""


@dataclass
class Made:
    step: Callable[[], None]
    parameters: list[nn.Parameter]
    close: Callable[[], None] = lambda: None
    record: Callable[[], stretto.Timeline | None] | None = None
    """The timeline of a step, on rank 0."""


@dataclass
class Found:
    """Milliseconds, and GiB beyond the weights."""

    least: float
    median: float
    queued: float
    late: float | None
    held: float

    def row(self, name: str) -> str:
        late = "" if self.late is None else f"{self.late:.1f}"
        return f"| {name} | {self.least:.1f} | {self.median:.1f} | {self.queued:.1f} | {late} | {self.held:.2f} |"


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = linear(WIDTH, 2 * WIDTH, bias=False), linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.up(self.norm(x))))
        return x + y


def block(linear: type[nn.Linear] = nn.Linear, *, compiled: bool = False) -> Block:
    made = Block(linear).to("cuda", torch.bfloat16)
    if compiled:
        made.compile()
    return made


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target.float())


def ours(
    mesh: DeviceMesh, plan: stretto.Plan, gradients: Any, together: int, x: Tensor, y: Tensor, *, compiled: bool
) -> Made:
    pipe = stretto.Pipeline(
        lambda _: block(compiled=compiled),
        layer_count=LAYERS,
        plan=plan,
        loss=loss,
        mesh=mesh,
        gradients=gradients,
        wgrad_microbatches=together,
        timeout=60,
    )
    return Made(
        lambda: _ignore(pipe.step(x, y, check_finite=False)),
        list(pipe.parameters()),
        pipe.close,
        lambda: pipe.step(x, y, record=True).timeline,
    )


def torchs(mesh: DeviceMesh, schedule: type[Any], per_rank: int, x: Tensor, y: Tensor, *, compiled: bool) -> Made:
    rank, count = mesh.get_local_rank(), mesh.size() * per_rank
    turns = schedule in (torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleDualPipeV)
    here = [rank, count - 1 - rank] if turns else [rank + mesh.size() * k for k in range(per_rank)]
    stages = [
        PipelineStage(
            nn.Sequential(*(block(compiled=compiled) for _ in range(LAYERS // count))),
            k,
            count,
            torch.device("cuda", 0),
        )
        for k in here
    ]
    runner = schedule(stages if per_rank > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss)
    given = (x,) if 0 in here else ()
    wanted = {"target": y, "losses": []} if count - 1 in here else {}
    return Made(
        lambda: _ignore(runner.step(*given, **wanted)),
        [parameter for stage in stages for parameter in stage.submod.parameters()],
    )


def deepseeks(mesh: DeviceMesh, x: Tensor, y: Tensor) -> Made:
    import dualpipe  # type: ignore[import-not-found]
    from dualpipe.utils import run_backward  # type: ignore[import-not-found]

    class Product(torch.autograd.Function):
        """A linear layer that leaves its weight gradient to DualPipe's store, summed in the weight's type."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors

            def later() -> None:
                made = grad.flatten(0, -2).T @ x.flatten(0, -2)
                weight.grad = made if weight.grad is None else weight.grad.add_(made)

            if dualpipe.WeightGradStore.enabled:
                dualpipe.WeightGradStore.put(later)
            else:
                later()
            return grad @ weight, None

    class Deferred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return made

    class Chunk(nn.Sequential):
        @classmethod
        def overlapped_forward_backward(
            cls, module: Any, given: Any, loss_of: Any, wanted: Any, _: Any, loss: Any, outputs: Any, grads: Any
        ) -> Any:
            made = module(*given)
            of = None if loss_of is None else loss_of(made, *wanted)
            if loss is None:
                run_backward(outputs, grads)
            else:
                loss.backward()
                loss.detach_()
            return [made], of

    per_stage = LAYERS // mesh.size()
    chunks = nn.Sequential(*(Chunk(*(block(Deferred) for _ in range(per_stage))) for _ in range(2)))
    dualpipe.set_p2p_tensor_shapes([(1, *x.shape[1:])])
    dualpipe.set_p2p_tensor_dtype(torch.bfloat16)
    runner = dualpipe.DualPipe(chunks)
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    half = {0: 0, last: 1}.get(rank)
    pairs = [dist.new_group([k, last - k]) for k in range(mesh.size() // 2)]
    mirrored = pairs[min(rank, last - rank)]
    replicated = [list(chunk.parameters()) for chunk in (chunks if rank <= last - rank else reversed(chunks))]

    def sum_replicas() -> None:
        grads = [p.grad for parameters in replicated for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=mirrored)
        for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def step() -> None:
        if half is None:
            runner.step(num_chunks=MICROBATCHES, criterion=loss, return_outputs=False)
        else:
            labels = [y.chunk(2)[1 - half]]
            runner.step(x.chunk(2)[half], num_chunks=MICROBATCHES, criterion=loss, labels=labels, return_outputs=False)
        sum_replicas()

    return Made(step, list(chunks.parameters()))


def cases(mesh: DeviceMesh, x: Tensor, y: Tensor, *, compiled: bool) -> Iterator[tuple[str, Callable[[], Made]]]:
    for name, plan in PLANS.items():
        made = plan(devices=mesh.size(), microbatches=MICROBATCHES)
        for kind in ("cast", "parameter", "float32"):
            yield f"ours, {name}, {kind}", partial(ours, mesh, made, kind, 1, x, y, compiled=compiled)
        for together in (2, 4):
            case = f"ours, {name}, cast, W of {together} together"
            yield case, partial(ours, mesh, made, "cast", together, x, y, compiled=compiled)
        if name in PEERS and not (compiled and name in SPLIT):
            yield f"peer, {name} (PyTorch)", partial(torchs, mesh, *PEERS[name], x, y, compiled=compiled)
        elif name == "DualPipe" and not compiled:
            yield f"peer, {name} (DeepSeek)", partial(deepseeks, mesh, x, y)


def measure(make: Callable[[], Made]) -> tuple[Found, Made]:
    before = torch.cuda.memory_allocated()
    made = make()
    weights = sum(parameter.nbytes for parameter in made.parameters)
    rows = []
    for _ in range(WARM_UP + STEPS):
        for parameter in made.parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        start = time.perf_counter()
        made.step()
        queued = time.perf_counter() - start
        torch.cuda.synchronize()
        took, held = time.perf_counter() - start, torch.cuda.max_memory_allocated() - before - weights
        worst = torch.tensor([took, queued, float(held)], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        rows.append(worst)
    took_all, queued_all, held_all = torch.stack(rows[WARM_UP:]).T
    timeline = None if made.record is None else made.record()
    late = None if timeline is None else max(device.host_late for device in timeline.summary().devices) * 1e3
    ms = took_all * 1e3
    return Found(
        float(ms.min()), float(ms.median()), float(queued_all.min()) * 1e3, late, float(held_all.max()) / 2**30
    ), made


def profile(step: Callable[[], None]) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    with recorded(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    device = str(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60))
    host, text = cProfile.Profile(), io.StringIO()
    for _ in range(3):
        torch.cuda.synchronize()
        dist.barrier()
        host.runcall(step)
    torch.cuda.synchronize()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(40)
    return f"{device}\n{text.getvalue()}"


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def begin_table(tokens: int) -> None:
    devices = dist.get_world_size()
    say(f"\n{tokens} tokens, {devices} devices, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    say("| | least, ms | median, ms | queued after, ms | host late, ms | GiB |\n|---|---|---|---|---|---|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[512, 2048])
    parser.add_argument("--only", action="append", help="only this case; may be given several times")
    parser.add_argument("--compile", action="store_true", help="compile each block with torch.compile")
    parser.add_argument("--profile", action="store_true", help="say what took time on rank 0, on the GPU and its host")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("onegpu")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("pp",))

    for tokens in options.tokens:
        begin_table(tokens)
        torch.manual_seed(1)
        x, y = torch.randn(2, MICROBATCHES, tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
        for name, make in cases(mesh, x, y, compiled=options.compile):
            if options.only and not any(name == part or name.startswith(f"{part} (") for part in options.only):
                continue
            try:
                found, made = measure(make)
            except ImportError as error:
                say(f"| {name} | {error} | | | | |")
                continue
            say(found.row(name))
            if options.profile:
                say(profile(made.step))
            made.close()
            del made, make
            gc.collect()  # the allocator keeps its memory: what the broker has mapped is not given back before it ends
    dist.destroy_process_group()


def _ignore(_: object) -> None:
    """What a step returns is not asked for."""


if __name__ == "__main__":
    main()
