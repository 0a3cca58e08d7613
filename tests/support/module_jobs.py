"""What ranks do to find out whether modules are still the user's: copies, pickles, modes, second pipelines."""

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from grammar import ROWS, WIDTH, Model, Statistics
from stretto.schedules import dualpipe, zb_h1

MODEL = Model("zb_h1", 2, 4, (("Piece", "tensor"), ("Attention", "tensor"), ("Statistics", "tensor")))


def pipeline(mesh: Any, layers: Any, **more: Any) -> stretto.Pipeline:
    given = {"plan": MODEL.plan(), "loss": MODEL.loss_of, "mesh": mesh, **more}
    return stretto.Pipeline(layers, **given)


def copies(mesh: Any, how: str, when: str) -> list[str]:
    """The layers of which a copy, made that way at that time, does not compute with its own weights."""
    layers = MODEL.layers()
    pipe = pipeline(mesh, layers)
    made: dict[str, nn.Module] = {}

    def take(*_: Any) -> None:
        for name, module in pipe.named_modules():
            if isinstance(module, nn.Linear) and name not in made and type(module) is nn.Linear:
                made[name] = copied(module, how)

    if when == "in a step":
        layers[0].register_forward_hook(take)
        layers[-1].register_forward_hook(take)
    pipe.step(*MODEL.batch())
    if when == "after close":
        pipe.close()
    take()
    wrong = []
    x = torch.randn(2, 3, WIDTH).double()
    for name, module in made.items():
        with torch.no_grad():
            module.weight.zero_()  # type: ignore[operator,union-attr]
            module.bias.fill_(2.0)  # type: ignore[operator,union-attr]
        out = module(x)
        out.sum().backward()
        if not torch.equal(out, torch.full_like(out, 2.0)) or module.weight.grad is None:  # type: ignore[union-attr]
            wrong.append(name)
    if not made or any("forward" in vars(module) for module in pipe.modules()):
        wrong.append("the pipeline's own")
    return wrong


def copied(module: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def put_off_twice(mesh: Any) -> list[int]:
    """How many weight gradients two pipelines over the same layers put off in a step, one after the other."""
    layers = MODEL.layers()
    found = []
    for pipe in (pipeline(mesh, layers), pipeline(mesh, layers)):
        count = 0
        for stage in pipe._stages.values():
            usual = stage.deferral.defer

            def counting(*given: Any, usual: Any = usual) -> None:
                nonlocal count
                count += 1
                usual(*given)

            stage.deferral.defer = counting  # type: ignore[method-assign]
        pipe.step(*MODEL.batch())
        found.append(count)
    return found


def modes(mesh: Any, *, built: bool) -> dict[str, Any]:
    """What train() and eval() do to layers, and eval_step to modes, statistics and dropout."""
    layers = MODEL.layers()
    pipe = pipeline(mesh, layers.__getitem__, layer_count=len(layers)) if built else pipeline(mesh, layers)
    mine = list(pipe.modules())
    frozen = next((module for module in mine if isinstance(module, nn.BatchNorm1d | nn.Embedding)), None)
    if frozen is not None:
        frozen.eval()
    before = [module.training for module in mine]
    statistics = {name: buffer.clone() for name, buffer in pipe._module.named_buffers()}
    losses = {pipe.eval_step(*MODEL.batch()).loss for _ in range(2)}
    kept = all(torch.equal(buffer, statistics[name]) for name, buffer in pipe._module.named_buffers())
    same = [module.training for module in mine] == before
    returned = pipe.eval()
    off = [module.training for module in mine]
    again = pipe.eval_step(*MODEL.batch()).loss
    on = [module.training for module in pipe.train().modules()]
    return {
        "names": [name for name, _ in pipe.named_modules()],
        "losses": losses | {again},
        "kept": kept,
        "same": same,
        "returned": returned is pipe,
        "off": any(off),
        "on": all(on),
        "training": pipe.training,
        "repr": repr(pipe),
    }


def start_equal(mesh: Any) -> list[dict[str, Tensor]]:
    """The buffers of a rank whose layers were made with other ones, before and after a pipeline took them."""
    model = Model("dualpipe", 2, 4, ())
    torch.manual_seed(mesh.get_local_rank())

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH).double()
            self.register_buffer("random", torch.randn(3))
            self.register_buffer("spread", torch.randn(1).expand(2, 2))
            self.register_buffer("flags", torch.rand(4) > 0.5, persistent=False)
            self.register_buffer("turned", torch.randn(2, 3, dtype=torch.complex64).t())
            self.register_buffer("nothing", None)

    layers = [Odd(), Odd()]
    before = {name: buffer.clone() for name, buffer in nn.Sequential(*layers).named_buffers()}
    pipe = stretto.Pipeline(layers, plan=model.plan(), loss=model.loss_of, mesh=mesh)
    return [before, {name: buffer.clone() for name, buffer in pipe._module.named_buffers()}]


