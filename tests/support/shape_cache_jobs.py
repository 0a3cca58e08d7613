"""What ranks do to find out how messages are known: by what they look like, or by an earlier step that began alike."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
from devices import DEVICE
from stretto.execute.side_channel import SideChannel
from stretto.schedules import one_f_one_b

WIDTH, STAGES, MICROBATCHES = 6, 2, 4


class Layer(nn.Module):
    """Hands on what `then` makes of its output."""

    def __init__(self, number: int, then: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear, self.then = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).to(DEVICE), then

    def forward(self, value: Any) -> Any:
        x, factor = (value["x"], value.get("factor", 1.0)) if isinstance(value, dict) else (value, 1.0)
        y = x + torch.tanh(self.linear(x)) * factor
        return y if self.then is None else self.then(y)


def mean(output: Any, target: Tensor) -> Tensor:
    return (output["x"] if isinstance(output, dict) else output).pow(2).mean() + 0 * target.sum()


def batch(rows: int, seed: int = 0, tokens: int = 3) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, tokens, WIDTH, generator=made, dtype=torch.float64)
    return x.to(DEVICE), torch.zeros(rows, dtype=torch.float64, device=DEVICE)


def pipeline(mesh: DeviceMesh, then: Callable[[Tensor], Any] | None = None, **options: Any) -> stretto.Pipeline:
    layers = [Layer(0, then), Layer(1)]
    plan = one_f_one_b(devices=STAGES, microbatches=MICROBATCHES)
    return stretto.Pipeline(layers, plan=plan, loss=mean, mesh=mesh, timeout=20, **options)


def expected(then: Callable[[Tensor], Any] | None, pieces: list[Any], *, frozen: bool = False) -> dict[str, Tensor]:
    """The gradients of one process that knows nothing of pipelines."""
    model = nn.Sequential(Layer(0, then), Layer(1))
    model[0].requires_grad_(not frozen)
    for piece in pieces:
        (mean(model(piece), torch.zeros(1, device=DEVICE)) / len(pieces)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differing(pipe: stretto.Pipeline, wanted: dict[str, Tensor]) -> list[str]:
    mine = {name: p.grad for name, p in pipe.named_parameters()}
    return [
        name
        for name, grad in mine.items()
        if (grad is None) != (name not in wanted)
        or (grad is not None and not torch.allclose(grad, wanted[name], rtol=1e-12, atol=1e-15))
    ]


@contextmanager
def counting() -> Iterator[list[int]]:
    """How many words were sent ahead of messages."""
    said, send = [0], SideChannel.send

    def counted(self: SideChannel, *given: Any) -> None:
        said[0] += 1
        send(self, *given)

    SideChannel.send = counted  # type: ignore[method-assign]
    try:
        yield said
    finally:
        SideChannel.send = send  # type: ignore[method-assign]


def words(mesh: DeviceMesh, dynamic: bool) -> list[int]:
    """The words of each of some steps: A, A, B, A, B, evaluation of A, and of A again."""
    pipe, found = pipeline(mesh, dynamic_shapes=dynamic), []
    for rows in (8, 8, 12, 8, 12):
        with counting() as said:
            pipe.step(*batch(rows))
        found.append(said[0])
    for _ in range(2):
        with counting() as said:
            pipe.eval_step(*batch(8))
        found.append(said[0])
    return found


def many_shapes(mesh: DeviceMesh) -> list[str]:
    """More shapes than are remembered, twice."""
    pipe, wrong = pipeline(mesh), []
    for turn in range(2):
        for tokens in range(1, 70):
            x, y = batch(4, tokens, tokens)
            pipe.step(x, y, check_finite=False)
            if tokens in (1, 2, 68, 69):
                wrong += [f"{turn} {tokens} {name}" for name in differing(pipe, expected(None, list(x.chunk(4))))]
    return wrong


def changes(mesh: DeviceMesh) -> list[str]:
    """All that may change between steps and is seen: shapes, order of microbatches, freezing, modes, types."""
    pipe, wrong = pipeline(mesh), []

    def step(what: str, inputs: Any, pieces: list[Any], *, frozen: bool = False) -> None:
        pipe.step(inputs, [torch.zeros(1, device=DEVICE)] * MICROBATCHES)
        wrong.extend(f"{what} {name}" for name in differing(pipe, expected(None, pieces, frozen=frozen)))

    x, _ = batch(8)
    other, _ = batch(8, 1, 5)
    whole, parts = list(x.chunk(MICROBATCHES)), [*x.chunk(MICROBATCHES)[:2], *other.chunk(MICROBATCHES)[:2]]
    for turn in range(2):
        step(f"whole {turn}", whole, whole)
        step(f"mixed {turn}", parts, parts)
        step(f"turned round {turn}", parts[::-1], parts[::-1])
        dicts = [{"x": piece, "factor": 0.5 + turn} for piece in whole]
        step(f"values {turn}", dicts, dicts)
    for frozen in (True, False, True):
        for name, parameter in pipe.named_parameters():
            if name.startswith("0."):
                parameter.requires_grad_(not frozen)
        for _ in range(2):
            step(f"frozen {frozen}", whole, whole, frozen=frozen)
    return wrong


@dataclass
class Odd:
    """What pytrees know nothing of."""

    x: Tensor


class Opening(Layer):
    def forward(self, value: Any) -> Any:
        return super().forward(value.x)


def odd_inputs(mesh: DeviceMesh) -> list[str]:
    plan = one_f_one_b(devices=STAGES, microbatches=MICROBATCHES)
    pipe = stretto.Pipeline([Opening(0), Layer(1)], plan=plan, loss=mean, mesh=mesh, timeout=20)
    wrong = []
    for rows in (8, 4, 8, 4):
        x, _ = batch(rows)
        pieces = list(x.chunk(MICROBATCHES))
        pipe.step([Odd(piece) for piece in pieces], [torch.zeros(1, device=DEVICE)] * MICROBATCHES)
        wrong += differing(pipe, expected(None, pieces))
    return wrong


def by_data(x: Tensor) -> Tensor:
    """Fewer tokens if the first number says so."""
    return x[:, :1] if x.flatten()[0] > 0 else x


class Counting:
    """Hands on how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, x: Tensor) -> Any:
        self.times += 1
        return {"x": x, "factor": float(self.times)}


