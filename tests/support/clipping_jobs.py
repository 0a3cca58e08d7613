"""What ranks do to find out whether gradients are clipped as those of the uncut model."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_

import stretto
from gradient_jobs import SETUPS, Parallel, batch, differing, layers, mean, plan_of, same
from models import Case, gradients, pipeline

Found = tuple[Tensor, dict[str, Any]]


def plain(case: Case, max_norm: float, norm_type: float) -> tuple[float, dict[str, Any]]:
    """The norm and the clipped gradients of the uncut model."""
    model = nn.Sequential(*case.modules())
    inputs, targets = case.batch()
    loss = case.loss(model(inputs), targets)
    (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
    norm = clip_grad_norm_(model.parameters(), max_norm, norm_type)
    named = model.named_parameters(remove_duplicate=False)
    return float(norm), {name: p.grad.numpy() for name, p in named if p.grad is not None}


def clipped(mesh: DeviceMesh, case: Case, every: list[tuple[float, float]], **changes: Any) -> list[Found]:
    """The norm and this rank's gradients after each clipping, each of gradients of their own."""
    pipe = pipeline(mesh, case, **changes)
    found = []
    for max_norm, norm_type in every:
        pipe.step(*case.batch())
        found.append((pipe.clip_grad_norm_(max_norm, norm_type), gradients(pipe)))
    pipe.close()
    return found


def clipped_dynamic(mesh: DeviceMesh, case: Case, every: list[tuple[float, float]]) -> list[Found]:
    return clipped(mesh, case, every, dynamic_shapes=True)


def trained(mesh: DeviceMesh, case: Case, steps: int) -> dict[str, Any]:
    """The parameters after some steps with clipping."""
    pipe = pipeline(mesh, case)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    for _ in range(steps):
        pipe.step(*case.batch())
        pipe.clip_grad_norm_(0.05)
        optimizer.step()
    found = {name: p.detach().numpy() for name, p in pipe.named_parameters(remove_duplicate=False)}
    pipe.close()
    return found


def plain_trained(case: Case, steps: int) -> dict[str, Any]:
    model = nn.Sequential(*case.modules())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, targets = case.batch()
    for _ in range(steps):
        optimizer.zero_grad()
        case.loss(model(inputs), targets).backward()
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters(remove_duplicate=False)}


def in_setups(mesh: DeviceMesh, setup: str, schedule: str) -> list[str]:
    """Parameters that are frozen, unused or hooked, some of which have a gradient that does not count."""
    plan = plan_of(schedule)
    pipe = stretto.Pipeline(layers(plan.stages), plan=plan, loss=mean, mesh=mesh, timeout=30)
    model = nn.Sequential(*layers(plan.stages))
    SETUPS[setup](nn.Sequential(*[layer for name, layer in pipe.named_modules() if name.isdecimal()]))
    SETUPS[setup](model)
    x, y = batch()
    pipe.step(x, y)
    mean(model(x), y).backward()
    for _, parameter in pipe.named_parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    norm = pipe.clip_grad_norm_(0.01, 3)
    expected = clip_grad_norm_(model.parameters(), 0.01, 3)
    kept = [p for p in pipe.parameters() if not p.requires_grad and not torch.equal(p.grad, torch.ones_like(p))]  # type: ignore[arg-type]
    for parameter in pipe.parameters():
        parameter.grad = parameter.grad if parameter.requires_grad else None
    pipe.close()
    wrong = differing(pipe, model, 1e-11)
    return wrong + ["norm"] * (not torch.isclose(norm, expected, rtol=1e-12, atol=0)) + ["frozen"] * len(kept)


def main_grads(mesh: DeviceMesh, schedule: str) -> dict[str, Any]:
    """Float32 sums of bfloat16 parameters: clipped in place, and added to by the next step."""
    plan = plan_of(schedule)
    pipe = stretto.Pipeline(
        layers(plan.stages, dtype=torch.bfloat16), plan=plan, loss=mean, mesh=mesh, gradients="float32", timeout=30
    )
    x, y = (part.bfloat16() for part in batch())
    pipe.step(x, y)
    before = {name: None if grad is None else grad.clone() for name, grad in pipe.main_grads().items()}
    norm = pipe.clip_grad_norm_(0.1)
    after = {name: None if grad is None else grad.clone() for name, grad in pipe.main_grads().items()}
    pipe.step(x, y, accumulate=True)
    added = {name: None if grad is None else grad.clone() for name, grad in pipe.main_grads().items()}
    unset = all(parameter.grad is None for parameter in pipe.parameters())
    pipe.close()
    return {"norm": norm, "before": before, "after": after, "added": added, "unset": unset}


