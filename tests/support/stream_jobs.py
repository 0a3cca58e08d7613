"""A step on a CPU whose lanes are fake streams, to find out when its memory is given away."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
from fake_streams import Streams, Watching
from mesh_jobs import Member, TensorBlock
from moe_jobs import CONFIG
from stretto.execute.device_lanes import DeviceLanes
from stretto.ir.action import Pair
from stretto.ir.placement import looped
from stretto.program.task import COPIES, FORWARDS, WEIGHTS, Kind
from stretto.schedules import dualpipev, interleaved, zb_v

FORESEEN = replace(
    CONFIG, hidden_size=64, intermediate_size=64, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=4
)
"""With rows to experts as large, beside the rest, as in real models."""
KINDS = {"forwards": FORWARDS, "backwards": (Kind.B, Kind.I), "weights": WEIGHTS, "nobody": ()}


def _plan(microbatches: int, warm_up: int, *, split: bool) -> stretto.Plan:
    """One device, whose passes wait for long, and whose steady state consists of pairs."""
    cells = [f"0F{number}" for number in range(warm_up)]
    cells += [f"(0F{number};0B{number - warm_up})OVERLAP_F_B" for number in range(warm_up, microbatches)]
    cells += [f"0I{number},0W{number}" if split else f"0B{number}" for number in range(microbatches)[-warm_up:]]
    return stretto.parse_plan(",".join(cells))


class Averaging(nn.Module):
    """A phase of communication replaces a buffer, which the next phase multiplies by: memory of another stream."""

    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Linear(CONFIG.hidden_size, CONFIG.hidden_size) for _ in range(2))
        self.register_buffer("load", torch.ones(CONFIG.hidden_size))
        self.cache = {"load": [torch.ones(CONFIG.hidden_size)]}

    def phases(self) -> list[tuple[stretto.Phase, Any]]:
        return [
            (stretto.Phase("attn"), lambda x: torch.tanh(self.before(x))),
            (stretto.Phase("dispatch", "comm"), self._average),
            (stretto.Phase("mlp"), lambda x: self.after(x * self.load * self.cache["load"][0])),
            (stretto.Phase("combine", "comm"), lambda x: x * 2),
        ]

    def _average(self, x: Tensor) -> Tensor:
        self.load = 0.9 * self.load + 0.1 * x.detach().mean((0, 1))
        self.cache["load"][0] = self.load + 1
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        for _, run in self.phases():
            x = run(x)
        return x


def _distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@contextmanager
def _on_streams(pipe: stretto.Pipeline, forgetful: str = "nobody") -> Iterator[Watching]:
    """Run a pipeline's tasks in fake streams within this context. Those that are `forgetful` keep nothing for other
    streams.
    """
    streams, binding = Streams(), pipe._binding
    watching = Watching(streams)

    def bound(task: Any) -> Any:
        act = binding._bound(task)

        def forgets() -> Any:
            result = act()
            used.clear()
            return result

        return watching.doing(task, forgets if task.kind in KINDS[forgetful] else act)

    with streams.patched():
        used: list[object] = []
        binding._used = used
        binding._lanes = DeviceLanes(binding._executor, {}, used)
        binding._executor.bind(binding._lanes, bound)
        yield watching


def watched(
    mesh: DeviceMesh, split: bool, policy: Any, forgetful: str = "nobody", wgrad_microbatches: int = 1, kind: Any = None
) -> tuple[list[str], int, int, list[Tensor]]:
    """Memory that a step gives away too early, the most bytes that its tasks hold, how many passes leave, and the
    gradients. Tasks that are `forgetful` keep nothing for other streams. `kind` is the class of layers.
    """
    member = Member(mesh, {"pp": 1})
    torch.manual_seed(1)
    layers = [TensorBlock(CONFIG).to(torch.float32) if kind is None else kind() for _ in range(2)]
    plan = _plan(8, 5, split=split)
    pipe = stretto.Pipeline(
        layers,
        plan=plan,
        loss=_distance,
        mesh=member.mesh["pp"],
        memory=policy,
        wgrad_microbatches=wgrad_microbatches,
    )
    x = torch.randn(8, 8, CONFIG.hidden_size)
    with _on_streams(pipe, forgetful) as watching, watching:
        pipe.step(x, x.roll(1, 0))
    grads = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
    left = sum(task.kind in COPIES for task in pipe._binding.tasks) // 2
    pipe.close()
    return watching.allocator.wrong, watching.peak, left, grads


SCHEDULES: dict[str, Any] = {
    "interleaved": lambda: interleaved(devices=2, microbatches=8, overlap=True),
    "dualpipev": lambda: dualpipev(devices=2, microbatches=8),
    "zb_v": lambda: zb_v(devices=2, microbatches=8),
}


def _alone(plan: stretto.Plan, device: int) -> stretto.Plan:
    """What one device of a plan does, alone on one device: it hands on to itself."""
    passes = [(cell.forward, cell.backward) if isinstance(cell, Pair) else (cell,) for cell in plan.rows[device]]
    stages = sorted({action.stage for actions in passes for action in actions})
    moved = [[replace(action, stage=stages.index(action.stage)) for action in actions] for actions in passes]
    cells = [Pair(*actions) if len(actions) == 2 else actions[0] for actions in moved]
    here = looped(devices=1, stages_per_device=len(stages), microbatches=plan.microbatches)
    return stretto.Plan((tuple(cells),), here)


def foreseen(mesh: DeviceMesh, schedule: str, device: int, policy: Any) -> tuple[int, int]:
    """The activations that a dry run predicts, and the most bytes that the tasks of a step hold when one ends, if
    lanes are streams.
    """
    member = Member(mesh, {"pp": 1})
    torch.manual_seed(1)
    layers = [TensorBlock(FORESEEN).to(torch.float32) for _ in range(4)]
    plan = _alone(SCHEDULES[schedule](), device)
    pipe = stretto.Pipeline(layers, plan=plan, loss=_distance, mesh=member.mesh["pp"], memory=policy)
    x = torch.randn(8, 32, FORESEEN.hidden_size)
    pipe.step(x, x)
    with _on_streams(pipe) as watching:
        predicted = pipe.dry_run(x, x).ranks[0].activations
        for parameter in pipe.parameters():
            parameter.grad = None
        with watching:
            pipe.step(x, x)
    pipe.close()
    return predicted, watching.peak_at_ends
