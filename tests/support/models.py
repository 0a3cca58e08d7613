"""Small models, batches and losses, and the plain single-process run that everything is compared with."""

import itertools
import tempfile
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import stretto
import stretto.pipeline.build as runtime
from devices import DEVICE
from strategies import SCHEDULES
from stretto.layers import cut_layers
from stretto.timeline.trace import trace_json

WIDTH, VOCABULARY, TOKENS = 8, 11, 5


class Block(nn.Module):
    """Norm, MLP, residual: a layer with parameters of every kind."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class DictBlock(Block):
    """The same on a dict that also carries an integer mask and something nobody uses."""

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {**x, "hidden": super().forward(x["hidden"]) * x["mask"].unsqueeze(-1)}


class PhasedBlock(nn.Module):
    """An expert layer in four phases, of which two would communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = Block(), Block()

    def phases(self) -> list[tuple[stretto.Phase, Callable[[Any], Any]]]:
        return [
            (stretto.Phase("attn"), self.attention),
            (stretto.Phase("dispatch", "comm"), lambda x: (x.flip(0), x)),
            (stretto.Phase("mlp"), lambda both: (self.experts(both[0]), both[1])),
            (stretto.Phase("combine", "comm"), lambda both: both[0].flip(0) * 0.5 + both[1]),
        ]

    def forward(self, x: Tensor) -> Tensor:
        for _, phase in self.phases():
            x = phase(x)
        return x


class Position(nn.Module):
    """Adds what does not depend on the row: with one row, its gradient is the very one that the layer was given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table.unsqueeze(0)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {"hidden": self.table(x["tokens"]), "mask": x["mask"], "unused": torch.ones_like(x["mask"]).double()}
        return self.table(x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Any) -> Tensor:
        return self.out(x["hidden"] if isinstance(x, dict) else x)


@dataclass(frozen=True)
class Case:
    """All that a rank needs to know to make the same model, batch and plan as everyone else."""

    schedule: str
    devices: int
    microbatches: int
    layers: int = 0
    dicts: bool = False
    checkpoint: bool = False
    balance: tuple[int, ...] | None = None
    counted: bool = False
    dtype: torch.dtype = torch.float64
    tied: bool = False
    dropout: float = 0.0
    steps: int = 1
    phased: bool = False
    recompute: tuple[str, ...] = ()
    wgrad_microbatches: int = 1
    passing: bool = False
    """Layers that hand on what they were given, values or gradients, on microbatches of one row."""

    def plan(self) -> stretto.Plan:
        extra = {"overlap": True} if self.schedule == "interleaved" else {}
        return SCHEDULES[self.schedule].make(devices=self.devices, microbatches=self.microbatches, **extra)

    def modules(self) -> list[nn.Module]:
        torch.manual_seed(1)
        count = max(self.layers or self.plan().stages, 2)
        block = DictBlock if self.dicts else Block
        embed, head = Embed(), Head()
        blocks = [PhasedBlock() if self.phased else block(dropout=self.dropout) for _ in range(count - 2)]
        if self.passing:
            blocks = [(Position, nn.Identity)[k % 2]() for k in range(count - 2)]
        made = [embed, *blocks, head]
        for module in made:
            module.to(DEVICE, self.dtype)
        if self.tied:
            head.out.weight = embed.table.weight
        return made

    def batch(self) -> tuple[Any, Tensor]:
        torch.manual_seed(2)
        size = (1 if self.passing else 2) * self.microbatches
        tokens, targets = (torch.randint(VOCABULARY, (size, TOKENS)).to(DEVICE) for _ in range(2))
        if self.dicts:
            return {"tokens": tokens, "mask": (torch.rand(size, TOKENS) > 0.2).long().to(DEVICE)}, targets
        return tokens, targets

    def loss(self, output: Tensor, target: Tensor) -> Any:
        if not self.counted:
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        chosen = target != 0  # a different number in each microbatch
        return F.cross_entropy(output[chosen], target[chosen], reduction="sum"), chosen.sum()


def plain(case: Case) -> tuple[float, dict[str, Any]]:
    """The loss and gradients of one process that knows nothing of pipelines."""
    model = nn.Sequential(*case.modules())
    inputs, targets = case.batch()
    loss = case.loss(model(inputs), targets)
    if isinstance(loss, tuple):
        loss = loss[0] / loss[1]
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.double().cpu().numpy()
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }


def pipeline(mesh: Any, case: Case, **changes: Any) -> Any:
    given = {
        "plan": case.plan(),
        "loss": case.loss,
        "balance": case.balance,
        "checkpoint": case.checkpoint,
        "recompute": case.recompute,
        "wgrad_microbatches": case.wgrad_microbatches,
        **changes,
    }
    return stretto.Pipeline(case.modules(), mesh=mesh, **given)


def train(mesh: Any, case: Case) -> tuple[float, dict[str, Any]]:
    """The same by a pipeline: the last step's loss, and this rank's gradients."""
    pipe = pipeline(mesh, case)
    inputs, targets = case.batch()
    for _ in range(case.steps):
        result = pipe.step(inputs, targets)
    return result.loss, gradients(pipe)


def disturb(pipe: Any, at: int, act: Callable[[], object]) -> Callable[[], None]:
    """Let something happen before a task is issued; returns what undoes it."""
    issues = pipe._binding._executor._issues
    issue = issues[at]

    def undo() -> None:
        issues[at] = issue

    issues[at] = lambda: (act(), issue())[1]
    return undo


def gradients(pipe: Any) -> dict[str, Any]:
    every = pipe.named_parameters(remove_duplicate=False)
    return {name: p.grad.double().cpu().numpy() for name, p in every if p.grad is not None}


def order(mesh: Any, case: Case) -> tuple[list[str], list[str]]:
    """What a rank's program says, and what its stages were asked to do, in order."""
    pipe = pipeline(mesh, case)
    done: list[str] = []
    for index, stage in pipe._stages.items():
        for name, letter in (("forward", "F"), ("backward", "B"), ("weight", "W")):
            setattr(stage, name, _telling(done, f"{index}{letter}", getattr(stage, name)))
    executor = pipe._binding._executor
    executor.bind(executor._lanes, pipe._binding._bound)
    pipe.step(*case.batch())
    letters = {"F": "F", "B": "B", "I": "B", "W": "W", "WGRAD": "W"}
    planned = [
        f"{task.stage}{letters[task.kind.name]}{task.microbatch}.{task.part}"
        for task in pipe._binding.tasks
        if task.kind.name in letters
    ]
    return planned, done