class Odd(nn.Module):
    """A sparse gradient, a complex one, one of a tensor without elements, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6, sparse=True, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.across = nn.Parameter(torch.randn(3, 6, dtype=torch.float64).T)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x[..., 0] > 0).long())
        turned = (x * self.turn).real + self.empty.sum()
        return x + rows + turned + turned @ self.across @ self.across.T


def odd(mesh: DeviceMesh, schedule: str, norm_type: float) -> list[str]:
    plan = plan_of(schedule)
    torch.manual_seed(3)
    model = nn.Sequential(*[Odd() for _ in range(max(plan.stages, 2))])
    torch.manual_seed(3)
    own = [Odd() for _ in range(max(plan.stages, 2))]
    pipe = stretto.Pipeline(own, plan=plan, loss=mean, mesh=mesh, timeout=30)
    x, y = batch()
    pipe.step(x, y)
    mean(model(x), y).backward()
    of = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in of.values() if grad.numel()]
    expected = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    norm = pipe.clip_grad_norm_(0.5, norm_type)
    factor = 0.5 / (expected + 1e-6)
    wrong = [
        name
        for name, p in pipe.named_parameters()
        if p.numel() and not same(p.grad.to_dense(), of[name] * factor, 1e-11)  # type: ignore[union-attr]
    ]
    pipe.close()
    return wrong + ["norm"] * (not torch.isclose(norm, expected, rtol=1e-12, atol=0))


def tensor_parallel(mesh: DeviceMesh, schedule: str, norm_type: float, partial: bool) -> tuple[list[str], float]:
    """Two stages, each of two tensor-parallel ranks, whose layers also have plain parameters; with `partial`, gradients
    of parameters that each rank has whole are sums that have yet to be computed.
    """
    del mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def made(number: int) -> nn.Sequential:
        torch.manual_seed(number)
        return nn.Sequential(Parallel(), nn.LayerNorm(6)).double()

    def build(number: int) -> nn.Module:
        layer = made(number)
        parallelize_module(layer[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return layer

    plan = plan_of(schedule)
    pipe = stretto.Pipeline(build, layer_count=plan.stages, plan=plan, loss=mean, mesh=mesh["pp"], timeout=30)
    model = nn.Sequential(*map(made, range(plan.stages)))
    x, y = batch()
    pipe.step(x, y)
    mean(model(x), y).backward()
    for parameter in pipe.parameters():
        grad = parameter.grad
        if partial and isinstance(grad, DTensor) and grad.placements == (Replicate(),):
            share = grad.to_local() * (0.25, 0.75)[mesh["tp"].get_local_rank()]
            parameter.grad = DTensor.from_local(share, mesh["tp"], [Partial()])
    norm, expected = pipe.clip_grad_norm_(0.1, norm_type), clip_grad_norm_(model.parameters(), 0.1, norm_type)
    of = dict(model.named_parameters())
    wrong = ["norm"] * (not torch.isclose(norm, expected, rtol=1e-12, atol=0))
    sharded = 0
    for name, parameter in pipe.named_parameters():
        grad = parameter.grad
        sharded += isinstance(grad, DTensor) and grad.placements == ((Partial(),) if partial else (Shard(0),))
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        wrong += [name] * (not same(whole, of[name].grad))
    pipe.close()
    return wrong + ["nothing is a DTensor"] * (not sharded), float(norm)


def not_finite(mesh: DeviceMesh) -> tuple[list[str], bool, bool, float]:
    """What is said of a norm that is not finite; whether gradients are kept, or spoilt if not asked; a loss then."""
    case = Case("one_f_one_b", 2, 4)
    pipe = pipeline(mesh, case)
    said = []
    for value in (math.inf, math.nan):
        pipe.step(*case.batch())
        if mesh.get_local_rank() == 1:
            next(pipe.parameters()).grad.fill_(value)  # type: ignore[union-attr]
        before = [p.grad.clone() for p in pipe.parameters()]  # type: ignore[union-attr]
        try:
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        except stretto.PipelineError as error:
            said.append(str(error))
        kept = all(
            torch.equal(p.grad.nan_to_num(), grad.nan_to_num())  # type: ignore[union-attr]
            for p, grad in zip(pipe.parameters(), before, strict=True)
        )
    spoilt = bool(pipe.clip_grad_norm_(1.0).isnan()) and all(
        bool(p.grad.isnan().all())  # type: ignore[union-attr]
        for p in pipe.parameters()
    )
    loss = pipe.step(*case.batch()).loss
    pipe.close()
    return said, kept, spoilt, loss


SENSELESS: dict[str, tuple[Any, ...]] = {
    "max_norm is a number of at least 0 (got -1)": (-1,),
    "max_norm is a number of at least 0 (got nan)": (math.nan,),
    "max_norm is a number of at least 0 (got '1')": ("1",),
    "norm_type is a number above 0, or inf (got 0)": (1.0, 0),
    "norm_type is a number above 0, or inf (got -inf)": (1.0, -math.inf),
    "norm_type is a number above 0, or inf (got nan)": (1.0, math.nan),
    "norm_type is a number above 0, or inf (got 'inf')": (1.0, "inf"),
}


def senseless(mesh: DeviceMesh, given: tuple[Any, ...]) -> str:
    return _said(mesh, lambda pipe: pipe.clip_grad_norm_(*given))


def mismatched(mesh: DeviceMesh, what: str) -> str:
    """One rank is asked for something else than the other."""
    first = mesh.get_local_rank() == 0
    calls: dict[str, Callable[[Any], object]] = {
        "max_norm": lambda pipe: pipe.clip_grad_norm_(1.0 if first else 2.0),
        "norm_type": lambda pipe: pipe.clip_grad_norm_(1.0, 2.0 if first else math.inf),
        "error": lambda pipe: pipe.clip_grad_norm_(1.0, error_if_nonfinite=first),
        "senseless": lambda pipe: pipe.clip_grad_norm_(1.0 if first else -1.0),
        "step": lambda pipe: pipe.clip_grad_norm_(1.0) if first else pipe.step(*_ones()),
        "evaluation": lambda pipe: pipe.clip_grad_norm_(1.0) if first else pipe.eval_step(*_ones()),
    }
    return _said(mesh, calls[what])


def absent(mesh: DeviceMesh) -> str:
    """A rank that goes on without clipping, until the other has given up."""
    if mesh.get_local_rank():
        return _said(mesh, lambda _: dist.barrier(), timeout=5.0)
    said = _said(mesh, lambda pipe: pipe.clip_grad_norm_(1.0), timeout=5.0)
    dist.barrier()
    return said


def after_the_end(mesh: DeviceMesh) -> list[str]:
    """After a step that failed, and after close()."""
    said = []
    for end in (lambda pipe: pipe.step(torch.ones(1, 2), torch.ones(1, 2)), lambda pipe: pipe.close()):
        pipe = _pipeline(mesh)
        for call in (end, lambda pipe: pipe.clip_grad_norm_(1.0)):
            try:
                call(pipe)
            except stretto.PipelineError as error:
                said.append(str(error))
    return said


def _ones() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 2), torch.ones(4, 2)


def _pipeline(mesh: DeviceMesh, timeout: float = 30.0) -> stretto.Pipeline:
    torch.manual_seed(0)
    plan = stretto.schedules.one_f_one_b(devices=2, microbatches=4)
    return stretto.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], plan=plan, loss=F.mse_loss, mesh=mesh, timeout=timeout)


def _said(mesh: DeviceMesh, call: Callable[[Any], object], timeout: float = 30.0) -> str:
    """What a pipeline says to a call after its first step, and to a step after that."""
    pipe = _pipeline(mesh, timeout)
    pipe.step(*_ones())
    try:
        call(pipe)
    except stretto.PipelineError as error:
        return str(error)
    return ""
