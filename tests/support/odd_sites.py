"""Sites whose state, arguments or surroundings are not the usual ones."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from site_layers import WIDTH, Layer, Site


def _alone(me: Layer, x: Tensor) -> Tensor:
    return x + me.site(torch.sin(x))  # type: ignore[no-any-return]


def _of(site: nn.Module, run: Callable[..., Tensor] = _alone, **parts: nn.Module) -> Layer:
    return Layer(run, site, before=nn.Linear(WIDTH, WIDTH), **parts)


class Ticks(nn.Module):
    """Counts in a buffer that may be another module's, too."""

    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.register_buffer("count", count)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x


class Times(nn.Module):
    """Multiplies by a buffer that may be another module's, too."""

    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.register_buffer("count", count)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.count.clone()


def _counted(me: Site, x: Tensor) -> Tensor:
    return torch.tanh(me.times(me.ticks(me.linear(x))))


def _sharing() -> Layer:
    count = torch.ones(())
    return _of(Site(_counted, ticks=Ticks(count), times=Times(count)))


def _within() -> Layer:
    counts = torch.ones(3, WIDTH)
    return _of(Site(_counted, ticks=Ticks(counts), times=Times(counts[-1])))


class Filled(nn.Module):
    """Keeps the first mean that it sees in a buffer, which is None or absent before."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if registered:
            self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if getattr(self, "mean", None) is None:
            if "mean" not in self._buffers:
                self.register_buffer("mean", None)
            self.mean = y.detach().mean(0)
            return torch.tanh(y)
        return torch.tanh(y - self.mean)


class Grows(nn.Module):
    """Replaces a table when it is called for the second and third time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in (2, 3):
            self.table = torch.full_like(self.table, self.calls)
        return torch.tanh(self.linear(x)) * self.table


class Slotted(nn.Module):
    __slots__ = ("count",)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return torch.tanh(self.linear(x) * self.count)


class Lists(nn.Module):
    """Has a module in a list, where PyTorch does not find it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norms = nn.Linear(WIDTH, WIDTH), [norm]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norms[0](self.linear(x)))


def _listed() -> Layer:
    norm = nn.BatchNorm1d(WIDTH)
    return _of(Lists(norm), norm=norm)


def _in_turns(me: Layer, x: Tensor) -> Tensor:
    calls = me.calls = getattr(me, "calls", -1) + 1
    me.site.norm.train(calls // 2 % 2 == 1)  # from step to step
    return _alone(me, x)


def _normed(me: Site, x: Tensor) -> Tensor:
    return torch.tanh(me.norm(me.linear(x)))


def _scaled(me: Layer, x: Tensor) -> Tensor:
    h = torch.tanh(me.before(x))
    h.scale = 0.5  # type: ignore[attr-defined]
    return me.site(h)  # type: ignore[no-any-return]


def _by_scale(me: Site, x: Tensor) -> Tensor:
    scale = getattr(x, "scale", 1.0)
    return torch.tanh(me.linear(x) * (scale if isinstance(scale, float) else scale[0]))


def _by_class(me: Site, x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(me.linear(x) * (2 * weight if isinstance(weight, nn.Parameter) else weight))


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is torch.tanh else out


class DoublesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is torch.ops.aten.exp.default else out


def _within_mode(mode: Callable[[], Any]) -> Callable[..., Tensor]:
    def run(me: Layer, x: Tensor) -> Tensor:
        with mode():
            h = me.site(torch.sin(x))
        return x + h  # type: ignore[no-any-return]

    return run


def _unary(me: Site, x: Tensor) -> Tensor:
    h = torch.tanh(me.linear(x))
    return torch.exp(-h * h)


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sin(x) * x


class BuiltIn(nn.Module):
    forward = torch.sin


class Partial(nn.Module):
    forward = functools.partial(F.gelu, approximate="tanh")


def _of_linear(me: Layer, x: Tensor) -> Tensor:
    return me.site(me.before(x)) * x  # type: ignore[no-any-return]


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(x)) * scale


def _asks(me: Layer, x: Tensor) -> Tensor:
    """Pass what the site's signature says that it takes."""
    takes = inspect.signature(me.site.forward).parameters
    assert "self" not in takes
    return x + me.site(x, **({"scale": 0.5} if "scale" in takes else {}))  # type: ignore[no-any-return]


class Sparse(nn.Module):
    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sparse.mm(self.matrix, self.linear(x).t()).t())


