"""Whether memory policies change a bit of the gradients, and whether a dry run predicts what they take: our MLA + MoE
layers on pp × ep ranks of one GPU, in bfloat16.

    stretto onegpu run --devices 4 benchmarks/offload/exact.py pp=2,ep=2 [--microbatches 8] [--tokens 4096]

Every policy trains two steps by each schedule, with PyTorch's deterministic algorithms, which also fill new memory with
NaN. The table has the number of gradients that differ in any bit from those of "none", which must be 0, the most bytes
that were allocated after a task of a third, recorded step beyond those before the pipeline was made, and their ratio to
what the dry run had said; of the ranks, the worst.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
sys.path.insert(0, str(Path(__file__).parent.parent / "moe"))
from k2_layers import CONFIG, Layer, loss

import stretto
import stretto.onegpu
from stretto.schedules import dualpipev, interleaved, zb_v

LAYERS = CONFIG.num_hidden_layers
POLICIES: dict[str, Any] = {
    "none": "none",
    "none, again": "none",
    "all offloaded": {"*": "offload"},
    "40 % offloaded": stretto.Memory(sites={"*": "offload"}, fraction=0.4),
    "norms recomputed, the rest offloaded": {"*norm": "recompute", "*.swiglu": "recompute", "*": "offload"},
    "all recomputed": {"*": "recompute"},
    "k2": "k2",
}
PLANS: dict[str, Callable[..., stretto.Plan]] = {
    "interleaved": partial(interleaved, overlap=True),
    "DualPipeV": dualpipev,
    "ZB-V": zb_v,
}


def train(mesh: DeviceMesh, plan: stretto.Plan, memory: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    """Return the loss, the gradients of the second step, and for this rank the bytes measured and predicted."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    pipe = stretto.Pipeline(
        lambda number: Layer(number),
        layer_count=LAYERS,
        plan=plan,
        loss=loss,
        mesh=mesh,
        memory=memory,
        timeout=60,
    )
    report = pipe.dry_run(*batch)
    weights = list(pipe.parameters())

    def step(**options: Any) -> Any:
        for weight in weights:
            weight.grad = None
        return pipe.step(*batch, **options)

    step()
    found = step().loss
    gradients = [weight.grad for weight in weights]
    timeline = step(record=True).timeline
    peaks: list[Any] = [None if timeline is None else [one.peak_allocated for one in timeline.summary().devices]]
    dist.broadcast_object_list(peaks)
    measured, predicted = peaks[0][pipe.rank] - before, report.ranks[pipe.rank].total
    held = sum(gradient.nbytes for gradient in gradients if gradient is not None)
    pipe.close()
    return found, gradients, measured - held, predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mesh", nargs="?", default="pp=2,ep=2")
    parser.add_argument("--microbatches", type=int, default=8, help="sequences of each pipeline in a step")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--plan", action="append", choices=PLANS, help="only this schedule; may be given several times")
    parser.add_argument("--only", action="append", choices=POLICIES, help="only this policy and none, as often")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU, and there is none")
    sizes = {name: int(size) for name, size in (word.split("=") for word in options.mesh.split(","))}
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)
    dist.init_process_group("onegpu")
    mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(1000 + mesh["ep"].get_local_rank())
    x = torch.randn(options.microbatches, options.tokens, CONFIG.hidden_size, device="cuda", dtype=torch.bfloat16)
    batch = x, torch.randn_like(x)
    if dist.get_rank() == 0:
        print("| schedule | policy | loss | gradients that differ | GiB | of the dry run |\n|---|---|---|---|---|---|")
    for plan in options.plan or PLANS:
        made = PLANS[plan](devices=mesh["pp"].size(), microbatches=options.microbatches)
        wanted: list[Tensor] = []
        for name, memory in POLICIES.items():
            if options.only and name not in ("none", *options.only):
                continue
            found, gradients, measured, predicted = train(mesh, made, memory, batch)
            wanted = wanted or gradients
            differ = sum(not torch.equal(one, other) for one, other in zip(wanted, gradients, strict=True))
            sums = torch.tensor([differ], dtype=torch.float64)
            worst = torch.tensor([measured / 2**30, measured / predicted], dtype=torch.float64)
            dist.all_reduce(sums)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            if dist.get_rank() == 0:
                row = f"{int(sums[0])} of {len(gradients) * dist.get_world_size()} | {worst[0]:.2f} | {worst[1]:.3f}"
                print(f"| {plan} | {name} | {found:.9f} | {row} |", flush=True)
            del gradients
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