def _telling(done: list[str], what: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def told(microbatch: int, part: int, *given: Any, **more: Any) -> Any:
        done.append(f"{what}{microbatch}.{part}")
        return run(microbatch, part, *given, **more)

    return told


def accumulate(mesh: Any, case: Case) -> dict[str, Any]:
    pipe = pipeline(mesh, case)
    for k in range(3):
        pipe.step(*case.batch(), accumulate=k > 0)
    return gradients(pipe)


def recorded(mesh: Any, case: Case, counted: bool = False) -> str | None:
    """The trace of a step; if `counted`, of one after which each task leaves a byte more, from 1000 times the rank."""
    pipe = pipeline(mesh, case)
    pipe.step(*case.batch())
    count = itertools.count(1000 * mesh.get_rank())
    fake = mock.patch("stretto.pipeline.pipeline.bytes_counter", return_value=count.__next__)
    with fake if counted else nullcontext():
        timeline = pipe.step(*case.batch(), record=True).timeline
    return None if timeline is None else trace_json(timeline)


def evaluate(mesh: Any, case: Case) -> tuple[float, bool]:
    pipe = pipeline(mesh, case)
    loss = pipe.eval_step(*case.batch()).loss
    return loss, any(p.grad is not None for p in pipe.parameters())


def save(mesh: Any, case: Case, folder: str) -> None:
    pipe = pipeline(mesh, case)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter += 1
    dcp.save(pipe.state_dict(), checkpoint_id=folder)


def load(mesh: Any, case: Case, folder: str) -> dict[str, Any]:
    pipe = pipeline(mesh, case)
    state = pipe.state_dict()
    dcp.load(state, checkpoint_id=folder)
    pipe.load_state_dict(state)
    return {name: value.numpy() for name, value in pipe.state_dict().items()}


REFUSED = {
    "other plans": "rank 1 was given another plan than rank 0",
    "too few devices": "the plan is for 4 devices, but the mesh has 2 ranks",
    "unsound": "the plan is not sound: ",
    "no inputs": "rank 0 runs stage 0 and needs inputs",
    "small batch": "inputs have 3 rows, but the plan has 4 microbatches; a step needs at least one row for each",
    "too few microbatches": "the plan has 4 microbatches, but inputs has 3",
    "no layer count": "layer_count is needed",
    "too few layers": "1 layers on 2 stages need 2 shares of at least 1 that add up",
    "float16": "0.table.weight is float16, whose gradients need scaling, which a pipeline does not do; use bfloat16",
    "no microbatch together": "wgrad_microbatches is a whole number of at least 1 (got 0)",
    "no number together": "wgrad_microbatches is a whole number of at least 1 (got tensor([2, 2]))",
    "some together": "wgrad_microbatches goes with a plan; a program has it from lower()",
    "others together": "rank 1 was given another wgrad_microbatches than rank 0 (3 and 2)",
    "senseless tie": "'head.weight' is no parameter to tie: names begin with a layer's number",
    "unknown site": "memory names '*.nrom', but no phase or module is called that",
    "both": "checkpoint=True recomputes whole layers; give that or modules to recompute, not both",
    "no time": "timeout is a number of seconds above 0, and at most 10⁹ (got 0)",
    "not finite": "the loss of microbatch 2 is not finite",
    "no gradients": "step() needs gradients, which are off here (torch.no_grad); eval_step() needs none",
    "fewer targets": "inputs have 8 rows, but targets have 4; give as many of both",
    "no number": "the loss of microbatch 0 is a tensor of torch.float64 and shape (2,); it must be one real number",
    "a float": "the loss of microbatch 0 is a float; it must be one real number as a tensor",
    "three": "the loss of microbatch 0 is a tuple of 3; it must be one real number as a tensor, or a tuple of a sum",
    "no count": "the count of microbatch 0 is a tensor of torch.float64 and shape (2,); it must be one number",
    "some counted": "the loss of some microbatches has a count, of others none; it must have one in all or none",
    "nothing counted": "the loss counted nothing in the whole step: all its counts are 0",
    "a name for a plan": "plan is a Plan, such as stretto.schedules.zb_v(devices=4, microbatches=8) (got 'zb_v')",
    "no mesh": "mesh is a DeviceMesh, as init_device_mesh makes it (got None)",
    "two dimensions": 'mesh has 2 dimensions (tp, pp); a pipeline takes "pp", "ep" and "dp"',
    "no loss": "loss is a function of output and target (got None)",
    "one module": "layers are a list of modules, or a function that builds one (got Block)",
    "no module": "layer 1 is no nn.Module (got function)",
    "a fraction": "seed is a whole number of at most 63 bits (got 0.5)",
    "keys": "inputs are a UserDict; give a tensor, a tuple or dict of tensors (such as dict(batch)), or a list",
    "an array": "inputs are a ndarray; give a tensor",
    "no graph": "no loss of this step depends on a parameter that requires gradients",
    "a pair": "linear(): argument 'input' (position 1) must be Tensor, not tuple",
    "other seeds": "rank 1 was given another seed than rank 0 (1 and 0)",
    "a set": "layer 0 hands on a builtins.set; layers hand on tensors, plain values, and containers",
    "a class of its own": "a layer hands on a '_hand_on.<locals>.Local', which another process cannot find",
    "sparse": "a layer hands a tensor of layout torch.sparse_coo on to another rank; only plain dense tensors travel",
    "backward within": "a layer ran backward() through its own input in its forward",
    "hooks on phases": "layer 1 runs in phases, so its own hooks or a replaced forward would not run; put them",
    "words changed": "modified by an inplace operation",
}


def _hand_on(what: str) -> list[nn.Module]:
    """Two layers, of which the first hands something odd on."""

    class Local(NamedTuple):
        h: Tensor

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)

        def forward(self, tokens: Tensor) -> Any:
            h = self.table(tokens)
            match what:
                case "a set":
                    return {h}
                case "a class of its own":
                    return Local(h)
                case "sparse":
                    return h.to_sparse()
                case "words changed":
                    tokens.add_(1).remainder_(VOCABULARY)
            return h

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)

        def forward(self, x: Any) -> Tensor:
            if what == "backward within":
                x.sum().backward()
            return self.out(x)  # type: ignore[no-any-return]

    return [First(), Second()]


