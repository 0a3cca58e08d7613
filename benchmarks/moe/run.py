"""Whether expert communication hides behind compute: our MLA + MoE layers on pp × ep ranks of one GPU, in bfloat16.

    stretto onegpu run --devices 4 --link network benchmarks/moe/run.py pp=2,ep=2 [--routing skewed] [--out FOLDER]

Ours by several schedules, with pairs woven and with the same pairs run one pass after the other; and PyTorch's
pipelines on the same layers and exchanges. With --offload also interleaved 1F1B with as much offloaded as hides, by the
costs and the link to host memory, which all ranks share. Each step has 16 microbatches of a sequence on every pipeline.
The table has the least and the median of some steps, all ranks together; and of ours, from a recorded step: the time of
expert communication in the steady state, from the first backward to the last forward, how much of it compute hides, for
how long the worst device waited for its host; and the most that a rank held beyond the weights. With --out, recorded
timelines are saved.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from k2_layers import CONFIG, Layer, loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import stretto
import stretto.onegpu
from stretto.costs import Link
from stretto.execute.members import Members
from stretto.execute.team import Team
from stretto.ir.plan import Cell, actions_of
from stretto.moe import AllToAll, ExpertRanks
from stretto.moe.experts import experts_of
from stretto.schedules import dualpipe, dualpipev, interleaved, zb_v
from stretto.timeline import Timeline

LAYERS, WARM_UP, STEPS = CONFIG.num_hidden_layers, 2, 4
HOST_LINK = 48e9
"""Bytes per second each way between an H200 and its host, while both directions are busy."""
PLANS: dict[str, Callable[..., stretto.Plan]] = {
    "interleaved": partial(interleaved, overlap=True),
    "DualPipeV": dualpipev,
    "DualPipe": dualpipe,
    "ZB-V": zb_v,
}
PEERS = {
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "ZB-V": torch_schedules.ScheduleZBVZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}


@dataclass
class Made:
    step: Callable[[], object]
    modules: list[nn.Module]
    record: Callable[[], Timeline | None] | None = None
    """The timeline of a step, on rank 0."""
    close: Callable[[], None] = lambda: None


@dataclass
class Place:
    """This rank's mesh, batch, and routing."""

    mesh: DeviceMesh
    x: Tensor
    y: Tensor
    skewed: bool


def pipeline(place: Place, plan: stretto.Plan, costs: stretto.Costs | None, memory: Any) -> stretto.Pipeline:
    return stretto.Pipeline(
        lambda number: Layer(number, skewed=place.skewed),
        layer_count=LAYERS,
        plan=plan,
        loss=loss,
        mesh=place.mesh,
        costs=costs,
        memory=memory,
        timeout=60,
    )


def ours(place: Place, plan: stretto.Plan, costs: stretto.Costs | None, memory: Any = "none") -> Made:
    pipe = pipeline(place, plan, costs, memory)
    if pipe.memory_choice is not None:
        say(f"\n{pipe.memory_choice}\n")
    return Made(
        lambda: pipe.step(place.x, place.y, check_finite=False),
        list(pipe.modules()),
        lambda: pipe.step(place.x, place.y, record=True).timeline,
        pipe.close,
    )


def offloading(place: Place, plan: stretto.Plan, costs: stretto.Costs) -> Made:
    """Ours, with as much offloaded as hides."""
    pipe = pipeline(place, plan, costs, "none")
    report = pipe.dry_run(place.x, place.y)
    pipe.close()
    link = Link(bandwidth=HOST_LINK / dist.get_world_size())
    return ours(place, plan, report.costs(costs, host=link), "auto")


def torchs(place: Place, schedule: type[Any]) -> Made:
    """PyTorch's pipeline, whose layers exchange tokens with the same kernels, where they run."""
    pp, ep = place.mesh["pp"], place.mesh["ep"]
    team = Team(Members.of_group(ep.get_group()), torch.device("cuda"), timeout=60)
    assert team.everybody is not None
    ranks = ExpertRanks(team, team.everybody)
    exchange = AllToAll(ranks)
    rank, count = pp.get_local_rank(), 2 * pp.size()
    turns = schedule in (torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleDualPipeV)
    here = [rank, count - 1 - rank] if turns else [rank, rank + pp.size()]
    each = LAYERS // count
    stages = []
    for k in here:
        module = nn.Sequential(*(Layer(number, skewed=place.skewed) for number in range(k * each, (k + 1) * each)))
        for experts in experts_of(module):
            experts.shard(ep.get_local_rank(), ep.size())
            experts.exchange = exchange
            experts.forward = partial(experts.run, _product)  # type: ignore[method-assign]
            for weight in experts.parameters():
                weight.data = weight.data.clone()  # so that the other ranks' experts are free
        stages.append(PipelineStage(module, k, count, torch.device("cuda", 0), group=pp.get_group()))
    runner = schedule(stages, n_microbatches=len(place.x), loss_fn=loss)
    given = (place.x,) if 0 in here else ()
    wanted = {"target": place.y, "losses": []} if count - 1 in here else {}
    modules = [stage.submod for stage in stages]
    own = {id(weight) for module in modules for experts in experts_of(module) for weight in experts.parameters()}
    shared = [weight for module in modules for weight in module.parameters() if id(weight) not in own]

    def step() -> None:
        runner.step(*given, **wanted)
        flat = torch.cat([weight.grad.flatten() for weight in shared if weight.grad is not None])
        dist.all_reduce(flat, group=ep.get_group())

    return Made(step, modules, close=team.close)