THEN: dict[str, Callable[[], Callable[[Tensor], Any]]] = {"shapes": lambda: by_data, "values": Counting}


def unforeseen(mesh: DeviceMesh, what: str, dynamic: bool) -> str:
    """Steps that begin alike, whose messages do not look alike."""
    pipe = pipeline(mesh, THEN[what](), dynamic_shapes=dynamic)
    alone, wrong = THEN[what](), []
    before = None
    try:
        for seed in range(6):
            x, y = batch(8, seed)
            before = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
            pipe.step(x, y)
            wrong += differing(pipe, expected(alone, list(x.chunk(MICROBATCHES))))
    except stretto.PipelineError as error:
        assert before is not None
        same = all(
            (p.grad is None) == (before[name] is None) and (p.grad is None or torch.equal(p.grad, before[name]))
            for name, p in pipe.named_parameters()
        )
        return f"{error}" if same else "gradients were changed"
    finally:
        pipe.close()
    return " ".join(wrong)


class Box:
    """A container of somebody's own, with something beside its tensor."""

    def __init__(self, x: Tensor, mode: Any) -> None:
        self.x, self.mode = x, mode


pytree.register_pytree_node(Box, lambda box: ([box.x], box.mode), lambda leaves, mode: Box(leaves[0], mode))