def refused(mesh: Any, name: str) -> str:
    """What a rank says to a senseless wish."""
    case = Case("gpipe", 2, 4)
    inputs, targets = case.batch()
    try:
        match name:
            case "other plans":
                pipeline(mesh, Case(("gpipe", "one_f_one_b")[mesh.get_local_rank()], 2, 4))
            case "too few devices":
                pipeline(mesh, Case("gpipe", 4, 4, layers=4))
            case "unsound":
                pipeline(mesh, case, plan=stretto.parse_plan("0F0,0B0\n1B0,1F0"))
            case "no microbatch together":
                pipeline(mesh, case, wgrad_microbatches=0)
            case "no number together":
                together = torch.tensor([2, 2])
                pipeline(mesh, case, plan=None, program=stretto.lower(case.plan()), wgrad_microbatches=together)
            case "some together":
                pipeline(mesh, case, plan=None, program=stretto.lower(case.plan()), wgrad_microbatches=2)
            case "others together":
                pipeline(mesh, case, wgrad_microbatches=2 + mesh.get_local_rank())
            case "no inputs":
                pipe = pipeline(mesh, case)
                if mesh.get_local_rank() == 0:
                    pipe.step(None, targets)
            case "small batch":
                pipe = pipeline(mesh, case)
                if mesh.get_local_rank() == 0:
                    pipe.step(inputs[:3], targets)
            case "too few microbatches":
                pipe = pipeline(mesh, case)
                if mesh.get_local_rank() == 0:
                    pipe.step(list(inputs[:3]), targets)
            case "float16":
                pipeline(mesh, Case("gpipe", 2, 4, dtype=torch.float16))
            case "senseless tie":
                pipeline(mesh, case, tied=[("0.table.weight", "head.weight")])
            case "unknown site":
                pipeline(mesh, case, recompute=["*.nrom"])
            case "both":
                pipeline(mesh, case, recompute=["*.norm"], checkpoint=True)
            case "no time":
                pipeline(mesh, case, timeout=0)
            case "no gradients":
                with torch.no_grad():
                    pipeline(mesh, case).step(inputs, targets)
            case "fewer targets":
                pipeline(mesh, case).step(inputs, targets[:4])
            case "no number":
                pipeline(mesh, case, loss=lambda out, _: out.mean((1, 2))).step(inputs, targets)
            case "a float":
                pipeline(mesh, case, loss=lambda *_: 1.5).step(inputs, targets)
            case "three":
                pipeline(mesh, case, loss=lambda out, _: (out.mean(), out, out)).step(inputs, targets)
            case "no count":
                pipeline(mesh, case, loss=lambda out, _: (out.sum(), out.mean((1, 2)))).step(inputs, targets)
            case "some counted":
                made = iter(range(4))
                loss = lambda out, _: (out.sum(), 3) if next(made) % 2 else out.mean()  # noqa: E731
                pipeline(mesh, case, loss=loss).step(inputs, targets)
            case "nothing counted":
                pipeline(mesh, case, loss=lambda out, _: (out.sum(), 0)).step(inputs, targets)
            case "a name for a plan":
                pipeline(mesh, case, plan="zb_v")
            case "no mesh":
                pipeline(None, case)
            case "two dimensions":
                pipeline(init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "pp")), case)
            case "no loss":
                pipeline(mesh, case, loss=None)
            case "one module":
                stretto.Pipeline(Block(), plan=case.plan(), loss=case.loss, mesh=mesh)
            case "no module":
                stretto.Pipeline([Block(), lambda x: x], plan=case.plan(), loss=case.loss, mesh=mesh)
            case "a fraction":
                pipeline(mesh, case, seed=0.5)
            case "keys":
                pipeline(mesh, case).step(UserDict(tokens=inputs), targets)
            case "hooks on phases":
                layers = replace(case, phased=True, layers=4).modules()
                layers[1].register_forward_hook(lambda *_: None)
                stretto.Pipeline(layers, plan=case.plan(), loss=case.loss, mesh=mesh).step(inputs, targets)
            case "an array":
                pipeline(mesh, case).step(inputs.numpy(), targets)
            case "no graph":
                pipeline(mesh, case, loss=lambda out, _: out.mean().detach()).step(inputs, targets)
            case "a pair":
                lines = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
                pair = stretto.Pipeline(lines, plan=case.plan(), loss=case.loss, mesh=mesh)
                pair.step((inputs, targets), targets)
            case "other seeds":
                pipeline(mesh, case, seed=mesh.get_local_rank())
            case "a set" | "a class of its own" | "sparse" | "backward within" | "words changed":
                odd = stretto.Pipeline(_hand_on(name), plan=case.plan(), loss=case.loss, mesh=mesh)
                odd.step(inputs, targets)
            case "no layer count":
                stretto.Pipeline(lambda _: Block(), plan=case.plan(), loss=case.loss, mesh=mesh)
            case "too few layers":
                stretto.Pipeline([Block()], plan=case.plan(), loss=case.loss, mesh=mesh)
            case "not finite":
                losses = iter([1.0, 1.0, float("nan"), 1.0])
                pipe = pipeline(mesh, case, loss=lambda out, _: out.mean() * next(losses))
                pipe.step(inputs, targets)
    except (stretto.StrettoError, RuntimeError, TypeError) as error:
        return str(error)
    return ""