def _product(x: Tensor, weight: nn.Parameter, counts: Tensor) -> Tensor:
    """A grouped product with PyTorch's own backward, which is the only one that its pipelines can split."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))


def unwoven(plan: stretto.Plan) -> stretto.Plan:
    """The same plan, with the two passes of each pair one after the other: the forward first."""

    def apart(row: tuple[Cell, ...]) -> tuple[Cell, ...]:
        return tuple(action for cell in row for action in actions_of(cell))

    return replace(plan, rows=tuple(map(apart, plan.rows)))


@dataclass
class Found:
    least: float
    median: float
    queued: float
    held: float
    """GiB beyond the weights."""
    timeline: Timeline | None

    def row(self, name: str) -> str:
        start = f"| {name} | {self.least:.1f} | {self.median:.1f} | {self.queued:.1f} "
        if self.timeline is None:
            return f"{start}| | | | {self.held:.1f} |"
        total, hidden = np.mean(self.timeline.communication(steady=True), axis=0) * 1e3
        late = max(device.host_late for device in self.timeline.summary().devices) * 1e3
        return f"{start}| {total:.1f} | {hidden / total:.0%} | {late:.1f} | {self.held:.1f} |"


def measure(make: Callable[[], Made], *, steps: int = STEPS) -> Found:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    made = make()
    parameters = {id(weight): weight for module in made.modules for weight in module.parameters()}
    weights = sum(weight.nbytes for weight in parameters.values())
    rows = []
    for _ in range(WARM_UP + steps):
        for weight in parameters.values():
            weight.grad = None
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
    took_all, queued_all, held_all = torch.stack(rows[min(steps, WARM_UP) :]).T
    timelines = [] if made.record is None else [made.record() for _ in range(2)]  # the first allocates
    made.close()
    return Found(
        float(took_all.min()) * 1e3,
        float(took_all.median()) * 1e3,
        float(queued_all.min()) * 1e3,
        float(held_all.max()) / 2**30,
        timelines[-1] if timelines else None,
    )


def cases(place: Place, costs: stretto.Costs, *, offload: bool) -> Iterator[tuple[str, Callable[[], Made]]]:
    for name, make in PLANS.items():
        plan = make(devices=place.mesh["pp"].size(), microbatches=len(place.x))
        alone = unwoven(plan)
        if alone != plan:
            yield f"ours, {name}, not woven", partial(ours, place, alone, costs)
        yield f"ours, {name}", partial(ours, place, plan, costs)
        if offload and name == "interleaved":
            yield f"ours, {name}, offloading", partial(offloading, place, plan, costs)
            yield f"ours, {name}, again", partial(ours, place, plan, costs)
        if name in PEERS:
            yield f"PyTorch, {name}", partial(torchs, place, PEERS[name])


def calibrated(place: Place) -> stretto.Costs:
    """Costs by which to weave, from a step of interleaved 1F1B without weaving and one with it."""
    plan = interleaved(devices=place.mesh["pp"].size(), microbatches=len(place.x), overlap=True)
    costs, timelines = None, []
    for one in (unwoven(plan), plan):
        timelines.append(measure(partial(ours, place, one, costs), steps=0).timeline)
        fitted = [stretto.fit(*timelines)] if dist.get_rank() == 0 else [None]  # type: ignore[arg-type]
        dist.broadcast_object_list(fitted, device=torch.device("cpu"))
        costs = fitted[0]
    assert costs is not None
    return costs


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def named(options: argparse.Namespace, *more: str) -> str:
    """The name of a file."""
    sizes = f"{options.microbatches}x{options.tokens}"
    words = " ".join([options.mesh, sizes, options.routing, *more])
    return "-".join(words.lower().replace(",", " ").replace("=", "").split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mesh", nargs="?", default="pp=2,ep=2")
    parser.add_argument("--routing", choices=("balanced", "skewed"), default="balanced")
    parser.add_argument("--microbatches", type=int, default=16, help="sequences of each pipeline in a step")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--only", action="append", help="only this case; may be given several times")
    parser.add_argument("--offload", action="store_true", help="also offload what hides")
    parser.add_argument("--out", type=Path, help="a folder for recorded timelines")
    parser.add_argument("--costs", type=Path, help="costs to weave by, a .toml file; else they are measured first")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU, and there is none")
    sizes = {name: int(size) for name, size in (word.split("=") for word in options.mesh.split(","))}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(0)
    dist.init_process_group("onegpu")
    mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(1000 + mesh["ep"].get_local_rank())
    x = torch.randn(options.microbatches, options.tokens, CONFIG.hidden_size, device="cuda", dtype=torch.bfloat16)
    place = Place(mesh, x, torch.randn_like(x), options.routing == "skewed")
    say(f"\n{options.mesh}, routing {options.routing}, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    say("| | least, ms | median, ms | queued after, ms | EP, ms | hidden | host late, ms | GiB |")
    say("|---|---|---|---|---|---|---|---|")
    costs = stretto.load_costs(options.costs) if options.costs else calibrated(place)
    if dist.get_rank() == 0 and options.out:
        costs.save(options.out / f"{named(options)}.toml")
    for name, make in cases(place, costs, offload=options.offload):
        if options.only and name not in options.only:
            continue
        found = measure(make)
        say(found.row(name))
        if found.timeline is not None and options.out:
            found.timeline.save(options.out / f"{named(options, name)}.trace.json")
            with (options.out / "medians.txt").open("a") as file:
                print(named(options, name), found.median / 1e3, file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
