"""A grammar of odd models: pieces that compute in odd ways, containers that they hand on, and the plain run to compare.

A piece is named by what is odd about it. It opens what it was handed, checking that it is what was sent, computes, and
wraps the result in a container. A tag, different from microbatch to microbatch, changes what the containers hold.
"""

import collections
import copy
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

import stretto
from devices import DEVICE
from strategies import SCHEDULES
from stretto.moe import GroupedLinear
from stretto.pipeline.rng import Generators, RngKey

WIDTH, TOKENS, ROWS, WORDS = 4, 3, 2, 7


class Point(NamedTuple):
    h: Tensor
    tag: int


@dataclass
class Output(ModelOutput):  # type: ignore[misc]
    h: Tensor | None = None
    extra: Tensor | None = None


# What a layer hands on: how it is wrapped, and how the next one opens it.


def _check(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise AssertionError(f"a {kind.__name__} arrived as a {type(value).__name__}")


def _open_values(it: Any) -> tuple[Tensor, int]:
    _check(it, dict)
    for key, kind in (("tag", int), ("scale", float), ("flag", bool), ("word", str), ("none", type(None))):
        _check(it[key], kind)
    if it["word"] != "abcdef"[: it["tag"]]:
        raise AssertionError(f"another microbatch's word: {it['word']}")
    return it["h"] * it["scale"] if it["flag"] else it["h"], it["tag"]


def _open_odd(it: Any) -> tuple[Tensor, int]:
    expected = [2**80 + 1, 1 - 2j, b"\0x", torch.bfloat16, torch.device("cpu"), -0.0]
    for found, wanted in zip(it[1:-1], expected, strict=True):
        if type(found) is not type(wanted) or repr(found) != repr(wanted):
            raise AssertionError(f"{wanted!r} arrived as {found!r}")
    return it[0], it[-1]


def _open_limits(it: Any) -> tuple[Tensor, int]:
    lowest, highest, nothing = it["limits"]
    if not (math.isinf(lowest) and math.isinf(highest) and math.isnan(nothing)):
        raise AssertionError(f"infinities arrived as {it['limits']}")
    return it["h"].clamp(min=lowest, max=highest), it["tag"]


def _open_default(it: Any) -> tuple[Tensor, int]:
    _check(it, collections.defaultdict)
    return it["h"], it["tag"] + len(it["more"])


def _open_writing(it: Any) -> tuple[Tensor, int]:
    h, tag = it["parts"].pop(), it.pop("tag")
    it["parts"].append(None)
    it["h"] = "spoilt"
    return h, tag


def _open_twice(it: Any) -> tuple[Tensor, int]:
    if it[0] is not it[1]:
        raise AssertionError("one tensor arrived as two")
    return it[0] * 0.5 + it[1] ** 2, 0


def _open_twice_in_place(it: Any) -> tuple[Tensor, int]:
    it[0].mul_(0.5)
    return it[0] + it[1], 0


def _open_views_in_place(it: Any) -> tuple[Tensor, int]:
    it[0].mul_(0.5)
    return it[0] + it[1], 0


def _open_strided(it: Any) -> tuple[Tensor, int]:
    return it.transpose(1, 2).view(it.shape[0], -1).view(it.shape[0], WIDTH, -1).transpose(1, 2), 0


def _open_dtypes(it: Any) -> tuple[Tensor, int]:
    extra = it[1].real if it[1].is_complex() else it[1]
    return it[0] + extra.to(it[0].dtype).mean(), int(it[2])


_DTYPES = [torch.int32, torch.float32, torch.bool, torch.bfloat16, torch.uint8, torch.complex64]

CONTAINERS: dict[str, tuple[Callable[[Tensor, int], Any], Callable[[Any], tuple[Tensor, int]]]] = {
    "tensor": (lambda h, _: h, lambda it: (it, 0)),
    "tuple": (lambda h, tag: (h, torch.tensor([tag], device=h.device)), lambda it: (it[0], int(it[1]))),
    "values": (
        lambda h, tag: {
            "h": h, "tag": tag, "scale": 1 + tag / 4, "flag": tag % 2 == 0, "word": "abcdef"[:tag], "none": None
        },
        _open_values,
    ),
    "order": (
        lambda h, tag: {"h": h, "tag": tag} if tag % 2 else {"tag": tag, "h": h},
        lambda it: (it["h"] * (1.5 if next(iter(it)) == "h" else 1), it["tag"]),
    ),
    "maybe": (
        lambda h, tag: [h, h.mean() if tag % 2 else None, tag],
        lambda it: (it[0] if it[1] is None else it[0] + it[1], it[2]),
    ),
    "dtypes": (
        lambda h, tag: (
            h,
            torch.ones(3, dtype=_DTYPES[tag % 6], device=h.device),
            torch.tensor(tag, dtype=torch.int16, device=h.device),
        ),
        _open_dtypes,
    ),
    "limits": (lambda h, tag: {"h": h, "limits": (-math.inf, math.inf, math.nan), "tag": tag}, _open_limits),
    "odd": (
        lambda h, tag: (h, 2**80 + 1, 1 - 2j, b"\0x", torch.bfloat16, torch.device("cpu"), -0.0, tag),
        _open_odd,
    ),
    "named": (Point, lambda it: (it.h, it.tag)),
    "output": (
        lambda h, tag: Output(h=h, extra=h.sum() if tag % 2 else None),
        lambda it: (it.h if it.extra is None else it.h + it["extra"], 0),
    ),
    "default": (lambda h, tag: collections.defaultdict(list, h=h, tag=tag), _open_default),
    "ordered": (lambda h, tag: collections.OrderedDict(tag=tag, h=h), lambda it: (it.popitem()[1], it["tag"])),
    "ints": (lambda h, tag: {0: h, 7: tag}, lambda it: (it[0], it[7])),
    "nested": (
        lambda h, tag: {"a": (h, [torch.tensor(tag, device=h.device)]), "b": {}, "c": ()},
        lambda it: (it["a"][0], int(it["a"][1][0])),
    ),
    "writing": (lambda h, tag: {"parts": [h], "tag": tag}, _open_writing),
    "twice": (lambda h, _: (h, h), _open_twice),
    "twice in place": (lambda h, _: [h, h], _open_twice_in_place),
    "views": (lambda h, tag: (h, h[:, :1], tag), lambda it: (it[0] + it[1], it[2])),
    "views in place": (lambda h, _: (h, h[:, :1]), _open_views_in_place),
    "unused": (lambda h, tag: {"aux": (h * 0).sqrt(), "h": h, "tag": tag}, lambda it: (it["h"], it["tag"])),
    "complex": (lambda h, _: torch.complex(h, h * 0.5), lambda it: ((it * (1 + 1j)).real + it.abs(), 0)),
    "conjugate": (
        lambda h, _: (torch.complex(h, h * 0.5).conj(), torch.complex(h, h).conj().imag),
        lambda it: (it[0].imag + it[1], 0),
    ),
    "strided": (lambda h, _: h.transpose(1, 2).contiguous().transpose(1, 2), _open_strided),
    "expanded": (lambda h, tag: (h, h.mean(0, keepdim=True).expand_as(h), tag), lambda it: (it[0] * it[1], it[2])),
    "empty": (
        lambda h, tag: (h, h[:0], h.new_zeros(()).float(), h.new_zeros(2, 0), tag),
        lambda it: (it[0] + it[1].sum(), it[4]),
    ),
}  # fmt: skip


# How a piece computes.


class Piece(nn.Module):
    """Opens what it is handed, computes, wraps. This one is a linear layer."""

    opened, wrapped = "tensor", "tensor"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        h, tag = CONTAINERS[self.opened][1](value)
        return CONTAINERS[self.wrapped][0](self.compute(h), tag)

    def compute(self, h: Tensor) -> Tensor:
        return self.linear(h)  # type: ignore[no-any-return]


class Residual(Piece):
    def compute(self, h: Tensor) -> Tensor:
        return h + self.linear(h).tanh()  # type: ignore[no-any-return]


class InPlaceAfterLinear(Piece):
    def compute(self, h: Tensor) -> Tensor:
        return self.linear(h).mul_(0.5).add_(h).relu_()  # type: ignore[no-any-return]


class InPlaceOnInput(Piece):
    def compute(self, h: Tensor) -> Tensor:
        h.mul_(0.5)
        h[:, 0] = 1.0
        return self.linear(h)  # type: ignore[no-any-return]


class HandsOn(Piece):
    """Its parameters are not used."""

    def compute(self, h: Tensor) -> Tensor:
        return h


class Dropout(Piece):
    def compute(self, h: Tensor) -> Tensor:
        return F.dropout(self.linear(h), 0.3) + torch.rand_like(h)


class DropoutModule(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.drop.p = 0.5  # changed after it was made

    def compute(self, h: Tensor) -> Tensor:
        return self.drop(self.linear(h))  # type: ignore[no-any-return]


class Recurrent(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)

    def compute(self, h: Tensor) -> Tensor:
        return self.rnn(self.linear(h))[0]  # type: ignore[no-any-return]


class Attention(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def compute(self, h: Tensor) -> Tensor:
        return h + self.attention(h, h, self.linear(h), need_weights=False)[0]  # type: ignore[no-any-return]


class Force(Piece):
    """The gradient of an energy, not to be differentiated."""

    def compute(self, h: Tensor) -> Tensor:
        at = h.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(self.linear(at).sin().sum(), at)
        return self.linear(h) + force


class Penalty(Piece):
    """The gradient of an energy, to be differentiated again."""

    def compute(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            at = h if h.requires_grad else h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(at).sin().sum(), at, create_graph=True)
        return self.linear(h) * slope.square().mean()


class OfWeights(Piece):
    """The gradient of an energy by a weight."""

    def compute(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.linear(h).sin().sum(), self.linear.weight, create_graph=True)
        return self.linear(h) @ slope


class Transformed(Piece):
    def compute(self, h: Tensor) -> Tensor:
        rows: Tensor = vmap(self.linear)(h)
        _, back = vjp(self.linear, rows)
        return rows + back(rows.cos())[0]


class Called(Piece):
    """With other weights than its own."""

    def compute(self, h: Tensor) -> Tensor:
        changed = {name: parameter * 0.5 + 0.1 for name, parameter in self.linear.named_parameters()}
        return self.linear(h) + functional_call(self.linear, changed, (h,))


class Parametrized(Piece):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.linear)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        parametrizations.weight_norm(self.attention.out_proj)

    def compute(self, h: Tensor) -> Tensor:
        h = self.linear(h)
        return h + self.attention(h, h, h, need_weights=False)[0]  # type: ignore[no-any-return]


class BiasParametrized(Piece):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.linear, "bias", nn.Tanh())


class FrozenBias(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.linear.bias.requires_grad_(False)


class FrozenWeight(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)


class Statistics(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(TOKENS)

    def compute(self, h: Tensor) -> Tensor:
        return self.norm(self.linear(h))  # type: ignore[no-any-return]


class Counter(Piece):
    """Its forward changes a buffer, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(WIDTH, dtype=torch.float64))

    def compute(self, h: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return self.linear(h) / self.count.clone()  # type: ignore[no-any-return]


class State(Piece):
    """Hands a buffer on that the next microbatch's forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(ROWS, TOKENS, WIDTH, dtype=torch.float64))

    def compute(self, h: Tensor) -> Tensor:
        return self.state.add_(self.linear(h).detach()) if self.training else self.linear(h)  # type: ignore[no-any-return]


class Hooked(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda _, __, out: out * 1.5)
        self.linear.register_full_backward_hook(lambda _, grads, __: tuple(g if g is None else g * 0.5 for g in grads))

    def compute(self, h: Tensor) -> Tensor:
        out = self.linear(h)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 2)
        return out  # type: ignore[no-any-return]


class Checkpointed(Piece):
    reentrant = False

    def compute(self, h: Tensor) -> Tensor:
        if not h.requires_grad:  # of which reentrant ones warn
            return self._inner(h)
        return checkpoint(self._inner, h, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def _inner(self, h: Tensor) -> Tensor:
        return F.dropout(self.linear(h).sin(), 0.2)


class Reentrant(Checkpointed):
    reentrant = True


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Implicit(torch.autograd.Function):
    """Runs a layer, and differentiates it itself in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear, *parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.at = x.detach().requires_grad_()
            ctx.out = linear(ctx.at).sin()
        ctx.parameters = parameters
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_x, *rest = torch.autograd.grad(ctx.out, (ctx.at, *ctx.parameters), grad)
        return by_x, None, *rest


class Functions(Piece):
    def compute(self, h: Tensor) -> Tensor:
        return Square.apply(h) + Implicit.apply(h, self.linear, *self.linear.parameters())  # type: ignore[no-any-return]


class Experts(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedLinear(2, WIDTH, WIDTH)

    def compute(self, h: Tensor) -> Tensor:
        rows = self.linear(h).flatten(0, 1)
        return self.experts(rows, torch.tensor([2, len(rows) - 2], device=h.device)).view_as(h)  # type: ignore[no-any-return]


class Looked(Piece):
    """Looks rows up, sparsely too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.sparse = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH, sparse=True)

    def compute(self, h: Tensor) -> Tensor:
        rows = (h.detach().argmax(-1) + 1) % WORDS
        return self.linear(h) + self.table(rows) * self.sparse(rows)  # type: ignore[no-any-return]


class SharedModule(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.shared = self.linear  # one module under two names

    def compute(self, h: Tensor) -> Tensor:
        return self.shared(self.linear(h).tanh())  # type: ignore[no-any-return]


class Site(nn.Module):
    """What a pipeline may be told to recompute."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.rand(WIDTH) + 0.5), inner

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h * self.scale)


class Recomputed(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.site = Site(lambda h: F.dropout(F.silu(h), 0.2))
        self.other = Site(torch.sin)

    def compute(self, h: Tensor) -> Tensor:
        return self.linear(self.site(h)) * self.other(self.site(h))  # type: ignore[no-any-return]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h).sin()  # type: ignore[no-any-return]


class RecomputedStatistics(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.site = Norm()

    def compute(self, h: Tensor) -> Tensor:
        return self.linear(self.site(h))  # type: ignore[no-any-return]


class RecomputedPenalty(Recomputed):
    def compute(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            at = h if h.requires_grad else h.detach().requires_grad_()
            energy = self.linear(self.other(at)).sin().sum()
            (slope,) = torch.autograd.grad(energy, at, create_graph=True)
        return self.linear(self.other(h)) + slope.square()


PIECES: dict[str, type[Piece]] = {
    piece.__name__: piece
    for piece in (
        Piece, Residual, InPlaceAfterLinear, InPlaceOnInput, HandsOn, Dropout, DropoutModule, Recurrent, Attention,
        Force, Penalty, OfWeights, Transformed, Called, Parametrized, BiasParametrized, FrozenBias, FrozenWeight,
        Statistics, Counter, State, Hooked, Checkpointed, Reentrant, Functions, Experts, Looked, SharedModule,
        Recomputed, RecomputedStatistics, RecomputedPenalty,
    )
}  # fmt: skip

LOSSES = ("mean", "counted", "numbers", "weighed", "made by a layer", "noisy")


class Embed(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Any:
        return CONTAINERS[self.wrapped][0](self.table(tokens), int(tokens.sum()) % 6)


class Measure(Piece):
    """Makes the loss itself, before the last layer."""

    def forward(self, value: Any) -> Tensor:
        h, _ = CONTAINERS[self.opened][1](value)
        return h.square().mean()


class Last(Piece):
    def forward(self, value: Any) -> Tensor:
        h, tag = CONTAINERS[self.opened][1](value)
        return self.compute(h) * (1 + tag)


MEMORIES: dict[str, Any] = {
    "none": "none",
    "sites": {"*site": "recompute"},
    "recompute": {"*": "recompute"},
    "offload": stretto.Memory(sites={"*": "offload"}, min_bytes=0),
    "inputs": stretto.Memory(sites={"*": "recompute+offload"}, min_bytes=0),
    "sites and offload": stretto.Memory(sites={"*site": "recompute", "*": "offload"}, min_bytes=0),
    "all but sites": stretto.Memory(sites={"*site": "keep", "*": "recompute"}),
}
"""Memory policies. A site is a module of a piece whose name begins with Recomputed."""


@dataclass(frozen=True)
class Model:
    """A sentence of the grammar: pieces and what each hands on, and how it is trained."""

    schedule: str
    devices: int
    microbatches: int
    pieces: tuple[tuple[str, str], ...]
    """Each piece with the container that it hands on."""
    embedded: str = "tensor"
    loss: str = "mean"
    frozen: tuple[int, ...] = ()
    memory: str = "none"
    """Its policy, of MEMORIES."""
    wgrad_microbatches: int = 1
    shared: bool = False
    """Whether the first and the last piece are one layer's weights."""

    def plan(self) -> stretto.Plan:
        extra = {"overlap": True} if self.schedule == "interleaved" else {}
        return SCHEDULES[self.schedule].make(devices=self.devices, microbatches=self.microbatches, **extra)

    def layers(self) -> list[nn.Module]:
        torch.manual_seed(1)
        embed, last = Embed(), Last()
        embed.wrapped = container = self.embedded
        made: list[Piece] = [embed]
        for name, wrapped in self.pieces:
            piece = PIECES[name]()
            piece.opened, piece.wrapped = container, wrapped
            container = wrapped
            made.append(piece)
        if self.loss == "made by a layer":
            made.append(Measure())
            made[-1].opened = container
            return [layer.double().to(DEVICE) for layer in (*made, nn.Identity())]
        last.opened = container
        made.append(last)
        if self.shared and isinstance(made[1].linear.weight, nn.Parameter):  # not of parametrized layers
            last.linear.weight = made[1].linear.weight
        for number in self.frozen:
            made[number % len(made)].requires_grad_(False)
        return [layer.double().to(DEVICE) for layer in made]

    def batch(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(2)
        rows = ROWS * self.microbatches
        tokens, targets = torch.randint(WORDS, (rows, TOKENS)), torch.randn(rows, TOKENS, WIDTH).double()
        return tokens.to(DEVICE), targets.to(DEVICE)

    def loss_of(self, output: Tensor, target: Tensor) -> Any:
        if self.loss == "made by a layer":
            return output
        off = (output - target).square()
        chosen = target > 0
        match self.loss:
            case "counted":
                return off[chosen].sum(), chosen.sum()
            case "numbers":
                return off[chosen].sum(), int(chosen.sum())
            case "weighed":  # a count that has a gradient, which nobody asks for
                return off.sum(), output.detach().requires_grad_().exp().sum()
            case "noisy":
                return F.dropout(off, 0.2).mean()
        return off.mean()


@dataclass
class Found:
    """What a rank, or the plain run, has found."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    evaluated: float
    said: str = ""
    raised: str = ""
    """An error that is not the pipeline's."""


def run_plain(model: Model) -> Found:
    """One process, one microbatch after the other, with the random numbers that a pipeline documents."""
    layers = model.layers()
    whole = nn.Sequential(*layers)
    key, generators = RngKey(), Generators(DEVICE)
    inputs, targets = model.batch()
    losses, counts = [], []

    def run(x: Any, target: Tensor, microbatch: int) -> tuple[Tensor, float]:
        for number, layer in enumerate(layers):
            generators.seed(key.seed_of(number, 0, microbatch))
            x = layer(x)
        generators.seed(key.seed_of(-1, 0, microbatch))
        loss = model.loss_of(x, target)
        return (loss[0], float(torch.as_tensor(loss[1]).detach())) if isinstance(loss, tuple) else (loss, 1.0)

    for k, (x, y) in enumerate(zip(inputs.chunk(model.microbatches), targets.chunk(model.microbatches), strict=True)):
        loss, count = run(x.clone(), y, k)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        counts.append(count)
    named = dict(whole.named_parameters(remove_duplicate=False))
    gradients = {name: None if p.grad is None else p.grad.to_dense().cpu() / sum(counts) for name, p in named.items()}
    buffers = {name: buffer.cpu().clone() for name, buffer in whole.named_buffers()}
    whole.eval()
    key = RngKey(step=1)
    with torch.no_grad():
        evaluated = [
            run(x.clone(), y, k)
            for k, (x, y) in enumerate(
                zip(inputs.chunk(model.microbatches), targets.chunk(model.microbatches), strict=True)
            )
        ]
    mean = sum(float(loss) for loss, _ in evaluated) / sum(count for _, count in evaluated)
    return Found(sum(losses) / sum(counts), gradients, buffers, mean)


def run_pipeline(mesh: Any, model: Model) -> Found:
    """The same on a rank, and what it said if it was refused."""
    layers = model.layers()
    try:
        pipe = stretto.Pipeline(
            layers,
            plan=model.plan(),
            loss=model.loss_of,
            mesh=mesh,
            memory=MEMORIES[model.memory],
            wgrad_microbatches=model.wgrad_microbatches,
            timeout=20,
        )
        inputs, targets = model.batch()
        state = torch.get_rng_state()
        loss = pipe.step(inputs, targets).loss
        if not torch.equal(state, torch.get_rng_state()):
            raise AssertionError("the step has drawn random numbers that others see")
        if left := [name for name, module in pipe.named_modules() if "forward" in vars(module)]:
            raise AssertionError(f"forwards are left behind on {left}")
        every = pipe.named_parameters(remove_duplicate=False)
        gradients = {name: None if p.grad is None else p.grad.to_dense().cpu() for name, p in every}
        gradients = copy.deepcopy(gradients)
        buffers = {name: buffer.cpu().clone() for name, buffer in pipe._module.named_buffers()}
        evaluated = pipe.eval_step(inputs, targets).loss
        pipe.close()
    except stretto.PipelineError as error:
        return Found(0.0, {}, {}, 0.0, said=str(error))
    except RuntimeError:  # such as autograd's
        return Found(0.0, {}, {}, 0.0, raised=traceback.format_exc())
    return Found(loss, gradients, buffers, evaluated)