class Passing(nn.Module):
    """Hands its input on, made of its parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64, device=DEVICE)
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=torch.float64, device=DEVICE).requires_grad_(False)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64, device=DEVICE))

    def forward(self, value: Any) -> Any:
        if isinstance(value, Box):
            y = self.linear(value.x)
            return (y, y) if isinstance(value.mode, str) else (y,)
        if isinstance(value, tuple):
            return value
        x = self.frozen(value.to(self.frozen.weight.dtype)).double() + self.linear(value)
        return x.to(self.frozen.weight.dtype), x.to(self.scale.dtype)


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64, device=DEVICE)

    def forward(self, value: Any) -> dict[str, Tensor]:
        tensors = [part for part in value if isinstance(part, Tensor)]
        factors = [part for part in value if not isinstance(part, Tensor)]
        x = sum(part.double() for part in tensors)
        assert isinstance(x, Tensor)
        for factor in factors:
            x = x * (1 + abs(complex(factor)))
        return {"main": self.linear(x), "aux": x}


class Loss(nn.Module):
    """Uses what targets name, and in training all."""

    def forward(self, output: dict[str, Tensor], target: Any) -> Tensor:
        names = [name for name in output if name in target or self.training]
        total = sum((output[name].square().mean() for name in names), start=torch.zeros((), device=DEVICE))
        assert isinstance(total, Tensor)
        return total


def _seen(what: str) -> Iterator[tuple[Any, Any, Callable[[list[nn.Module], Loss], None]]]:
    """Inputs, targets, and what is done to layers and loss before each step."""
    x = batch(8)[0]
    pieces, main = list(x.chunk(MICROBATCHES)), [{"main": 0}] * MICROBATCHES

    def nothing(_: list[nn.Module], loss: Loss) -> None:
        loss.eval()

    def all_of_it(_: list[nn.Module], loss: Loss) -> None:
        loss.train()

    def cast(layers: list[nn.Module], loss: Loss, dtype: torch.dtype, buffer: bool = False) -> None:
        loss.eval()
        first = layers[0]
        assert isinstance(first, Passing)
        if buffer:
            first.scale = first.scale.to(dtype)
        else:
            first.frozen.float().to(dtype)

    for _ in range(2):
        match what:
            case "one tensor twice":
                yield [(piece, piece.clone()) for piece in pieces], main, nothing
                yield [(piece, piece) for piece in pieces], main, nothing
            case "shared memory":
                both = [torch.cat((piece, piece), 1) for piece in pieces]
                yield [(it[:, :3], it[:, 3:]) for it in both], main, nothing
                yield [(it[:, :3].clone(), it[:, 3:].clone()) for it in both], main, nothing
            case "zeros":
                for zero in (0.0, -0.0, 0j, float("nan"), 0, False):
                    yield [(piece, zero if zero == zero else 1.0) for piece in pieces], main, nothing
            case "contexts":
                for mode in (1, "1", 1.0, True):
                    yield [Box(piece, mode) for piece in pieces], main, nothing
            case "frozen types":
                for dtype in (torch.float32, torch.float64):
                    yield pieces, main, partial(cast, dtype=dtype)
            case "buffers":
                for dtype in (torch.float32, torch.float64):
                    yield pieces, main, partial(cast, dtype=dtype, buffer=True)
            case "targets":
                yield pieces, main, nothing
                yield pieces, [{"main": 0, "aux": 0}] * MICROBATCHES, nothing
            case "the loss's mode":
                yield pieces, main, nothing
                yield pieces, main, all_of_it


SEEN = (
    "one tensor twice",
    "shared memory",
    "zeros",
    "contexts",
    "frozen types",
    "buffers",
    "targets",
    "the loss's mode",
)


def seen(mesh: DeviceMesh, what: str) -> list[str]:
    """What can be seen when a step begins, changed from step to step: gradients are those of one process."""
    loss = Loss()
    plan = one_f_one_b(devices=STAGES, microbatches=MICROBATCHES)
    layers = [Passing(), Adding()]
    pipe = stretto.Pipeline(layers, plan=plan, loss=loss, mesh=mesh, timeout=20)
    wrong = []
    for number, (inputs, targets, prepare) in enumerate(_seen(what)):
        here = {int(name): layer for name, layer in pipe.named_modules() if "." not in name}
        alone: list[nn.Module] = [Passing(), Adding()]
        prepare(alone, loss)
        prepare([here.get(k, layer) for k, layer in enumerate(alone)], loss)
        pipe.step(inputs, targets)
        for piece, target in zip(inputs, targets, strict=True):
            (loss(alone[1](alone[0](piece)), target) / MICROBATCHES).backward()
        wanted = {
            f"{k}.{name}": p.grad
            for k, layer in enumerate(alone)
            for name, p in layer.named_parameters()
            if p.grad is not None
        }
        wrong += [f"{number} {name}" for name in differing(pipe, wanted)]
    return wrong


def nested(mesh: DeviceMesh, dynamic: bool) -> list[str]:
    """Inputs that have no strides, evaluation in inference mode, and a layer that was scripted."""

    class Pad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer(0)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.to_padded_tensor(0.0))  # type: ignore[no-any-return]

    plan = one_f_one_b(devices=STAGES, microbatches=MICROBATCHES)
    pipe = stretto.Pipeline([Pad(), Layer(1)], plan=plan, loss=mean, mesh=mesh, timeout=20, dynamic_shapes=dynamic)
    wrong = []
    for _ in range(2):
        x = batch(8)[0]
        pieces = [torch.nested.nested_tensor([a[:2], a[2:3]]) for a in (row for row in x[:MICROBATCHES])]
        pipe.step(pieces, [torch.zeros(1, device=DEVICE)] * MICROBATCHES)
        wanted = expected(None, [piece.to_padded_tensor(0.0) for piece in pieces])
        wrong += differing(pipe, {name.replace("0.", "0.inner.", 1): grad for name, grad in wanted.items()})
    return wrong


def inference(mesh: DeviceMesh) -> list[float]:
    pipe = pipeline(mesh)
    found = [pipe.eval_step(*batch(8)).loss]
    with torch.inference_mode():
        found += [pipe.eval_step(*batch(8)).loss, pipe.eval_step([*batch(8)[0].chunk(4)], batch(8)[1]).loss]
    return found


def scripted(mesh: DeviceMesh) -> bool:
    layers = [torch.jit.script(nn.Linear(WIDTH, WIDTH, dtype=torch.float64, device=DEVICE)), Layer(1)]
    plan = one_f_one_b(devices=STAGES, microbatches=MICROBATCHES)
    pipe = stretto.Pipeline(layers, plan=plan, loss=mean, mesh=mesh, timeout=20)
    pipe.step(*batch(8))
    return all(p.grad is not None for p in pipe.parameters())


def freezing_in_turns(mesh: DeviceMesh) -> list[int]:
    """The words of steps that train all and some in turns."""
    pipe, found = pipeline(mesh), []
    for turn in range(6):
        for name, parameter in pipe.named_parameters():
            if name.startswith("0."):
                parameter.requires_grad_(turn % 2 == 0)
        with counting() as said:
            pipe.step(*batch(8))
        found.append(said[0])
    return found
