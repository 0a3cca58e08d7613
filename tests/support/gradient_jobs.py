"""What ranks do to find out whether gradients are those of one whole-batch backward: hooks, ties, kinds of sums."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import stretto
from devices import DEVICE
from strategies import SCHEDULES

WIDTH, TOKENS, MICROBATCHES = 6, 3, 6
Layers = list[nn.Module]


class Mixer(nn.Module):
    """Every kind of parameter: deferred, not deferred, both, and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.unused, self.lone = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) + self.position
        y = y + self.attention(y, y, y, need_weights=False)[0]
        return x + torch.tanh(self.linear(y)) + self.linear.bias + y @ self.linear.weight[:1].T


def layers(stages: int, *, dtype: torch.dtype = torch.float64) -> Layers:
    torch.manual_seed(1)
    return [Mixer().to(DEVICE, dtype) for _ in range(max(stages, 2))]


def batch(rows: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    x, y = torch.randn(2, rows * MICROBATCHES, TOKENS, WIDTH, dtype=torch.float64).to(DEVICE)
    return x, y


def mean(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def counted(output: Tensor, target: Tensor) -> Any:
    chosen = target[..., 0] > 0
    return (output[chosen] - target[chosen]).square().sum(), chosen.sum()


def plan_of(schedule: str, devices: int = 2) -> stretto.Plan:
    return SCHEDULES[schedule].make(devices=devices, microbatches=MICROBATCHES)


def whole(loss: Any, output: Tensor, target: Tensor) -> Tensor:
    made = loss(output, target)
    return made[0] / made[1] if isinstance(made, tuple) else made


def differing(pipe: Any, model: nn.Module, bound: float = 1e-11) -> list[str]:
    """The parameters whose gradients are not those of the model; one has none where the other has none."""
    of = dict(model.named_parameters(remove_duplicate=False))
    every = pipe.named_parameters(remove_duplicate=False)
    return [name for name, p in every if not same(p.grad, of[name].grad, bound)]


def same(mine: Tensor | None, theirs: Tensor | None, bound: float = 1e-11) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return bool((mine - theirs).abs().max() <= bound * theirs.abs().max().clamp_min(1e-30))


# What is done to both, a pipeline's layers and a plain model's, before and between steps.


def _frozen_bias(model: nn.Sequential) -> None:
    for mixer in model:
        mixer.linear.bias.requires_grad_(False)
        mixer.attention.in_proj_bias.requires_grad_(False)


def _frozen_weights(model: nn.Sequential) -> None:
    for mixer in model:
        mixer.linear.weight.requires_grad_(False)
        mixer.attention.in_proj_weight.requires_grad_(False)
        mixer.attention.out_proj.weight.requires_grad_(False)


def _all_frozen(model: nn.Sequential) -> None:
    model.requires_grad_(False)


def _scaled(model: nn.Sequential) -> None:
    """Hooks that return another gradient, two on one of them."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * grad.abs().max())
    for mixer in model:
        mixer.linear.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


def _seen(model: nn.Sequential) -> None:
    """Hooks that only look; how often, and at what, is in `seen`."""
    for parameter in model.parameters():
        parameter.seen = []  # type: ignore[attr-defined]
        parameter.register_hook(lambda grad, to=parameter.seen: to.append(grad.clone()))  # type: ignore[attr-defined]


def _optimizer_in_backward(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9)

        def step(parameter: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step)


def _after(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.seen = []  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(lambda it: it.seen.append(it.grad.clone()))


SETUPS: dict[str, Callable[[nn.Sequential], None]] = {
    "nothing": lambda _: None,
    "frozen bias": _frozen_bias,
    "frozen weights": _frozen_weights,
    "unfrozen": _all_frozen,
    "scaled": _scaled,
    "seen": _seen,
    "after": _after,
    "optimizer in backward": _optimizer_in_backward,
}


def as_plain(mesh: DeviceMesh, setup: str, schedule: str, loss: str, accumulate: bool) -> list[str]:
    """What differs from whole-batch backwards on this rank, over three steps."""
    plan = plan_of(schedule, mesh.size())
    losses = {"mean": mean, "counted": counted}
    given, model = layers(plan.stages), nn.Sequential(*layers(plan.stages))
    SETUPS[setup](nn.Sequential(*given))
    SETUPS[setup](model)
    pipe = stretto.Pipeline(given, plan=plan, loss=losses[loss], mesh=mesh, timeout=30)
    if setup == "unfrozen":
        for trained in (nn.Sequential(*given), model):
            trained.requires_grad_(True)
    wrong = []
    for step in range(3):
        x, y = batch()
        pipe.step(x + step, y, accumulate=accumulate and step > 0)
        if not accumulate:
            model.zero_grad()
        whole(losses[loss], model(x + step), y).backward()  # type: ignore[no-untyped-call]
        wrong += [f"step {step}: {name}" for name in differing(pipe, model)]
    of = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        if not torch.allclose(parameter, of[name], rtol=1e-7, atol=1e-9):
            wrong.append(f"{name} itself")
        mine, theirs = getattr(parameter, "seen", []), getattr(of[name], "seen", [])
        if len(mine) != len(theirs) or not all(map(same, mine, theirs)):
            wrong.append(f"what hooks saw of {name}: {len(mine)} for {len(theirs)}")
    return wrong


# Ties.


class Out(nn.Module):
    def __init__(self, rows: int = 7, columns: int = WIDTH) -> None:
        super().__init__()
        self.out = nn.Linear(columns, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)  # type: ignore[no-any-return]


def _built(number: int, count: int) -> nn.Module:
    torch.manual_seed(number)
    first, last = number == 0, number == count - 1
    return (nn.Embedding(7, WIDTH) if first else Out() if last else nn.Linear(WIDTH, WIDTH)).to(DEVICE, torch.float64)


def tied_builder(mesh: DeviceMesh, schedule: str, loss: str) -> list[str]:
    """Layers that ranks build for themselves, the first and the last tied: what differs from one model."""
    plan = plan_of(schedule, mesh.size())
    count = max(plan.stages, 3)
    tied = ("0.weight", f"{count - 1}.out.weight")

    def ce(output: Tensor, target: Tensor) -> Any:
        made = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")
        return (made, target.numel()) if loss == "counted" else made / target.numel()

    pipe = stretto.Pipeline(
        lambda k: _built(k, count), layer_count=count, plan=plan, loss=ce, mesh=mesh, tied=[tied], timeout=30
    )
    model = nn.Sequential(*(_built(k, count) for k in range(count)))
    model[-1].out.weight = model[0].weight  # type: ignore[union-attr,assignment]
    optimizers = [torch.optim.Adam(it.parameters(), lr=0.1) for it in (pipe, model)]
    wrong = []
    for _ in range(2):
        torch.manual_seed(5)
        x, y = torch.randint(7, (2, 2 * MICROBATCHES, TOKENS)).to(DEVICE)
        pipe.step(x, y)
        model.zero_grad()
        whole(ce, model(x), y).backward()  # type: ignore[no-untyped-call]
        wrong += differing(pipe, model)
        for optimizer in optimizers:
            optimizer.step()
    named = dict(pipe.named_parameters(remove_duplicate=False))
    here = [named[name] for name in tied if name in named]
    if any(one is not here[0] for one in here):
        wrong.append("not one parameter")
    return wrong


REFUSED = {
    "fsdp2": "0 is sharded by FSDP (fully_shard), which reduces gradients by itself",
    "ddp": "0 is replicated by DDP (DistributedDataParallel, replicate), which reduces gradients by itself",
    "replicate": "0 is replicated by DDP (DistributedDataParallel, replicate), which reduces gradients by itself",
    "an unknown name": "'1.wieght' is no parameter to tie: layer 1 has none of that name",
    "a layer that is not": "'9.weight' is no parameter to tie: names begin with a layer's number",
    "no tuples": 'tied is a list of names that are one, such as [("0.weight", "9.weight")] (got',
    "other shapes": "1.out.weight cannot be tied: they have shape (7, 6) (float64) and shape (8, 6) (float64)",
    "other types": "1.out.weight cannot be tied: they have shape (7, 6) (float64) and shape (7, 6) (float32)",
    "one frozen": "0.weight and 1.out.weight cannot be tied: they are frozen in one place, and trained in the other",
    "no kind": "gradients is one of 'cast', 'parameter', 'float32' (got 'bf16')",
    "other kinds": "rank 1 was given another gradients than rank 0 (parameter and cast)",
    "no main gradients": 'main_grads() is for pipelines that were made with gradients="float32"',
    "hooks after no gradient": 'linear.weight has a hook for when .grad is set, which gradients="float32" does not',
    "a hook on a node": "the node that accumulates the gradient of 0.linear.weight has a hook",
    "a hook in a step": "weight while a step ran; do that before the step",
    "a hook that returns a part": "hook '<lambda>' has changed the size of value",
    "not registered": "uses a parameter of shape (6,) that it has not registered",
    "frozen on one rank": "not the same of them are trained, or not in the same shapes and strides",
    "node hooks later": "the node that accumulates the gradient of 0.linear.weight has a hook",
    "added": "a parameter of shape (6,) was added to stage",
    "module replaced": "0.linear.bias was replaced after the pipeline was made, and others hold it too",
    "tie replaced": "the parameter 0.weight was replaced after the pipeline was made, and others hold it too",
    "a tensor in a layer, twice": "uses a tensor that requires gradients of shape (6,) that it has not registered",
    "a tensor in the loss, twice": "the loss trains a tensor of its own, of shape (), and the last stage lives on",
    "another rank's weight in inputs": "inputs or targets depend on 1.linear.weight, which another rank trains",
    "another rank's weight in targets": "inputs or targets depend on 0.linear.weight, which another rank trains",
    "a tensor behind inputs, twice": "inputs or targets depend on a tensor of shape (6, 6), and the stage that",
    "node hooks in a step": "has a hook; use register_hook or register_post_accumulate_grad_hook on the parameter",
    "not registered, in a later step": "uses a parameter of shape (6,) that it has not registered",
    "a count in later steps": "the loss gives a sum and a count in some steps only",
    "not registered, later": "uses a parameter of shape (6,) that it has not registered",
    "grown": "has other parameters than before the step",
    "unfrozen in a forward": "froze or unfroze a parameter while a step ran",
    "a layer before, twice": "inputs or targets depend on a tensor of shape (6",
    "other strides": "cannot be tied: they lie in memory in other ways (their strides differ)",
    "half later": "is float16, whose gradients need scaling",
    "sharded later": "is sharded by FSDP (fully_shard)",
    "one name": "a tie needs two names at least",
    "two ties of one": "0.a.weight and 0.b.weight are one parameter; give them in one tie",
    "a hook that raises": "rank 0 failed at the end of step 1",
    "a loss that trains, twice": "the loss trains a tensor of its own, of shape (), and the last stage lives on",
    "another rank's weight in the loss": "the loss uses 0.linear.weight, which another rank trains",
}


class Held(nn.Module):
    """Has a parameter, in a list that no module knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hidden = nn.Linear(WIDTH, WIDTH), [nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.hidden[0]  # type: ignore[no-any-return]


class Fickle(nn.Module):
    """Changes what it trains, and when."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.linear = how, 0, nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.hidden = [nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        late = {"not registered, later": 2, "not registered, in a later step": MICROBATCHES + 2}
        if self.calls > late.get(self.how, self.calls):
            y = y * self.hidden[0]
        elif self.how == "node hooks in a step":
            self.node = torch.autograd.graph.get_gradient_edge(self.linear.weight).node
            self.node.register_prehook(lambda grads: grads)
        elif self.how == "grown" and self.calls > MICROBATCHES + 1:
            if not hasattr(self, "more"):
                self.more = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
            y = y * self.more
        elif self.how == "unfrozen in a forward" and self.calls > MICROBATCHES + 1:
            self.rest.requires_grad_(True)
        return y * self.rest


class Twin(nn.Module):
    """Has one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


class Hooking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.register_hook(lambda grad: grad * 2)
        return super().forward(x)


def refused(mesh: DeviceMesh, what: str) -> str:
    rank, plan = mesh.get_local_rank(), plan_of("gpipe")
    given: dict[str, Any] = {"plan": plan, "loss": mean, "mesh": mesh, "timeout": 20}
    pair: Layers = [nn.Embedding(7, WIDTH).double(), Out().double()]
    mixers = layers(2)
    try:
        match what:
            case "fsdp2" | "ddp" | "replicate":
                alone = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
                line = nn.Linear(WIDTH, WIDTH).double()
                if what == "fsdp2":
                    fully_shard(line, mesh=alone)
                wrapped = (
                    DistributedDataParallel(line) if what == "ddp" else replicate(line) if what == "replicate" else line
                )
                stretto.Pipeline([wrapped, mixers[1]], **given)
            case "an unknown name":
                stretto.Pipeline(pair, **given, tied=[("0.weight", "1.wieght")])
            case "a layer that is not":
                stretto.Pipeline(pair, **given, tied=[("0.weight", "9.weight")])
            case "no tuples":
                stretto.Pipeline(pair, **given, tied=["0.weight", "1.out.weight"])
            case "other shapes" | "other types" | "one frozen":
                last = Out(8).double() if what == "other shapes" else Out().to(torch.float64)
                last = last.float() if what == "other types" else last
                last.requires_grad_(what != "one frozen")
                stretto.Pipeline([pair[0], last], **given, tied=[("0.weight", "1.out.weight")])
            case "no kind":
                stretto.Pipeline(mixers, **given, gradients="bf16")  # type: ignore[arg-type]
            case "other kinds":
                stretto.Pipeline(mixers, **given, gradients=("cast", "parameter")[rank])  # type: ignore[arg-type]
            case "no main gradients":
                stretto.Pipeline(mixers, **given).main_grads()
            case "hooks after no gradient":
                for mixer in mixers:
                    mixer.linear.weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[union-attr,operator]
                stretto.Pipeline(mixers, **given, gradients="float32").step(*batch())
            case "a hook on a node":
                weight: Any = mixers[rank].linear.weight  # type: ignore[union-attr]
                node = torch.autograd.graph.get_gradient_edge(weight).node
                node.register_hook(lambda *_: None)
                stretto.Pipeline(mixers, **given).step(*batch())
            case "a hook in a step":
                stretto.Pipeline([Hooking(WIDTH, WIDTH).double() for _ in range(2)], **given).step(*batch())
            case "a hook that returns a part":
                mixers[rank].linear.bias.register_hook(lambda grad: grad[:1])  # type: ignore[union-attr,operator]
                stretto.Pipeline(mixers, **given).step(*batch())
            case "not registered":
                stretto.Pipeline([mixers[0], Held().double()], **given).step(*batch())
            case "frozen on one rank":
                pipe = stretto.Pipeline(layers(4), **{**given, "plan": plan_of("dualpipe")})
                next(pipe.parameters()).requires_grad_(rank == 1)
                pipe.step(*batch())
            case "node hooks later":
                pipe = stretto.Pipeline(mixers, **given)
                pipe.step(*batch())
                later: Any = mixers[rank].linear.weight  # type: ignore[union-attr]
                node = torch.autograd.graph.get_gradient_edge(later).node
                node.register_prehook(lambda grads: grads)
                pipe.step(*batch())
            case "added" | "module replaced":
                four = layers(4)
                pipe = stretto.Pipeline(four, **{**given, "plan": plan_of("dualpipe")})
                pipe.step(*batch())
                for mixer in four:
                    if what == "added":
                        mixer.extra = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
                    else:
                        mixer.linear = nn.Linear(WIDTH, WIDTH).double()
                pipe.step(*batch())
            case "tie replaced":
                pipe = stretto.Pipeline(pair, **{**given, "loss": _cross_entropy}, tied=[("0.weight", "1.out.weight")])
                tokens = torch.randint(7, (MICROBATCHES, TOKENS))
                pipe.step(tokens, tokens)
                pair[0].weight = nn.Parameter(torch.ones(7, WIDTH, dtype=torch.float64))
                pair[1].out = nn.Linear(WIDTH, 7, bias=False).double()
                pipe.step(tokens, tokens)
            case "a tensor in a layer, twice":
                odd = [Held().double() for _ in range(4)]
                for layer in odd:
                    layer.hidden = [torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)]  # type: ignore[list-item]
                stretto.Pipeline(odd, **{**given, "plan": plan_of("dualpipe")}).step(*batch())
            case "a tensor in the loss, twice":
                warm = torch.ones((), dtype=torch.float64, requires_grad=True)
                loss = lambda output, target: mean(output * warm, target)  # noqa: E731
                stretto.Pipeline(layers(4), **{**given, "plan": plan_of("dualpipe"), "loss": loss}).step(*batch())
            case "another rank's weight in inputs" | "another rank's weight in targets":
                x, y = batch()
                pipe = stretto.Pipeline(mixers, **given)
                if what.endswith("inputs"):
                    pipe.step(x @ mixers[1].linear.weight, y)  # type: ignore[union-attr,operator]
                else:
                    pipe.step(x, y @ mixers[0].linear.weight)  # type: ignore[union-attr,operator]
            case "a tensor behind inputs, twice":
                x, y = batch()
                turn = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
                stretto.Pipeline(layers(4), **{**given, "plan": plan_of("dualpipe")}).step(x @ turn, y)
            case "a count in later steps":
                kinds_of = [mean, counted]
                loss = lambda output, target: kinds_of[pipe.step_count](output, target)  # noqa: E731
                pipe = stretto.Pipeline(mixers, **{**given, "loss": loss})
                for _ in range(2):
                    pipe.step(*batch(), check_finite=False)
                pipe.step(*batch())
            case "node hooks in a step":
                stretto.Pipeline([mixers[0], Fickle(what).double()], **given).step(*batch())
            case "not registered, in a later step":
                pipe = stretto.Pipeline([mixers[0], Fickle(what).double()], **given)
                for _ in range(2 + MICROBATCHES):
                    pipe.step(*batch())
            case "not registered, later" | "grown" | "unfrozen in a forward":
                fickle = Fickle(what).double()
                pipe = stretto.Pipeline([mixers[0], fickle], **given)
                for _ in range(2):
                    pipe.step(*batch())
            case "a layer before, twice":
                before = nn.Linear(WIDTH, WIDTH).double()
                x, y = batch()
                stretto.Pipeline(layers(4), **{**given, "plan": plan_of("dualpipe")}).step(before(x), y)
            case "other strides":
                turned = Out(7).double()
                turned.out.weight = nn.Parameter(torch.zeros(WIDTH, 7, dtype=torch.float64).T)
                stretto.Pipeline([pair[0], turned], **given, tied=[("0.weight", "1.out.weight")])
            case "half later" | "sharded later":
                pipe = stretto.Pipeline(mixers, **given)
                pipe.step(*batch())
                for mixer in mixers:
                    if what == "half later":
                        mixer.linear.half()  # type: ignore[union-attr,operator]
                    else:
                        fully_shard(mixer.linear, mesh=init_device_mesh("cpu", (2,)))  # type: ignore[arg-type]
                pipe.step(*batch())
            case "one name":
                stretto.Pipeline(pair, **given, tied=[("0.weight",)])
            case "two ties of one":
                twins = [Twin().double(), Twin().double()]
                ties = [("0.a.weight", "1.a.weight"), ("0.b.weight", "1.b.weight")]
                stretto.Pipeline(lambda k: twins[k], layer_count=2, **given, tied=ties)
            case "a hook that raises":
                pipe = stretto.Pipeline(mixers, **given)

                def raising(_: Tensor) -> None:
                    raise KeyError("hook")

                if rank == 0:
                    mixers[0].linear.weight.register_hook(raising)  # type: ignore[union-attr,operator]
                try:
                    pipe.step(*batch())
                except KeyError:
                    return "its own"
                pipe.step(*batch())
            case "a loss that trains, twice":
                scale = nn.Parameter(torch.ones((), dtype=torch.float64))
                loss = lambda output, target: mean(output * scale, target)  # noqa: E731
                stretto.Pipeline(layers(4), **{**given, "plan": plan_of("dualpipe"), "loss": loss}).step(*batch())
            case "another rank's weight in the loss":
                loss = lambda output, target: mean(output @ mixers[0].linear.weight, target)  # type: ignore[union-attr,operator]  # noqa: E731
                stretto.Pipeline(mixers, **{**given, "loss": loss}).step(*batch())
    except (stretto.PipelineError, RuntimeError) as error:
        return str(error)
    return ""


# Inputs, and what the loss has of its own.


class Tempered(nn.Module):
    """A loss with a parameter, which also differentiates its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64, device=DEVICE))

    def forward(self, output: Tensor, target: Tensor) -> Any:
        off = (output * self.scale - target).square()
        return off.sum(), off[..., 0].numel() + target.numel()


def of_inputs_and_loss(mesh: DeviceMesh, schedule: str) -> list[str]:
    """What differs for inputs, targets and a loss's parameter, which get theirs added, as in PyTorch."""
    plan = plan_of(schedule, mesh.size())
    losses, results = [Tempered(), Tempered()], []
    seen: list[list[Tensor]] = [[], []]
    for loss, told in zip(losses, seen, strict=True):
        loss.scale.register_hook(lambda grad, told=told: told.append(grad.clone()))
    pipe = stretto.Pipeline(layers(plan.stages), plan=plan, loss=losses[0], mesh=mesh, timeout=30)
    model = nn.Sequential(*layers(plan.stages))
    before = nn.Linear(WIDTH, WIDTH).to(DEVICE, torch.float64)
    for run in range(2):
        before.zero_grad()
        x, y = (part.requires_grad_() for part in batch())
        for _ in range(2):
            made = before(x) * 2  # a graph before the pipeline's, with tensors saved in it
            if run == 0:
                pipe.step(made, y)
            else:
                model.zero_grad()
                output = model(made)
                total, count = losses[1](output, y)
                (total / count).backward()
        results.append([x.grad, y.grad, losses[run].scale.grad, before.weight.grad])
    wrong = differing(pipe, model)
    first, last = 0 in pipe._stages, plan.stages - 1 in pipe._stages
    here = {"x": first, "y": last, "scale": last, "before": first}
    for (name, trained), mine, theirs in zip(here.items(), *results, strict=True):
        if not (same(mine, theirs) if trained else mine is None):
            wrong.append(name)
    if last and not all(map(same, *seen)):
        wrong.append("what the hook saw")
    return wrong


# Kinds of sums.


def kinds(mesh: DeviceMesh, kind: str, schedule: str) -> dict[str, Any]:
    """bfloat16 gradients of a kind, against float32 ones: their relative errors, and what they are."""
    plan = plan_of(schedule, mesh.size())
    pipe = stretto.Pipeline(
        layers(plan.stages, dtype=torch.bfloat16), plan=plan, loss=mean, mesh=mesh, gradients=kind, timeout=30
    )
    model = nn.Sequential(*layers(plan.stages, dtype=torch.bfloat16)).float()
    x, y = (part.bfloat16() for part in batch(4))
    pipe.step(x, y)
    mean(model(x.float()), y.float()).backward()
    of = {name: p.grad for name, p in model.named_parameters()}
    found = pipe.main_grads() if kind == "float32" else {name: p.grad for name, p in pipe.named_parameters()}
    errors = [
        float((grad.float() - of[name]).norm() / of[name].norm())  # type: ignore[operator,union-attr]
        for name, grad in found.items()
        if grad is not None
    ]
    return {
        "worst": max(errors),
        "types": {grad.dtype for grad in found.values() if grad is not None},
        "unused": {name.split(".", 1)[1] for name, grad in found.items() if grad is None},
        "grads": sum(p.grad is not None for p in pipe.parameters()),
    }


def drift(mesh: DeviceMesh, kind: str, calls: int) -> float:
    """How far many accumulated steps are off from as many times one, relative to it."""
    plan = plan_of("one_f_one_b", mesh.size())
    pipe = stretto.Pipeline(
        layers(plan.stages, dtype=torch.bfloat16), plan=plan, loss=mean, mesh=mesh, gradients=kind, timeout=30
    )
    x, y = (part.bfloat16() for part in batch())

    def found() -> dict[str, Tensor]:
        of = pipe.main_grads() if kind == "float32" else {name: p.grad for name, p in pipe.named_parameters()}
        return {name: grad.double().clone() for name, grad in of.items() if grad is not None}

    pipe.step(x, y)
    exact = stretto.Pipeline(
        layers(plan.stages, dtype=torch.bfloat16), plan=plan, loss=mean, mesh=mesh, gradients="float32", timeout=30
    )
    exact.step(x, y)
    expected = {name: grad.double() * calls for name, grad in exact.main_grads().items() if grad is not None}
    for _ in range(calls - 1):
        pipe.step(x, y, accumulate=True)
    return max(float((grad - expected[name]).norm() / expected[name].norm()) for name, grad in found().items())


def held(mesh: DeviceMesh, dtype: str, how: str) -> list[str]:
    """What the user still holds is not written to, and what was done to `.grad` between steps counts."""
    kind = getattr(torch, dtype)
    plan = plan_of("zb_h1", mesh.size())
    pipe = stretto.Pipeline(layers(plan.stages, dtype=kind), plan=plan, loss=mean, mesh=mesh, timeout=30)
    x, y = (part.to(kind) for part in batch())
    pipe.step(x, y)
    first = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    copies = {name: grad.clone() for name, grad in first.items()}
    expected: dict[str, Tensor | float] = dict.fromkeys(first, 0.0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
    match how:
        case "replaced":
            pipe.step(x * 2, y)
        case "none":
            optimizer.zero_grad(set_to_none=True)
            pipe.step(x * 2, y, accumulate=True)
        case "zeroed":
            first = {}
            optimizer.zero_grad(set_to_none=False)
            pipe.step(x * 2, y, accumulate=True)
        case "halved":
            expected = {name: grad.clone() / 2 for name, grad in first.items()}
            first = {}
            for p in pipe.parameters():
                if p.grad is not None:
                    p.grad.data.mul_(0.5)  # which has no new version
            pipe.step(x * 2, y, accumulate=True)
        case "assigned":
            for p in pipe.parameters():
                p.grad = torch.full_like(p, 0.25)
            expected = dict.fromkeys(copies, 0.25)
            pipe.step(x * 2, y, accumulate=True)
            lone = [p.grad for name, p in pipe.named_parameters() if name not in copies]
            if not all(grad is not None and bool((grad == 0.25).all()) for grad in lone):
                return ["what has no gradient in a step keeps the one it was given"]
    wrong = [f"{name} was overwritten" for name, grad in first.items() if not torch.equal(grad, copies[name])]
    second = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None and name in copies}
    pipe.step(x * 2, y)
    bound = 1e-12 if kind == torch.float64 else 2e-2
    for name, p in pipe.named_parameters():
        if name in second and p.grad is not None:
            total = p.grad.double() + torch.as_tensor(expected[name]).double()
            if not same(second[name].double(), total, bound):
                wrong.append(name)
    return wrong


def masters(mesh: DeviceMesh, schedule: str) -> list[str]:
    """Training with master weights, as docs/training.md has it: whether the loss falls, and all parameters move."""
    plan = plan_of(schedule, mesh.size())
    pipe = stretto.Pipeline(
        layers(plan.stages, dtype=torch.bfloat16),
        plan=plan,
        loss=mean,
        mesh=mesh,
        tied=[("0.linear.weight", f"{max(plan.stages, 2) - 1}.linear.weight")],
        gradients="float32",
        timeout=30,
    )
    start = {name: p.detach().clone() for name, p in pipe.named_parameters(remove_duplicate=False)}
    master = {name: p.detach().float().requires_grad_() for name, p in pipe.named_parameters()}
    optimizer = torch.optim.AdamW(master.values(), lr=1e-2)
    losses = []
    for _ in range(20):
        x, y = (part.bfloat16() for part in batch(2))
        losses.append(pipe.step(x, y).loss)
        for name, grad in pipe.main_grads().items():
            master[name].grad = grad
        optimizer.step()
        with torch.no_grad():
            for name, p in pipe.named_parameters():
                p.copy_(master[name])
    wrong = [] if losses[-1] < 0.7 * losses[0] else [f"loss {losses[0]} -> {losses[-1]}"]
    for name, p in pipe.named_parameters(remove_duplicate=False):
        if torch.equal(p, start[name]) != ("unused" in name or "lone" in name):
            wrong.append(f"{name} has not moved, or should not have")
    return wrong + [name for name, p in pipe.named_parameters() if p.grad is not None]


# Data and tensor parallelism.


def data_parallel(mesh: DeviceMesh, schedule: str) -> list[str]:
    """Two pipelines side by side, each with half of the rows; gradients averaged as docs/training.md shows."""
    del mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    plan = plan_of(schedule)
    pipe = stretto.Pipeline(layers(plan.stages), plan=plan, loss=mean, mesh=mesh["pp"], timeout=30)
    x, y = batch(2)
    mine = slice(mesh["dp"].get_local_rank() * MICROBATCHES, (mesh["dp"].get_local_rank() + 1) * MICROBATCHES)
    pipe.step(x[mine], y[mine])
    average_gradients(pipe, mesh["dp"])
    model = nn.Sequential(*layers(plan.stages))
    mean(model(x), y).backward()
    return differing(pipe, model)


def average_gradients(pipe: stretto.Pipeline, dp: DeviceMesh) -> None:
    """The recipe of docs/training.md."""
    for parameter in pipe.parameters():
        used = torch.tensor(float(parameter.grad is not None), device=parameter.device)
        dist.all_reduce(used, group=dp.get_group())
        if used:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad, group=dp.get_group())
            parameter.grad /= dp.size()


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def tensor_parallel(mesh: DeviceMesh, schedule: str) -> list[str]:
    """Two stages, each of two tensor-parallel ranks: gradients are DTensors, and right."""
    del mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def plain(number: int) -> nn.Module:
        torch.manual_seed(number)
        return Parallel().double()

    def build(number: int) -> nn.Module:
        return parallelize_module(plain(number), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    plan = plan_of(schedule)
    pipe = stretto.Pipeline(build, layer_count=plan.stages, plan=plan, loss=mean, mesh=mesh["pp"], timeout=30)
    model = nn.Sequential(*map(plain, range(plan.stages)))
    x, y = batch()
    for k in range(2):
        pipe.step(x, y, accumulate=k > 0)
        mean(model(x), y).backward()
    of = dict(model.named_parameters())
    return [
        name
        for name, p in pipe.named_parameters()
        if not same(p.grad.full_tensor(), of[name].grad)  # type: ignore[union-attr]
    ]


def half_used(mesh: DeviceMesh) -> list[str]:
    """Experts of which some see only the microbatches of one direction, and one sees none."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.experts[int(x[0, 0, 0] > 0)](x)  # type: ignore[no-any-return]

    def made() -> Layers:
        torch.manual_seed(1)
        return [Chosen().to(DEVICE, torch.float64) for _ in range(2)]

    pipe = stretto.Pipeline(made(), plan=plan_of("dualpipe"), loss=mean, mesh=mesh, timeout=30)
    x, y = batch()
    x[:, 0, 0] = 40.0 * torch.tensor([1, 1, 1, -1, -1, -1], device=DEVICE)
    pipe.step(x, y)
    model = nn.Sequential(*made())
    sum(mean(model(a), b) / MICROBATCHES for a, b in zip(x.split(1), y.split(1), strict=True)).backward()  # type: ignore[union-attr]
    return differing(pipe, model)


class Gated(nn.Module):
    """In phases, with parameters that phases of both lanes use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def phases(self) -> list[tuple[stretto.Phase, Callable[[Tensor], Tensor]]]:
        return [
            (stretto.Phase("attn"), lambda x: x + torch.tanh(self.linear(x)) * self.gate),
            (stretto.Phase("dispatch", "comm"), lambda x: x.flip(1) * self.gate + x @ self.linear.weight),
            (stretto.Phase("mlp"), lambda x: x + torch.tanh(self.linear(x) * self.gate)),
            (stretto.Phase("combine", "comm"), lambda x: x * self.gate.sin() + self.linear(x)),
        ]

    def forward(self, x: Tensor) -> Tensor:
        for _, phase in self.phases():
            x = phase(x)
        return x


def on_two_lanes(mesh: DeviceMesh, schedule: str) -> list[str]:
    """What differs where compute and communication lanes add to the same sums."""

    def made() -> Layers:
        torch.manual_seed(1)
        return [Gated().to(DEVICE, torch.float64) for _ in range(4)]

    pipe = stretto.Pipeline(made(), plan=plan_of(schedule, mesh.size()), loss=mean, mesh=mesh, timeout=30)
    model, wrong = nn.Sequential(*made()), []
    for step in range(3):
        x, y = batch()
        pipe.step(x + step, y)
        model.zero_grad()
        mean(model(x + step), y).backward()  # type: ignore[no-untyped-call]
        wrong += [f"step {step}: {name}" for name in differing(pipe, model)]
    return wrong


def after_failures(mesh: DeviceMesh, kind: str) -> list[str]:
    """A loss that is not finite, and a hook that raises, leave gradients and hooks as they were."""
    factors: list[float] = []
    plan = plan_of("one_f_one_b", mesh.size())
    pipe = stretto.Pipeline(
        layers(plan.stages, dtype=torch.bfloat16),
        plan=plan,
        loss=lambda output, target: mean(output, target) * (factors.pop() if factors else 1.0),
        mesh=mesh,
        gradients=kind,  # type: ignore[arg-type]
        timeout=30,
    )
    x, y = (part.bfloat16() for part in batch())
    weight = next(p for name, p in pipe.named_parameters() if name.endswith("linear.weight"))
    raises, calls, wrong = [False], list[int](), list[str]()

    def hook(_: Tensor) -> None:
        calls.append(1)
        if raises[0]:
            raise KeyError("hook")

    weight.register_hook(hook)

    def grads() -> list[Tensor | None]:
        return list(pipe.main_grads().values()) if kind == "float32" else [p.grad for p in pipe.parameters()]

    pipe.step(x, y)
    before = grads()
    first = [None if grad is None else grad.double() for grad in before]
    for accumulate in (False, True):
        factors[:] = [float("nan")] * MICROBATCHES
        try:
            pipe.step(x, y, accumulate=accumulate)
            wrong.append("no error")
        except stretto.PipelineError as error:
            if "not finite" not in str(error) and "overwritten" not in str(error):
                wrong.append(str(error))
        if kind != "float32" and any(a is not b for a, b in zip(before, grads(), strict=True)):
            wrong.append("gradients are others")
        if kind == "float32":
            wrong += _lost(pipe)
            pipe.step(x, y)
            sums = [None if grad is None else grad.clone() for grad in grads()]
            factors[:] = [float("nan")] * MICROBATCHES
            with contextlib.suppress(stretto.PipelineError):
                pipe.step(x, y, accumulate=True)
            if not all(map(same, grads(), sums)):
                wrong.append("sums that a bad step was to be added to")
            pipe.step(x, y, accumulate=True)
            twice = [None if grad is None else 2 * grad for grad in sums]
            return wrong if all(map(same, grads(), twice, [1e-6] * len(sums))) else [*wrong, "twice"]
    pipe.step(x, y, accumulate=True)
    for grad, once in zip(grads(), first, strict=True):
        if not same(None if grad is None else grad.double(), None if once is None else 2 * once, 0.02):
            wrong.append("sums")
    before, raises[0] = grads(), True
    try:
        pipe.step(x, y)
        wrong.append("no error of the hook")
    except (KeyError, stretto.PipelineError):  # its own, or the other rank's
        pass
    if any(a is not b for a, b in zip(before, grads(), strict=True)):
        wrong.append("gradients are others after the hook")
    return wrong if 2 <= len(calls) <= 3 else [*wrong, f"{len(calls)} calls"]


def _lost(pipe: stretto.Pipeline) -> list[str]:
    try:
        pipe.main_grads()
    except stretto.PipelineError as error:
        return [] if "a step that failed has overwritten the gradients" in str(error) else [str(error)]
    return ["main gradients of a step that failed"]


def tied_twins(mesh: DeviceMesh, schedule: str, names: tuple[str, str]) -> list[str]:
    """What differs where parameters that are tied over ranks are shared within their layers too."""
    plan = plan_of(schedule, mesh.size())
    count = max(plan.stages, 3)

    def build(number: int) -> nn.Module:
        torch.manual_seed(number)
        return (Twin() if number in (0, count - 1) else nn.Linear(WIDTH, WIDTH)).to(DEVICE, torch.float64)

    tied = [(names[0], f"{count - 1}.{names[1]}")]
    pipe = stretto.Pipeline(build, layer_count=count, plan=plan, loss=mean, mesh=mesh, tied=tied, timeout=30)
    model = nn.Sequential(*map(build, range(count)))
    last: Any = model[-1]
    last.a.weight = last.b.weight = model[0].a.weight  # type: ignore[union-attr]
    x, y = batch()
    pipe.step(x, y)
    mean(model(x), y).backward()
    return differing(pipe, model)


def through_inputs(mesh: DeviceMesh, kind: str) -> list[str]:
    """What differs where the graph behind the inputs leads to a parameter of the pipeline, and that behind the targets
    to one that is not; hooks run once.
    """
    plan = plan_of("one_f_one_b", mesh.size())
    given, other = layers(plan.stages), layers(plan.stages)
    calls: list[list[Tensor]] = [[], []]
    for made, told in zip((given, other), calls, strict=True):
        made[0].linear.weight.register_hook(lambda grad, told=told: told.append(grad.clone()))  # type: ignore[union-attr,operator]
    pipe = stretto.Pipeline(given, plan=plan, loss=counted, mesh=mesh, gradients=kind, timeout=30)  # type: ignore[arg-type]
    teachers = [nn.Linear(WIDTH, WIDTH).to(DEVICE, torch.float64) for _ in range(2)]
    teachers[1].load_state_dict(teachers[0].state_dict())
    x, y = batch()
    retained = []
    if 0 in pipe._stages:
        pipe.step(x @ given[0].linear.weight, y)  # type: ignore[union-attr,operator]
    else:
        retained.append(torch.tanh(checkpoint(teachers[0], y.clone().requires_grad_(), use_reentrant=True)))
        retained[0].retain_grad()
        pipe.step(None, retained[0])
    wanted = torch.tanh(teachers[1](y))
    wanted.retain_grad()
    model = nn.Sequential(*other)
    whole(counted, model(x @ other[0].linear.weight), wanted).backward()  # type: ignore[union-attr,operator,no-untyped-call]
    of = dict(model.named_parameters())
    found = pipe.main_grads() if kind == "float32" else {name: p.grad for name, p in pipe.named_parameters()}
    wrong = [name for name, grad in found.items() if not same(grad, of[name].grad)]
    if 0 in pipe._stages and not (len(calls[0]) == len(calls[1]) == 1 and same(calls[0][0], calls[1][0])):
        wrong.append(f"{len(calls[0])} calls")
    if plan.stages - 1 in pipe._stages and not same(teachers[0].weight.grad, teachers[1].weight.grad):
        wrong.append("what is behind the targets")
    wrong += ["the targets" for target in retained if not same(target.grad, wanted.grad)]
    return wrong


def frozen_for_a_while(mesh: DeviceMesh, kind: str) -> list[str]:
    """What differs where a parameter is frozen for one of three accumulated steps."""
    plan = plan_of("one_f_one_b", mesh.size())
    given, model = layers(plan.stages), nn.Sequential(*layers(plan.stages))
    pipe = stretto.Pipeline(given, plan=plan, loss=mean, mesh=mesh, gradients=kind, timeout=30)  # type: ignore[arg-type]
    for step in range(3):
        for mixer in (*given, *model):
            mixer.linear.requires_grad_(step != 1)  # type: ignore[union-attr,operator]
        x, y = batch()
        pipe.step(x + step, y, accumulate=step > 0)
        mean(model(x + step), y).backward()
    of = dict(model.named_parameters())
    found = pipe.main_grads() if kind == "float32" else {name: p.grad for name, p in pipe.named_parameters()}
    return [name for name, grad in found.items() if not same(grad, of[name].grad)]


def several_at_once(mesh: DeviceMesh) -> list[Any]:
    """What a hook on several parameters is called with."""
    plan = plan_of("zb_h1", mesh.size())
    pipe = stretto.Pipeline(layers(plan.stages), plan=plan, loss=mean, mesh=mesh, timeout=30)
    calls: list[list[bool]] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(pipe.parameters()), lambda grads: calls.append([grad is not None for grad in grads])
    )
    for _ in range(2):
        pipe.step(*batch())
    used = [parameter.grad is not None for parameter in pipe.parameters()]
    return [] if calls == [used, used] else calls


def lazy(mesh: DeviceMesh) -> list[str]:
    """What differs where parameters are made by the first forward."""
    plan = plan_of("one_f_one_b", mesh.size())

    def made() -> Layers:
        torch.manual_seed(1)
        return [nn.LazyLinear(WIDTH, dtype=torch.float64, device=DEVICE) for _ in range(2)]

    pipe = stretto.Pipeline(made(), plan=plan, loss=mean, mesh=mesh, timeout=30)
    model, wrong = nn.Sequential(*made()), []
    x, y = batch()
    model(x)
    pipe.eval_step(x, y)
    pipe.load_state_dict(model.state_dict())
    for _ in range(2):
        pipe.step(x, y)
        model.zero_grad()
        mean(model(x), y).backward()
        wrong += differing(pipe, model)
    fresh = stretto.Pipeline(made(), plan=plan, loss=mean, mesh=mesh, timeout=30)
    fresh.step(x, y)
    return wrong + [name for name, p in fresh.named_parameters() if p.grad is None]


def one_graph(mesh: DeviceMesh) -> list[str]:
    """What differs where one graph is behind inputs and targets, of which a rank has both; in bfloat16 too."""
    plan = plan_of("zb_v", mesh.size())
    pipe = stretto.Pipeline(layers(plan.stages), plan=plan, loss=counted, mesh=mesh, timeout=30)
    model = nn.Sequential(*layers(plan.stages))
    encoders = [nn.Linear(WIDTH, WIDTH).to(DEVICE, torch.float64) for _ in range(2)]
    encoders[1].load_state_dict(encoders[0].state_dict())
    x, _ = batch()
    z = torch.tanh(encoders[0](x))
    pipe.step(z, z)
    other = torch.tanh(encoders[1](x))
    whole(counted, model(other), other).backward()  # type: ignore[no-untyped-call]
    wrong = differing(pipe, model)
    if 0 in pipe._stages and not same(encoders[0].weight.grad, encoders[1].weight.grad):
        wrong.append("the encoder")
    return wrong


def one_module(mesh: DeviceMesh) -> list[str]:
    """What differs where all stages of a DualPipe share a module, and a layer differentiates in its forward."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return x
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.linear(at)).sum(), at, create_graph=True)
            return x + slope

    def made() -> Layers:
        torch.manual_seed(1)
        slope, line = Slope().to(DEVICE, torch.float64), nn.Linear(WIDTH, WIDTH).to(DEVICE, torch.float64)
        return [line, slope, line, line]

    pipe = stretto.Pipeline(made(), plan=plan_of("dualpipe"), loss=mean, mesh=mesh, timeout=30)
    model = nn.Sequential(*made())
    x, y = batch()
    pipe.step(x, y)
    mean(model(x), y).backward()
    return differing(pipe, model)


def kept_main_grads(mesh: DeviceMesh, how: str) -> list[str]:
    """Main gradients after steps that fail with `accumulate`: as before, or an error."""
    plan = plan_of("one_f_one_b", mesh.size())
    factors: list[float] = []
    given = layers(plan.stages)
    pipe = stretto.Pipeline(
        given,
        plan=plan,
        loss=lambda output, target: mean(output, target) * (factors.pop() if factors else 1.0),
        mesh=mesh,
        gradients="float32",
        timeout=30,
    )
    pipe.step(*batch())
    sums = {name: None if grad is None else grad.clone() for name, grad in pipe.main_grads().items()}
    if how == "hook":

        def raising(_: Tensor) -> None:
            raise KeyError("hook")

        for mixer in given:
            mixer.linear.weight.register_hook(raising)  # type: ignore[union-attr,operator]
        with contextlib.suppress(KeyError, stretto.PipelineError):
            pipe.step(*batch(), accumulate=True)
        found = pipe.main_grads()
        return [name for name, grad in sums.items() if not same(found[name], grad)]
    for mixer in given:
        mixer.linear.requires_grad_(False)  # type: ignore[union-attr,operator]
    factors[:] = [float("nan")] * MICROBATCHES
    with contextlib.suppress(stretto.PipelineError):
        pipe.step(*batch(), accumulate=True)
    factors.clear()
    for mixer in given:
        mixer.linear.requires_grad_(True)  # type: ignore[union-attr,operator]
    found = pipe.main_grads()
    wrong = [f"{name} at once" for name, grad in sums.items() if not same(found[name], grad)]
    pipe.step(*batch(), accumulate=True)
    found = pipe.main_grads()
    return wrong + [name for name, grad in sums.items() if not same(found[name], None if grad is None else 2 * grad)]