def _trains(me: Site, x: Tensor) -> Tensor:
    me.head(x.detach()).square().mean().backward()
    return torch.tanh(me.linear(x))


def _of_leaf(me: Layer, x: Tensor) -> Tensor:
    return x + me.site(x.detach().requires_grad_())  # type: ignore[no-any-return]


def _reads_gradient(me: Site, x: Tensor) -> Tensor:
    me.linear(x).square().sum().backward(inputs=[x])
    assert x.grad is not None
    return torch.tanh(me.linear(x.grad))


def _swaps(me: Site, x: Tensor) -> Tensor:
    y = torch.tanh(me.linear(x))
    me.linear, me.other = me.other, me.linear
    return y


class Hooked(nn.Module):
    """Has a hook that removes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

        def double(_: nn.Module, given: tuple[Tensor]) -> Tensor:
            hook.remove()
            return given[0] * 2

        hook = self.linear.register_forward_pre_hook(double)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def _replaces(me: Site, x: Tensor) -> Tensor:
    y: Tensor = me.act(me.linear(x))
    me.act.forward = torch.cos if vars(me.act).get("forward") is torch.sin else torch.sin
    return y * y


def _lists(me: Layer, x: Tensor) -> Tensor:
    h = me.before(x)
    h.scale, h.cfg = 0.5, [object()]
    return me.site(h)  # type: ignore[no-any-return]


def _changes_list(me: Layer, x: Tensor) -> Tensor:
    h = me.before(x)
    h.scale = [0.5]
    out = me.site(h)
    h.scale.clear()
    return out  # type: ignore[no-any-return]


def _makes(me: Site, x: Tensor) -> Tensor:
    if not hasattr(me, "act"):
        me.act = nn.Tanh()
    return me.act(me.linear(x))  # type: ignore[no-any-return]


def _hooks(me: Site, x: Tensor) -> Tensor:
    hook = me.linear.register_forward_hook(lambda _, __, out: 2 * out)
    y = torch.tanh(me.linear(x))
    hook.remove()
    return y


def _replaces_for_a_while(me: Site, x: Tensor) -> Tensor:
    me.act.forward = torch.sin
    y: Tensor = me.act(me.linear(x))
    y = y * y
    del me.act.forward
    return y


def _differentiates(me: Site, x: Tensor) -> Tensor:
    y = torch.tanh(me.linear(x))
    with torch.device("cpu" if x.device.type == "cpu" else x.device):
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y * slope


class HasParent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.parents = nn.Linear(WIDTH, WIDTH), list[nn.Module]()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def _with_parent() -> Layer:
    layer = _of(HasParent(), lambda me, x: me.norm(_alone(me, x)), norm=nn.BatchNorm1d(WIDTH))
    layer.site.parents.append(layer)
    return layer


def _uses_gradients(me: Site, x: Tensor) -> Tensor:
    me.head(x.detach()).square().mean().backward()
    step = me.head.weight.grad.clone()
    me.head.zero_grad(set_to_none=True)
    return torch.tanh(me.linear(x)) * step


class Odd(nn.Module):
    """Has buffers that PyTorch does not copy or compare as others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("halves", torch.ones(2, dtype=torch.complex32))
        codes = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
        self.register_buffer("codes", codes)
        self.register_buffer("first", codes[:2])


def _plainly(me: Site, x: Tensor) -> Tensor:
    return torch.tanh(me.linear(x))


