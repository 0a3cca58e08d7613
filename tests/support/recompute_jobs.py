"""Layers that a recomputation could get wrong, and what ranks find out about them."""

import functools
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import odd_sites
import stretto
from devices import DEVICE
from site_layers import RUNS, WIDTH, Layer, Site
from strategies import SCHEDULES
from stretto.pipeline.recompute import Run
from stretto.pipeline.storages import WeakStorage


def _plain(me: Site, x: Tensor, *_: Any) -> Tensor:
    return torch.tanh(me.linear(x))


def _applies(me: Site, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.tanh(function(me.linear(x)))


class Counter(nn.Module):
    """Multiplies by how often it has run."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class CallableCounter:
    count = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


@dataclass(frozen=True)
class Box:
    tensor: Tensor


@dataclass(frozen=True)
class Listed:
    tensors: list[Tensor]


def _twice(function: Callable[[Layer], Any]) -> Callable[[Layer, Tensor], Tensor]:
    """Give the site something, and the second time again."""
    return lambda me, x: me.site(me.site(x, function(me)), function(me))


def _boxed(me: Layer, x: Tensor) -> Tensor:
    h = x.detach() * 2
    out: Tensor = me.site(x, Box(h))
    h.add_(1)
    return out


def _of_box(me: Site, x: Tensor, box: Box) -> Tensor:
    return torch.tanh(me.linear(x) * box.tensor.clone())


def _functional(me: Layer, x: Tensor) -> Tensor:
    weight = me.weights(x.mean(0)).view(WIDTH, WIDTH)
    return torch.func.functional_call(me.site, {"linear.weight": weight}, (x,))  # type: ignore[no-any-return]


def _signs(me: Site, x: Tensor) -> Tensor:
    weight, real = me.linear.weight, me.linear.weight.data
    weight.data = real.sign()
    out = torch.tanh(me.linear(x))
    weight.data = real
    return out


def _signs_around(me: Layer, x: Tensor) -> Tensor:
    weight, real = me.site.linear.weight, me.site.linear.weight.data
    weight.data = real.sign()
    out: Tensor = me.site(x)
    weight.data = real
    return out


def _frozen(me: Site, x: Tensor) -> Tensor:
    me.linear.requires_grad_(False)
    out = torch.tanh(me.linear(x) * me.scale(x))
    me.linear.requires_grad_(True)
    return out


def _default_dtype(me: Site, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    out = torch.tanh(me.linear(x) * torch.rand(WIDTH, device=DEVICE).float())
    torch.set_default_dtype(torch.float32)
    return out


def _dtype_around(me: Layer, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.tanh(me.site(x))
    finally:
        torch.set_default_dtype(torch.float32)


def _random(me: Site, x: Tensor) -> Tensor:
    return me.linear(x) * torch.rand(WIDTH, device=DEVICE).float()  # type: ignore[no-any-return]


def _attends(me: Site, x: Tensor) -> Tensor:
    h = me.linear(x)[None, None]
    return F.scaled_dot_product_attention(h, h, h)[0, 0]


def _attends_within(me: Layer, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return me.site(x)  # type: ignore[no-any-return]


def _autocast(me: Layer, x: Tensor) -> Tensor:
    """Give the site a tensor on the host first."""
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return me.site(torch.arange(len(x)), x)  # type: ignore[no-any-return]


def _positioned(me: Site, positions: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(me.linear(x) * positions.to(x.device)[:, None]).float()


def _catches(me: Site, x: Tensor) -> Tensor:
    try:
        return torch.tanh(me.linear(x))
    except Exception:
        RUNS[0] += 100
        raise


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0]
        y = ctx.saved_tensors[1]
        return grad * y, grad * x


def _reads_twice(me: Site, x: Tensor) -> Tensor:
    return ReadsTwice.apply(me.linear(x), torch.tanh(x))  # type: ignore[no-any-return, no-untyped-call]


def _reentrant(me: Layer, x: Tensor) -> Tensor:
    return checkpoint(me.site, me.before(x), use_reentrant=True)  # type: ignore[no-any-return]


def _second_order(me: Site, x: Tensor) -> Tensor:
    at = x.detach().requires_grad_()
    return torch.autograd.grad(torch.tanh(me.linear(at)).square().sum(), at, create_graph=True)[0]


def _inference(me: Layer, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = x * 2
    out, _ = me.site(x, h)
    return out * 2  # type: ignore[no-any-return]


def _with_index(me: Site, x: Tensor, h: Tensor) -> Any:
    y = torch.tanh(me.linear(x) + h)
    with torch.inference_mode():
        return y, y.argmax(-1)


def _changes_input(me: Layer, x: Tensor) -> Tensor:
    h = x * 2
    out: Tensor = me.site(h)
    h.add_(1)
    return out


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _restrided(me: Layer, x: Tensor) -> Tensor:
    return me.site(me.before(x).as_strided((len(x), 1, 2, WIDTH // 2), (WIDTH, 1, WIDTH // 2, 1)))  # type: ignore[no-any-return]


def _by_stride(me: Site, x: Tensor) -> Tensor:
    """Kernels choose layouts by strides, also by those of dimensions of size 1."""
    return torch.tanh(me.linear(x.flatten(1)) * x.stride(1))


EXACT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a module with buffers": (
        lambda: Layer(_twice(lambda me: me.act), Site(_applies), act=nn.BatchNorm1d(WIDTH)),
        4,
    ),
    "an input with strides of its own": (lambda: Layer(_restrided, Site(_by_stride), before=_linear()), 2),
    "a module with a count": (lambda: Layer(_twice(lambda me: me.act), Site(_applies), act=Counter()), 4),
    "its method": (lambda: Layer(_twice(lambda me: me.act.forward), Site(_applies), act=Counter()), 4),
    "a function of it": (
        lambda: Layer(_twice(lambda me: lambda x: me.act(x)), Site(_applies), act=Counter()),
        4,
    ),
    "a partial of it": (
        lambda: Layer(_twice(lambda me: functools.partial(me.act)), Site(_applies), act=Counter()),
        4,
    ),
    "an activation": (lambda: Layer(_twice(lambda _: nn.SiLU()), Site(_applies)), 4),
    "functions": (lambda: Layer(lambda me, x: me.site(me.site(x, F.gelu), F.silu), Site(_applies)), 4),
    "a partial": (lambda: Layer(_twice(lambda _: functools.partial(F.gelu, approximate="tanh")), Site(_applies)), 4),
    "an operator": (lambda: Layer(_twice(lambda _: torch.ops.aten.relu.default), Site(_applies)), 4),
    "a class": (lambda: Layer(_twice(lambda _: nn.SiLU), Site(_plain)), 4),
    "autocast around": (lambda: Layer(_autocast, Site(_positioned)), 2),
    "weights for a while": (lambda: Layer(lambda me, x: me.site(x), Site(_signs)), 2),
    "frozen for a while": (lambda: Layer(lambda me, x: me.site(x), Site(_frozen, scale=_linear())), 2),
    "default dtype": (lambda: Layer(lambda me, x: me.site(x), Site(_default_dtype)), 2),
    "default dtype around": (lambda: Layer(_dtype_around, Site(_random)), 2),
    "catches exceptions": (lambda: Layer(lambda me, x: me.site(x), Site(_catches)), 2),
    "saved tensors read twice": (lambda: Layer(lambda me, x: me.site(x), Site(_reads_twice)), 2),
    "reentrant checkpoint": (lambda: Layer(_reentrant, Site(_plain), before=_linear()), 2),
    "second order": (lambda: Layer(lambda me, x: me.site(x), Site(_second_order)), 3),
    "inference tensors": (lambda: Layer(_inference, Site(_with_index)), 2),
    **odd_sites.EXACT,
}
"""Layers that are recomputed exactly, and how often their site runs for each microbatch."""

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "functional_call": (
        lambda: Layer(_functional, Site(_plain), weights=nn.Linear(WIDTH, WIDTH**2)),
        "0.site ran with another 'weight' than it has when it is recomputed, as with torch.func.functional_call; "
        "recompute what is around it",
    ),
    "other weights around": (
        lambda: Layer(_signs_around, Site(_plain)),
        "a parameter of 0.site was changed before its backward",
    ),
    "an object": (
        lambda: Layer(_twice(lambda _: CallableCounter()), Site(_applies)),
        "0.site is given a recompute_jobs.CallableCounter, which may be another one when 0.site is recomputed",
    ),
    "its bound method": (
        lambda: Layer(_twice(lambda _: CallableCounter().__call__), Site(_applies)),
        "0.site is given a builtins.method, which may be another one when 0.site is recomputed",
    ),
    "a list in a frozen dataclass": (
        lambda: Layer(_twice(lambda _: Listed([])), Site(_plain)),
        "0.site is given a recompute_jobs.Listed, which may be another one when 0.site is recomputed",
    ),
    "a tensor in a frozen dataclass": (
        lambda: Layer(_boxed, Site(_of_box)),
        "a tensor within what 0.site is given was changed in place before its backward",
    ),
    "another kernel around": (
        lambda: Layer(_attends_within, Site(_attends)),
        "0.site did not save the same tensors when it was recomputed; something around it may decide what it does, "
        "such as sdpa_kernel or parametrize.cached: recompute that with it",
    ),
    "a changed input": (
        lambda: Layer(_changes_input, Site(lambda me, x: torch.tanh(me.linear(x.clone())))),
        "a tensor that the backward needs was changed in place (saved by layer.site)",
    ),
    **odd_sites.REFUSED,
}


class Found(NamedTuple):
    """What two steps have computed, and what they have left."""

    losses: list[float]
    tensors: dict[str, Any]
    """Gradients, parameters and buffers after the steps."""
    runs: int
    """How often the site has run for each microbatch."""
    dtype: torch.dtype


def _pipeline(mesh: DeviceMesh, layer: nn.Module, policy: Any) -> stretto.Pipeline:
    plan = stretto.schedules.gpipe(devices=1, microbatches=2)
    layers = [layer.to(DEVICE)]
    return stretto.Pipeline(layers, plan=plan, loss=lambda out, y: (out - y).square().mean(), mesh=mesh, memory=policy)


def _train(pipe: stretto.Pipeline, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    optimizer, losses = torch.optim.SGD(pipe.parameters(), lr=0.1), []
    for _ in range(steps):
        x, y = (torch.randn(8, WIDTH, generator=generator, dtype=torch.float32) for _ in range(2))
        losses.append(pipe.step(x.to(DEVICE), y.to(DEVICE)).loss)
        optimizer.step()
    return losses


def trained(mesh: DeviceMesh, name: str, policy: Any) -> Found:
    torch.manual_seed(0)
    layer = EXACT[name][0]()
    RUNS[0] = 0
    with_policy = _pipeline(mesh, layer, policy)
    losses = _train(with_policy, 2)
    with_policy.close()
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    tensors |= {f"{key}.grad": it.grad for key, it in layer.named_parameters() if it.grad is not None}
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    odd = (torch.complex32, torch.quint8)  # NumPy has none of them
    arrays = {key: it.detach().cpu().to_dense().numpy() for key, it in tensors.items() if it.dtype not in odd}
    return Found(losses, arrays, RUNS[0] // 4, dtype)


def refused(mesh: DeviceMesh, name: str, policy: Any) -> str:
    pipe = _pipeline(mesh, REFUSED[name][0](), policy)
    try:
        _train(pipe, 1)
    except stretto.PipelineError as error:
        return str(error)
    finally:
        pipe.close()
    return ""


class Keeps(nn.Module):
    """Keeps a result with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept, self.fails = _linear(), torch.zeros(()), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.kept = torch.sin(y)
        if self.fails:
            raise ValueError("out of luck")
        return torch.tanh(y)


def kept(mesh: DeviceMesh) -> tuple[list[int], str]:
    """How many runs are alive after each of some steps, the last of which fail, and what a late backward says."""
    layer, alive = Keeps(), []
    pipe = _pipeline(mesh, layer, {"*": "recompute"})
    for step in range(6):
        layer.fails = step > 2
        try:
            _train(pipe, 1)
        except (ValueError, stretto.PipelineError):
            assert layer.fails
        alive.append(_runs_alive())
    try:
        layer.kept.sum().backward()
    except stretto.PipelineError as error:
        said = str(error)
    pipe.close()
    return alive, said


def _runs_alive() -> int:
    gc.collect()
    return sum(isinstance(it, Run) for it in gc.get_objects())


class Attends(nn.Module):
    """Autocast casts its input, a float32 tensor that requires gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(16, 16, device=DEVICE), list[WeakStorage]()

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.matmul(torch.softmax(self.linear(x) @ x.transpose(-1, -2), -1), x).float()
        self.made.append(WeakStorage(y.untyped_storage()))
        return y


def held_by_autocast(mesh: DeviceMesh, cached: bool) -> list[tuple[int, bool]]:
    """How many outputs of layers are alive after each of some steps within one autocast, and whether the batch is."""
    layers, found = [Attends() for _ in range(3)], []
    plan = SCHEDULES["gpipe"].make(devices=1, microbatches=4)
    pipe = stretto.Pipeline(layers, plan=plan, loss=_squares, mesh=mesh, memory={"*": "recompute"})
    with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=cached):
        for _ in range(3):
            x = torch.randn(4, 8, 16, device=DEVICE)
            batch = WeakStorage(x.untyped_storage())
            pipe.step(x, x)
            del x
            found.append((sum(not made.is_gone for layer in layers for made in layer.made), not batch.is_gone))
    pipe.close()
    return found


def _squares(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


class Scales(torch.autograd.Function):
    """Reads an attribute of a saved parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, getattr(weight, "scale", 1.0) * (x.T @ grad)


class Scaled(nn.Module):
    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, device=DEVICE))
        setattr(self.weight, attribute, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return Scales.apply(torch.tanh(x), self.weight) @ self.weight  # type: ignore[no-untyped-call]


def said_of_attributes(mesh: DeviceMesh, attribute: str, policy: Any) -> set[str]:
    """What a step warns of."""
    plan = SCHEDULES["gpipe"].make(devices=1, microbatches=2)
    pipe = stretto.Pipeline([Scaled(attribute)], plan=plan, loss=_squares, mesh=mesh, memory=policy)
    x = torch.randn(4, 4, device=DEVICE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(x, x)
    pipe.close()
    return {str(warning.message) for warning in caught}


def near(mesh: DeviceMesh, name: str, policy: Any) -> float:
    """How far the gradients of a policy are from those without one, of the largest."""
    every = []
    for memory in ("none", stretto.Memory(sites=policy, min_bytes=0)):
        torch.manual_seed(0)
        pipe = _pipeline(mesh, odd_sites.Wide(*odd_sites.FLOAT8[name]), memory)
        x = torch.randn(4, 2, odd_sites.WIDE, dtype=torch.bfloat16, device=DEVICE)
        pipe.step(x, torch.zeros(4, 1, 1, device=DEVICE))
        every.append([parameter.grad.double() for parameter in pipe.parameters()])
        pipe.close()
    exact, found = every
    return max(float((a - b).norm() / a.norm()) for a, b in zip(exact, found, strict=True))
