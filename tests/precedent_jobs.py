"""What ranks do to find out how messages are known: by what they look like, or by an earlier step that began alike."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
from stretto.execute.wires import Wire

WIDTH, STAGES, MICROBATCHES = 6, 2, 4


class Layer(nn.Module):
    """Hands on what `then` makes of its output."""

    def __init__(self, number: int, then: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear, self.then = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), then

    def forward(self, value: Any) -> Any:
        x, factor = (value["x"], value.get("factor", 1.0)) if isinstance(value, dict) else (value, 1.0)
        y = x + torch.tanh(self.linear(x)) * factor
        return y if self.then is None else self.then(y)


def mean(output: Any, target: Tensor) -> Tensor:
    return (output["x"] if isinstance(output, dict) else output).pow(2).mean() + 0 * target.sum()


def batch(rows: int, seed: int = 0, tokens: int = 3) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, tokens, WIDTH, generator=made, dtype=torch.float64)
    return x, torch.zeros(rows, dtype=torch.float64)


def pipeline(mesh: DeviceMesh, then: Callable[[Tensor], Any] | None = None, **options: Any) -> stretto.Pipeline:
    layers = [Layer(0, then), Layer(1)]
    plan = stretto.one_f_one_b(devices=STAGES, microbatches=MICROBATCHES)
    return stretto.Pipeline(layers, plan=plan, loss=mean, mesh=mesh, timeout=20, **options)


def expected(then: Callable[[Tensor], Any] | None, pieces: list[Any], *, frozen: bool = False) -> dict[str, Tensor]:
    """The gradients of one process that knows nothing of pipelines."""
    model = nn.Sequential(Layer(0, then), Layer(1))
    model[0].requires_grad_(not frozen)
    for piece in pieces:
        (mean(model(piece), torch.zeros(1)) / len(pieces)).backward()
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
    said, send = [0], Wire.send

    def counted(self: Wire, *given: Any) -> None:
        said[0] += 1
        send(self, *given)

    Wire.send = counted  # type: ignore[method-assign]
    try:
        yield said
    finally:
        Wire.send = send  # type: ignore[method-assign]


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
        pipe.step(inputs, [torch.zeros(1)] * MICROBATCHES)
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
    plan = stretto.one_f_one_b(devices=STAGES, microbatches=MICROBATCHES)
    pipe = stretto.Pipeline([Opening(0), Layer(1)], plan=plan, loss=mean, mesh=mesh, timeout=20)
    wrong = []
    for rows in (8, 4, 8, 4):
        x, _ = batch(rows)
        pieces = list(x.chunk(MICROBATCHES))
        pipe.step([Odd(piece) for piece in pieces], [torch.zeros(1)] * MICROBATCHES)
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