class Ended:
    """The work of a group whose operations have ended when they return."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Blocking:
    """A group of two whose sends and receives block until they have met."""

    def __init__(self, group: Any) -> None:
        self._group, self._word = group, torch.zeros(1)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Ended:
        self._group.send(tensors, peer, tag).wait()
        self._group.recv([self._word], peer, tag + 1).wait()
        return Ended()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Ended:
        self._group.recv(tensors, peer, tag).wait()
        self._group.send([self._word], peer, tag + 1).wait()
        return Ended()


class BlockingTeam:
    """A team whose groups block."""

    def __init__(self, team: Any) -> None:
        self._team = team

    def __getattr__(self, name: str) -> Any:
        return getattr(self._team, name)

    def make(self, members: Any) -> Any:
        made = self._team.make(members)
        return None if made is None else Blocking(made)


def train_blocking(mesh: Any, case: Case) -> tuple[float, dict[str, Any]]:
    """The same over links that block until matched: nothing but the program's own order keeps ranks from deadlock."""
    usual = runtime.Transfers
    runtime.Transfers = lambda team, *rest, **named: usual(BlockingTeam(team), *rest, **named)  # type: ignore[assignment,misc,arg-type,return-value]
    try:
        return train(mesh, case)
    finally:
        runtime.Transfers = usual  # type: ignore[misc]


