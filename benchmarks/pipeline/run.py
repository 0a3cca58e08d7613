"""Microseconds that a runtime adds to each action, ours and PyTorch's, on one rank of a fake process group.

Rank 0 of four runs its part of a step on tiny stages; what the others would send arrives at once.
From the step's time that of the same modules' bare forwards and backwards is taken off, and the rest shared among the
step's actions: forwards, backwards or their parts, sends and receives. Each figure is the least of many runs.
"""

import argparse
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

import stretto
from stretto.execute.team import Team
from stretto.pipeline.agreement import Agreement
from stretto.pipeline.bind import StepBinding, list_of
from stretto.pipeline.descriptions import describe
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.losses import Losses
from stretto.pipeline.microbatches import Microbatches
from stretto.pipeline.pytree import Tree, take_apart
from stretto.pipeline.shape_cache import ShapeCache
from stretto.pipeline.stage import Stage
from stretto.pipeline.transfers import Transfers
from stretto.program.task import COMPUTE, Kind
from stretto.schedules import dualpipev, interleaved, zb_v

RANKS, WIDTH, ROWS = 4, 8, 4
SCHEDULES: dict[str, tuple[Callable[..., stretto.Plan], type[Any]]] = {
    "interleaved 1F1B": (interleaved, torch_schedules.ScheduleInterleaved1F1B),
    "DualPipeV": (dualpipev, torch_schedules.ScheduleDualPipeV),
    "ZB-V": (zb_v, torch_schedules.ScheduleZBVZeroBubble),
}


class FakeTeam(Team):
    """Of a world that is not there."""

    def make(self, members: Any) -> dist.ProcessGroup:  # noqa: ARG002
        return dist.group.WORLD  # type: ignore[return-value]


def least(runs: list[Callable[[], Any]], repeat: int) -> list[float]:
    """The least time of each; they take turns, so that a slow moment of the machine meets them all."""
    best = [float("inf")] * len(runs)
    for _ in range(repeat):
        for k, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[k] = min(best[k], time.perf_counter() - start)
    return best


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def bare(plan: stretto.Plan, module: nn.Module) -> Callable[[], None]:
    """The forwards, losses and full backwards of rank 0's stages, and nothing else."""
    here = sorted({stage for device, stage in plan.placement.homes if device == 0})
    x, grad, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    def run() -> None:
        for stage in here:
            for _ in range(plan.microbatches):
                out = module(x.detach().requires_grad_(stage > 0))
                if stage == plan.stages - 1:
                    torch.autograd.backward(loss(out, target))
                else:
                    out.backward(grad)

    return run


def ours(plan: stretto.Plan, inputs: Tensor, targets: Tensor) -> tuple[Callable[[], None], int]:
    program = stretto.lower(plan)
    device = torch.device("cpu")
    team = FakeTeam(None, device, timeout=300)
    supervisor = team.supervisor
    here = sorted({stage for device, stage in plan.placement.homes if device == 0})
    gradients = Gradients()
    stages = {
        stage: Stage({stage: nn.Linear(WIDTH, WIDTH)}, program.anatomy, stage, gradients=gradients) for stage in here
    }
    links = Transfers(team, program, device)
    example = take_apart(inputs[:ROWS].clone().requires_grad_())
    value, grad = describe(example, device)[0], describe(Tree([inputs[:ROWS]], list_of(1), [False]), device)[0]
    for stage in range(plan.stages):  # what stages hand on is known: nobody is there to say it
        for link in (*links._sends.values(), *links._receives.values()):
            link.known[Kind.SEND_F, stage], link.known[Kind.SEND_B, stage] = value, grad
    known = ShapeCache(Agreement(team, []), 1, [0])  # from the second step on, what messages look like
    passes = StepBinding(
        program, supervisor, stages, links, reduce=lambda *_, **__: None, shape_cache=known
    )  # nothing is shared
    microbatches = list(inputs.chunk(plan.microbatches))
    wanted = list(targets.chunk(plan.microbatches))

    def run() -> None:
        gradients.begin({number: stage.parameters() for number, stage in stages.items()})
        passes.begin(lambda: "like any other")
        passes.run(microbatches, Losses(loss, wanted, Microbatches.of(plan.placement, 0), device))
        gradients.give_out()

    counted = [kind for kind in COMPUTE if kind is not Kind.WGRAD]
    actions = sum(
        1 + (task.kind is Kind.PAIR) for task in passes.tasks if task.kind in counted or task.lane.peer is not None
    )
    return run, actions


def _agreed(received_result: Tensor | None = None) -> Tensor:  # noqa: ARG001
    return torch.ones(1, dtype=torch.int32)


def theirs(plan: stretto.Plan, schedule: type[Any], inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    here = sorted({stage for device, stage in plan.placement.homes if device == 0})
    example, grad = torch.zeros(ROWS, WIDTH, requires_grad=True), torch.zeros(ROWS, WIDTH)
    stages = []
    for index in here:
        given = example if index else example.detach()
        stage = PipelineStage(
            nn.Linear(WIDTH, WIDTH),
            index,
            plan.stages,
            torch.device("cpu"),
            input_args=(given,),
            output_args=(example,),
            input_grads=(grad if index else None,),
            output_grads=(grad,),
        )
        # Shapes are given; nobody is there to agree that they need not be found out.
        stage._warmup_backward_result = _agreed  # type: ignore[method-assign]
        stages.append(stage)
    made = schedule(stages, n_microbatches=plan.microbatches, loss_fn=loss)
    last = plan.stages - 1 in here

    def run() -> None:
        made.step(inputs, target=targets, losses=[]) if last else made.step(inputs)
        for stage in stages:
            for parameter in stage.submod.parameters():
                parameter.grad = None

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=40, help="runs per figure, of which the least counts")
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print(f"{date.today()}, {platform.machine()}, PyTorch {torch.__version__}, least of {repeat} runs\n")
    print(
        "| schedule | actions | bare, ms | ours, ms | torch, ms | ours, µs per action | torch, µs per action | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, (schedule, peer) in SCHEDULES.items():
        plan = schedule(devices=RANKS, microbatches=16)
        inputs, targets = torch.randn(ROWS * 16, WIDTH), torch.randn(ROWS * 16, WIDTH)
        run, actions = ours(plan, inputs, targets)
        other = theirs(plan, peer, inputs, targets)
        plain = bare(plan, nn.Linear(WIDTH, WIDTH))
        for warm in (run, other, plain):
            warm()
        seconds = least([plain, run, other], repeat)
        added = [(time - seconds[0]) / actions * 1e6 for time in seconds[1:]]
        milliseconds = " | ".join(f"{time * 1e3:.2f}" for time in seconds)
        print(
            f"| {name} | {actions} | {milliseconds} | {added[0]:.1f} | {added[1]:.1f} | {added[0] / added[1]:.2f} |",
            flush=True,
        )
    with suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