def across_types(mesh: Any) -> tuple[list[float], list[float]]:
    """Losses of steps and evaluations in turns, some under autocast, and what they would be in one process."""
    model = Model("one_f_one_b", 2, 4, (("Residual", "tensor"),))
    layers = [layer.float() for layer in model.layers()]
    inputs, targets = model.batch()
    targets = targets.float()
    pipe = stretto.Pipeline(layers, plan=model.plan(), loss=model.loss_of, mesh=mesh)
    whole, found, expected = nn.Sequential(*[layer.float() for layer in model.layers()]), [], []
    for half, training in ((False, True), (True, False), (False, False), (True, True), (False, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found.append((pipe.step if training else pipe.eval_step)(inputs, targets).loss)
            rows = zip(inputs.split(ROWS), targets.split(ROWS), strict=True)
            expected.append(sum(float(model.loss_of(whole(x), y).detach()) for x, y in rows) / model.microbatches)
    return found, expected


def autocast_island(mesh: Any) -> list[bool]:
    """Whether gradients under autocast are those of plain autograd, those of a layer in float32 as in float32."""

    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.more = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.linear(x.float()) @ self.more

    def layers() -> list[nn.Module]:
        torch.manual_seed(1)
        return [nn.Linear(WIDTH, WIDTH), Island(), nn.Linear(WIDTH, WIDTH)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.float() - target).square().mean()

    torch.manual_seed(2)
    inputs, targets = torch.randn(2, 2, 8, WIDTH)
    plan = zb_h1(devices=2, microbatches=2)
    pipe = stretto.Pipeline(layers(), plan=plan, loss=loss, mesh=mesh, balance=[2, 1])
    whole = nn.Sequential(*layers())
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(list(inputs), list(targets))
        losses = [loss(whole(x), y) / 2 for x, y in zip(inputs, targets, strict=True)]
    for made in losses:
        made.backward()  # type: ignore[no-untyped-call]
    expected = dict(whole.named_parameters())
    return [
        torch.allclose(p.grad, expected[name].grad, rtol=(bound := 1e-5 if name.startswith("1.") else 0.02), atol=bound)  # type: ignore[arg-type]
        for name, p in pipe.named_parameters()
    ]


def statistics_on_two_devices(mesh: Any, when: str) -> str:
    model = Model("dualpipe", 2, 4, (("Statistics", "tensor"),))
    layers = model.layers()
    assert isinstance(layers[1], Statistics)
    try:
        if when == "when it is made":
            stretto.Pipeline(layers, plan=model.plan(), loss=model.loss_of, mesh=mesh)
        layers[1].eval()
        pipe = stretto.Pipeline(layers, plan=model.plan(), loss=model.loss_of, mesh=mesh)
        pipe.step(*model.batch())
        if when == "in a step":
            pipe.train().step(*model.batch())
    except stretto.PipelineError as error:
        return str(error)
    return ""


def kept_after_a_bad_loss(mesh: Any) -> list[bool]:
    """Whether parameters have the very gradients of the step before after a loss that is not finite."""
    factors = iter([1.0] * 4 + [float("inf")] * 4)
    pipe = pipeline(mesh, MODEL.layers(), loss=lambda out, y: MODEL.loss_of(out, y) * next(factors))
    pipe.step(*MODEL.batch())
    before = [parameter.grad for parameter in pipe.parameters()]
    try:
        pipe.step(*MODEL.batch())
    except stretto.PipelineError:
        return [parameter.grad is grad for parameter, grad in zip(pipe.parameters(), before, strict=True)]
    return [False]


def frozen_between_steps(mesh: Any) -> list[bool]:
    """Whether parameters that were frozen after a step have no gradient after the next one."""
    pipe = pipeline(mesh, MODEL.layers())
    pipe.step(*MODEL.batch())
    weights = [module.weight for module in pipe.modules() if isinstance(module, nn.Linear)]
    for weight in weights[:1]:
        weight.requires_grad_(False)
    pipe.step(*MODEL.batch())
    return [weight.grad is None for weight in weights[:1]]


def on_two_devices(mesh: Any, what: str) -> str:
    """What is said of a layer whose copies would drift apart."""
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    if what == "max_norm":
        layers[0] = nn.Embedding(9, WIDTH, max_norm=1.0)
    elif what == "frozen":
        layers[0].requires_grad_(mesh.get_local_rank() == 0)
    plan = dualpipe(devices=2, microbatches=4)
    try:
        pipe = stretto.Pipeline(layers, plan=plan, loss=lambda out, y: (out - y).square().mean(), mesh=mesh, timeout=20)
        if what == "replaced":
            layers[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        pipe.step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    except stretto.PipelineError as error:
        return str(error)
    return ""