def train_csv(mesh: Any, text: str, case: Case) -> tuple[float, dict[str, Any]]:
    """By a plan from a file, instead of a schedule of ours."""
    pipe = pipeline(mesh, case, plan=stretto.parse_plan(text))
    return pipe.step(*case.batch()).loss, gradients(pipe)


def train_torch(mesh: Any, text: str, case: Case) -> dict[str, Any]:
    """By PyTorch's own runtime, from the same file."""
    plan, modules = stretto.parse_plan(text), case.modules()
    shares = cut_layers(range(len(modules)), stages=plan.stages)
    here = sorted({stage for device, stage in plan.placement.homes if device == mesh.get_local_rank()})
    stages = [
        PipelineStage(
            nn.Sequential(*(modules[k] for k in shares[stage])),
            stage,
            plan.stages,
            torch.device("cpu"),
            group=mesh.get_group(),
        )
        for stage in here
    ]
    schedule = _PipelineScheduleRuntime(stages, case.microbatches, loss_fn=case.loss)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(text)
        file.flush()
        schedule._load_csv(file.name)
    inputs, targets = case.batch()
    given = (inputs,) if 0 in here else ()
    wanted = {"target": targets} if plan.stages - 1 in here else {}
    schedule.step(*given, **wanted)
    return {
        f"{shares[stage.stage_index][int(name.split('.')[0])]}.{name.split('.', 1)[1]}": p.grad.double().numpy()
        for stage in stages
        for name, p in stage.submod.named_parameters()
        if p.grad is not None
    }