class Student(nn.Module):
    """Follows a teacher in a list, which is its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.teachers = nn.Linear(WIDTH, WIDTH), [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.teachers[0].to(x.device)(x)
        with torch.no_grad():
            self.teachers[0].weight.lerp_(self.linear.weight, 0.1)
        return y


def _taught() -> Layer:
    return _of(Student())


EXACT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a buffer of two modules": (_sharing, 2),
    "a buffer within another": (_within, 2),
    "a buffer that is None at first": (lambda: _of(Filled(True)), 0),
    "a buffer that a forward registers": (lambda: _of(Filled(False)), 0),
    "a buffer that is replaced": (lambda: _of(Grows()), 0),
    "evaluation and training in turns": (lambda: _of(Site(_normed, norm=nn.BatchNorm1d(WIDTH)), _in_turns), 2),
    "an attribute in a slot": (lambda: _of(Slotted()), 0),
    "a module in a list": (_listed, 0),
    "an input with an attribute": (lambda: _of(Site(_by_scale), _scaled), 2),
    "a parameter as input": (
        lambda: _of(Site(_by_class), lambda me, x: me.site(torch.tanh(x), me.before.bias)),
        2,
    ),
    "a function mode around": (lambda: _of(Site(_unary), _within_mode(Doubles)), 2),
    "a dispatch mode around": (lambda: _of(Site(_unary), _within_mode(DoublesBelow)), 2),
    "a static forward": (lambda: _of(Static(), _of_linear), 0),
    "a forward in C++": (lambda: _of(BuiltIn(), _of_linear), 0),
    "a partial as forward": (lambda: _of(Partial(), _of_linear), 0),
    "a signature that is read": (lambda: _of(Scales(), _asks), 0),
    "submodules that change": (lambda: _of(Site(_swaps, other=nn.Linear(WIDTH, WIDTH))), 2),
    "a submodule that is made": (lambda: _of(Site(_makes)), 2),
    "a hook that removes itself": (lambda: _of(Hooked()), 0),
    "a hook for a while": (lambda: _of(Site(_hooks)), 2),
    "a forward that changes": (lambda: _of(Site(_replaces, act=nn.Tanh())), 2),
    "a forward for a while": (lambda: _of(Site(_replaces_for_a_while, act=nn.Tanh())), 2),
    "an input with a list": (lambda: _of(Site(_by_scale), _lists), 2),
    "a gradient within another mode": (lambda: _of(Site(_differentiates), lambda me, x: me.site(me.before(x))), 3),
    "a parent in a list": (_with_parent, 0),
    "gradients that are set to None": (lambda: _of(Site(_uses_gradients, head=nn.Linear(WIDTH, 1))), 3),
    "buffers that cannot be compared": (lambda: _of(Site(_plainly, odd=Odd())), 2),
    "a sparse buffer": (lambda: _of(Sparse(torch.eye(WIDTH).to_sparse())), 0),
    "a sparse buffer in rows": (lambda: _of(Sparse(torch.eye(WIDTH).to_sparse_csr())), 0),
}
"""Layers that are recomputed exactly, and how often their site runs for each microbatch."""

_ADDS = "0.site adds gradients to .grad in its forward, by backward(), and would add them again when it is recomputed"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a backward of its own": (lambda: _of(Site(_trains, head=nn.Linear(WIDTH, 1))), _ADDS),
    "a backward to its input": (lambda: _of(Site(_reads_gradient), _of_leaf), _ADDS),
    "an input with a list that changes": (
        lambda: _of(Site(_by_scale), _changes_list),
        "'scale' of a tensor that 0.site is given was changed before its backward",
    ),
    "a teacher in a list": (_taught, "a parameter of 0.site was changed before its backward"),
}
"""Layers that are refused, and what the error says."""


WIDE = 128  # features that float8 stores in whole tiles


class Wide(nn.Module):
    """A layer in bfloat16 whose site is given, or whose kept module returns, tensors that lie oddly in memory."""

    def __init__(self, given: Callable[[Tensor], Tensor], returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.given, self.site = given, WideSite(returned)
        self.before, self.after = (nn.Linear(WIDE, WIDE, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.site(self.given(torch.tanh(self.before(x))))
        parts = out if isinstance(out, tuple) else (out,)
        return torch.cat([self.after(part) for part in parts])


class WideSite(nn.Module):
    def __init__(self, returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.kept = WideKept(returned)

    def forward(self, x: Tensor) -> Any:
        return self.kept(torch.sin(x))


class WideKept(nn.Module):
    def __init__(self, returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.returned, self.linear = returned, nn.Linear(WIDE, WIDE, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        return self.returned(torch.sin(x) + self.linear(x))


def _same(x: Tensor) -> Tensor:
    return x


FLOAT8: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any]]] = {
    "plain": (_same, _same),
    "an expanded input": (lambda x: x[:, :1].expand(-1, 3, -1), _same),
    "a part of the features as input": (lambda x: torch.cat([x, x, x], -1).chunk(3, -1)[1], _same),
    "a transposed input": (lambda x: x.transpose(0, 1), _same),
    "two parts of one tensor": (_same, lambda h: (h[:1], h[1:])),
    "the second of three parts": (_same, lambda h: torch.cat([h, h, h], -1).chunk(3, -1)[1]),
    "an expanded output": (_same, lambda h: h[:, :1].expand(-1, 3, -1)),
}
"""What a site is given, and what a module within it returns."""
