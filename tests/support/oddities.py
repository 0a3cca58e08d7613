"""Small models that once gave wrong numbers, with what a pipeline is to do: be exact, or say what is wrong."""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from strategies import SCHEDULES
from stretto.pipeline.rng import Generators, RngKey
from stretto.schedules import gpipe

WIDTH = 6


class Of(nn.Module):
    """A layer of a function of it and its input; it has a Linear."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def _in_place(_: Of, pair: Any) -> Tensor:
    h, part = pair
    part.mul_(2)
    return h * 1.5 + part  # type: ignore[no-any-return]


def _marked(me: Of, pair: Any) -> Tensor:
    h, mask = pair
    if not hasattr(mask, "_bias"):
        mask._bias = mask.double().mean()
    return me.linear(h) * mask._bias  # type: ignore[no-any-return]


def _one_container_twice(_: Of, h: Tensor) -> Any:
    same = {"h": h}
    return same, same


def _keys(me: Of, h: Tensor) -> Any:
    me.calls = getattr(me, "calls", 0) + 1
    return {(1, True, 1.0)[me.calls % 3]: me.linear(h)}


def _of_keys(me: Of, it: Any) -> Tensor:
    (key,) = it
    return me.linear(it[key]) * {int: 1.0, bool: 2.0, float: 3.0}[type(key)]  # type: ignore[no-any-return]


def _scratch(me: Of, h: Tensor) -> Tensor:
    if not hasattr(me, "kept"):
        me.kept = torch.zeros_like(h)
    with torch.no_grad():
        me.kept.copy_(me.linear(h))
    return me.kept


def _fork(_: Of, h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return F.dropout(h.sin(), 0.5)


def _attends(me: Of, h: Tensor) -> Tensor:
    return h + me.attention(h, h, h, need_weights=False)[0]  # type: ignore[no-any-return]


def _hinted(me: Of, h: Tensor) -> Tensor:
    mask = torch.zeros(h.shape[1], h.shape[1], dtype=torch.bool)
    return h + me.attention(h, h, h, need_weights=False, attn_mask=mask, is_causal=True)[0]  # type: ignore[no-any-return]


def _by_data(me: Of, h: Tensor) -> Tensor:
    me.level.data.mul_(0.5).add_(1)
    return (h * me.level.clone()).sin()


def _of_child(me: Of, h: Tensor) -> Tensor:
    me.child.level += 1
    return me.child(h)  # type: ignore[no-any-return]


def _patches(me: Of, h: Tensor) -> Tensor:
    if "forward" not in vars(me.child) or not getattr(me, "patched", False):
        me.patched = True
        me.child.forward = types.MethodType(lambda child, x: F.linear(x, child.weight * 2, child.bias), me.child)
    return me.child(h)  # type: ignore[no-any-return]


def _position(me: Of, h: Tensor) -> Tensor:
    return (h + me.table.weight)[:, None]


class Property(nn.Linear):
    """Computes with twice its weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        nn.init.normal_(self._parameters["weight"])  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        if (own := self._parameters.get("weight")) is None:
            raise AttributeError("weight")
        return own * 2

    @weight.setter
    def weight(self, value: nn.Parameter) -> None:
        self._parameters["weight"] = value


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad.neg_()


def _attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True)


def _level(function: Callable[..., Any]) -> Of:
    return Of(function, level=torch.ones(()).double())


def _linear(me: Of, h: Any) -> Tensor:
    return me.linear(h)  # type: ignore[no-any-return]


EXACT: dict[str, tuple[Callable[[], list[nn.Module]], dict[str, Any]]] = {
    "attributes on what arrives": (lambda: [Of(lambda me, h: (me.linear(h), (h > 0).all(-1, True))), Of(_marked)], {}),
    "keys that are equal": (lambda: [Of(_keys), Of(_of_keys)], {}),
    "a site that forks": (
        lambda: [Of(_linear), Of(lambda me, h: me.linear(me.site(h)), site=Of(_fork))],
        {"recompute": ["*site"]},
    ),
    "a site that attends": (
        lambda: [Of(_linear), Of(lambda me, h: me.site(h), site=Of(_attends, attention=_attention()))],
        {"recompute": ["*site"]},
    ),
    "a causal hint": (lambda: [Of(_linear), Of(_hinted, attention=_attention())], {}),
    "a buffer changed by its data": (lambda: [Of(_linear), _level(_by_data)], {"checkpoint": True}),
    "a site with such a buffer": (
        lambda: [Of(_linear), Of(lambda me, h: me.linear(me.site(h)), site=_level(_by_data))],
        {"recompute": ["*site"]},
    ),
    "a forward set in a step": (lambda: [Of(_linear), Of(_patches, child=nn.Linear(WIDTH, WIDTH))], {"steps": 2}),
    "a weight that is a property": (lambda: [Property(WIDTH, WIDTH), Of(_linear)], {}),
    "a table used by hand": (
        lambda: [Of(_position, table=nn.Embedding(3, WIDTH)), Of(lambda me, h: me.linear(h)[:, 0])],
        {},
    ),
    "a backward in place": (
        lambda: [Of(_linear), Of(_linear)],
        {"loss": lambda out, y: Negated.apply((out - y).square().mean())},
    ),
    "no features": (lambda: [nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH)], {}),
    "inputs changed in place": (
        lambda: [Of(lambda me, x: me.linear(x.clamp_(-1, 1)).sin()), Of(_linear)],
        {"whole": True},
    ),
    "float64 under autocast": (lambda: [Of(_linear), Of(_linear)], {"autocast": True}),
}

REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], dict[str, Any], str]] = {
    "aliases, a stage later": (
        lambda: [Of(lambda me, x: (h := me.linear(x), h[:, :1])), nn.Identity(), Of(_in_place)],
        {},
        "a layer changes in place a tensor that shares memory with another one it was handed",
    ),
    "aliases in evaluation": (
        lambda: [Of(lambda me, x: (h := me.linear(x), h[:, :1])), nn.Identity(), Of(_in_place)],
        {"evaluate": True},
        "a layer changes in place a tensor that shares memory with another one it was handed",
    ),
    "one container twice": (
        lambda: [Of(_one_container_twice), Of(lambda me, both: me.linear(both[0]["h"])), nn.Identity()],
        {},
        "layer 0 is given, or hands on, one dict twice",
    ),
    "a scratch tensor handed on": (
        lambda: [Of(_linear), Of(_scratch), Of(_linear)],
        {},
        "a layer changes in place a tensor that it has handed on before",
    ),
    "a buffer that a parent changes": (
        lambda: [Of(_linear), nn.Identity(), Of(_of_child, child=_level(lambda me, h: (h * me.level.clone()).sin()))],
        {"recompute": ["*child"]},
        "was changed before it could be recomputed",
    ),
    "one norm in two stages": (
        lambda: (lambda norm: [Of(_linear), norm, norm])(nn.BatchNorm1d(4)),
        {},
        "1 and 2 are one module, which keeps running statistics, in two stages",
    ),
    "an iterator that gives one tensor": (
        lambda: [Of(_linear)] * 3,
        {"reused": True},
        "changes a tensor that it gave before",
    ),
    "an endless iterator": (lambda: [Of(_linear), Of(_linear), Of(_linear)], {"endless": True}, "but inputs has more"),
}


def _layers(make: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    torch.manual_seed(1)
    return [layer.double() for layer in make()]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _batch(name: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    shape = (3, WIDTH) if name == "a table used by hand" else (3, 4, WIDTH)
    return torch.randn(6, *shape).double(), torch.randn(6, *shape).double()


def exact(mesh: Any, name: str, schedule: str) -> list[str]:
    """What differs from plain autograd on this rank."""
    make, more = EXACT[name]
    more = dict(more)
    steps, whole, autocast = more.pop("steps", 1), more.pop("whole", False), more.pop("autocast", False)
    loss = more.pop("loss", _loss)
    plan = SCHEDULES[schedule].make(devices=2, microbatches=6)
    pipe = stretto.Pipeline(_stretched(make, plan.stages), plan=plan, loss=loss, mesh=mesh, **more)
    layers = _stretched(make, plan.stages)
    wrong = []
    for step in range(steps):
        inputs, targets = _batch(name)
        given = inputs.flatten(0, 1), targets.flatten(0, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = pipe.step(*given).loss if whole else pipe.step(list(inputs), list(targets)).loss
        expected, generators = 0.0, Generators(torch.device("cpu"))
        for layer in layers:
            layer.zero_grad()
        inputs, targets = _batch(name)
        for k, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for number, layer in enumerate(layers):
                    generators.seed(RngKey(step=step).seed_of(number, 0, k))
                    x = layer(x)
                made = loss(x, y) / 6
            made.backward()
            expected += float(made.detach())
        if abs(found - expected) > 1e-12 * abs(expected):
            wrong.append(f"loss {found} for {expected}")
        of = dict(nn.Sequential(*layers).named_parameters())
        for key, parameter in pipe.named_parameters():
            theirs, mine = of[key].grad, parameter.grad
            if (mine is None) != (theirs is None) or (
                mine is not None and theirs is not None and not torch.allclose(mine, theirs, rtol=1e-11, atol=1e-13)
            ):
                wrong.append(f"step {step}: {key}")
    buffers = dict(nn.Sequential(*layers).named_buffers())
    wrong += [key for key, buffer in pipe._module.named_buffers() if not torch.equal(buffer, buffers[key])]
    return wrong


def _stretched(make: Callable[[], list[nn.Module]], stages: int) -> list[nn.Module]:
    """As many layers as there are stages at least."""
    layers = _layers(make)
    return [*layers, *(nn.Linear(WIDTH, WIDTH).double() for _ in range(stages - len(layers)))]


def refused(mesh: Any, name: str) -> str:
    make, more, _ = REFUSED[name]
    more = dict(more)
    evaluate, reused, endless = (more.pop(key, False) for key in ("evaluate", "reused", "endless"))
    plan = gpipe(devices=3, microbatches=6)
    inputs, targets = _batch(name)

    def again() -> Any:
        buffer = torch.zeros_like(inputs[0])
        for x in inputs:
            yield buffer.copy_(x)

    def without_end() -> Any:
        while True:
            yield inputs[0]

    given = again() if reused else without_end() if endless else list(inputs)
    try:
        pipe = stretto.Pipeline(_layers(make), plan=plan, loss=_loss, mesh=mesh, timeout=20, **more)
        found = (pipe.eval_step if evaluate else pipe.step)(given, list(targets)).loss
    except stretto.PipelineError as error:
        return str(error)
    whole = nn.Sequential(*_layers(make))
    expected = sum(float(_loss(whole(x), y).detach()) for x, y in zip(inputs, targets, strict=True)) / 6
    return "exact" if abs(found - expected) <= 1e-12 * expected else ""