def side_by_side(mesh: Any, case: Case) -> dict[str, Any]:
    """Two pipelines of two ranks each, in one world."""
    del mesh
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = pipeline(both["pp"], case)
    pipe.step(*case.batch())
    return gradients(pipe)


def kept_gradients(mesh: Any, what: str) -> list[bool]:
    """Whether parameters have the very gradients of the user's, of the step before, after one that was refused."""
    case = Case("dualpipe", 2, 4)
    broken = iter([False] * 2 + [True] * 2)  # a rank has the losses of one direction

    def loss(output: Tensor, target: Tensor) -> Any:
        if next(broken):
            if what == "raises":
                raise KeyError("no more losses")
            return output.sum(), 0
        made = case.loss(output, target)
        return (made, 1) if what == "counts nothing" else made

    pipe = pipeline(mesh, case, loss=loss)
    pipe.step(*case.batch())
    before = [parameter.grad for parameter in pipe.parameters()]
    try:
        pipe.step(*case.batch())
    except (stretto.PipelineError, KeyError):
        return [
            parameter.grad is grad and parameter.grad_dtype == parameter.dtype
            for parameter, grad in zip(pipe.parameters(), before, strict=True)
        ]
    return [False]


def after_a_bad_loss(mesh: Any) -> tuple[str, float]:
    """A step whose loss is not finite says so, and the next one is run as if nothing had been."""
    case = Case("one_f_one_b", 2, 4)
    factors = [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0]
    pipe = pipeline(mesh, case, loss=lambda out, target: case.loss(out, target) * factors.pop(0))
    try:
        pipe.step(*case.batch())
    except stretto.PipelineError as error:
        return str(error), pipe.step(*case.batch()).loss
    return "", 0.0


def later(mesh: Any) -> tuple[list[float], str]:
    """Losses that are asked for only after further steps, and one that is not finite."""
    case = Case("one_f_one_b", 2, 4)
    factors = [1.0] * 8 + [float("nan")] + [1.0] * 3
    pipe = pipeline(mesh, case, loss=lambda out, target: case.loss(out, target) * factors.pop(0))
    results = [pipe.step(*case.batch(), check_finite=False) for _ in range(3)]
    try:
        return [result.loss for result in results[:2]], str(results[2].loss)
    except stretto.PipelineError as error:
        return [result.loss for result in results[:2]], str(error)


def now_and_then_counted(mesh: Any) -> str:
    case = Case("one_f_one_b", 2, 4)
    kinds = [False] * 4 + [True] * 4
    pipe = pipeline(mesh, case, loss=lambda out, target: replace(case, counted=kinds.pop(0)).loss(out, target))
    try:
        return str([pipe.step(*case.batch()) for _ in range(2)])
    except stretto.PipelineError as error:
        return str(error)


def changing_shapes(mesh: Any, case: Case) -> list[tuple[float, dict[str, Any]]]:
    """Losses and gradients of steps of other lengths, one microbatch longer than the other."""
    pipe = pipeline(mesh, case)
    found = []
    for lengths in case_lengths():
        pipe.eval_step(*_of_lengths(case, lengths))
        found.append((pipe.step(*_of_lengths(case, lengths)).loss, gradients(pipe)))
    return found


def case_lengths() -> list[list[int]]:
    return [[5, 5, 5, 5], [3, 3, 3, 3], [1, 5, 2, 4]]


def _of_lengths(case: Case, lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    inputs, targets = (part.chunk(case.microbatches) for part in case.batch())
    return tuple([part[:, :length] for part, length in zip(parts, lengths, strict=True)] for parts in (inputs, targets))  # type: ignore[return-value]


def plain_of_lengths(case: Case, lengths: list[int]) -> tuple[float, dict[str, Any]]:
    model = nn.Sequential(*case.modules())
    losses = [case.loss(model(x), y) for x, y in zip(*_of_lengths(case, lengths), strict=True)]
    loss = sum(losses) / len(losses)
    loss.backward()
    return float(loss.detach()), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
