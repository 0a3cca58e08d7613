"""What ranks do to find out whether a dry run predicts a step, and leaves nothing behind."""

import dataclasses
import random
from collections import deque
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
from alive import Alive, MostAlive
from mesh_jobs import MICROBATCHES, Member, Sizes
from models import Case, pipeline
from moe_jobs import CONFIG, DEVICE, batch
from stretto.model import CausalLM, causal_lm_loss
from stretto.pipeline.memory_report import MemoryReport
from stretto.schedules import gpipe, one_f_one_b

DIM, HIDDEN, ROWS = 8, 24, 5


class SwiGLU(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class Mlp(nn.Module):
    """Of each row it saves x, the norm's two numbers and output, gate, up, SiLU of gate, and the product."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(dim), SwiGLU()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.act(self.gate(y), self.up(y)))  # type: ignore[no-any-return]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def mlps(count: int, dim: int = DIM, hidden: int = HIDDEN) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Mlp(dim, hidden).to(DEVICE, torch.float64) for _ in range(count)]


def inputs_of(microbatches: int, rows: int = ROWS, dim: int = DIM) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(microbatches * rows, dim, dtype=torch.float64).to(DEVICE)


def reported(mesh: DeviceMesh, policy: dict[str, Any], *, targets: bool = True) -> MemoryReport:
    """The report of six layers on two ranks."""
    memory = stretto.Memory(**policy)
    plan = gpipe(devices=2, microbatches=4)
    pipe = stretto.Pipeline(mlps(6), plan=plan, loss=squares, mesh=mesh, memory=memory)
    x = inputs_of(4)
    report = pipe.dry_run(x, x if targets else None)
    pipe.close()
    return report  # type: ignore[no-any-return]


def as_without(mesh: DeviceMesh, case: Case, policy: dict[str, Any]) -> tuple[list[str], MemoryReport]:
    """What differs between two steps of a pipeline and the same after dry runs, to the bit."""
    results: list[Any] = []
    for dry in (False, True):
        pipe = pipeline(mesh, case, memory=stretto.Memory(**policy))
        found = []
        for _ in range(2):
            if dry:
                report = pipe.dry_run(*case.batch())
            found.append(torch.tensor(pipe.step(*case.batch()).loss))
            found += [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        results.append(found)
        pipe.close()
    same = len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    return [] if same else [f"{case} differs after a dry run"], report


def _nothing(*_: Any) -> None: ...


class Odd(nn.Module):
    """A layer that changes all that a forward can change, and fails if told to."""

    __slots__ = ("ticks",)

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0
        self.register_forward_pre_hook(_nothing)
        self.norm, self.linear, self.side = nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.register_buffer("replaced", torch.zeros(3))
        self.seen, self.total, self.fails = 0, torch.zeros(()), False
        self.table = nn.Embedding(DIM, DIM, max_norm=0.1)
        self.held: list[Any] = [torch.zeros(()), {"calls": deque(maxlen=2)}]
        self.generator = torch.Generator(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.ticks += 1
        self._forward_pre_hooks.clear()
        self.total += 1
        self.held[0] += 1
        self.held[1]["calls"].append(random.random() + np.random.rand())
        self.held.append(torch.rand((), generator=self.generator, device=x.device))
        self.replaced = self.replaced + 1
        x = F.dropout(self.norm(x), 0.5)
        self.side(x.detach()).sum().backward()  # which leaves gradients
        x.detach().add_(0)
        if self.fails:
            raise RuntimeError("this layer fails")
        return self.linear(x + self.table(torch.arange(len(x), device=x.device) % DIM))  # type: ignore[no-any-return]


class Greedy(nn.Module):
    """Changes its input, which is the user's own batch, in place."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x.float()


def _state(pipe: Any, layers: list[nn.Module], x: Tensor) -> dict[str, Any]:
    """All that a dry run might change."""
    odd = [module for layer in layers for module in layer.modules() if isinstance(module, Odd)]
    stages, binding = pipe._stages.values(), pipe._binding
    return {
        "parameters": [p.detach().clone() for p in pipe.parameters()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in pipe.parameters()],
        "hooks": [len(p._backward_hooks or ()) for p in pipe.parameters()],
        "buffers": [(id(b), b.clone()) for layer in layers for b in layer.buffers()],
        "attributes": [
            (layer.seen, layer.ticks, len(layer._forward_pre_hooks), id(layer.total), layer.total.clone())
            for layer in odd
        ],
        "containers": [(list(layer.held), layer.held[0].clone(), list(layer.held[1]["calls"])) for layer in odd],
        "generators": [layer.generator.get_state() for layer in odd],
        "other generators": (
            random.getstate(),
            [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        ),
        "forwards": ["forward" in vars(module) for layer in layers for module in layer.modules()],
        "generator": torch.get_rng_state(),
        "steps": pipe.step_count,
        "shapes": len(binding._shape_cache._steps),
        "host memory": binding.host_pool.nbytes,
        "sums": [(id(sum_), sum_.value is None) for sum_ in pipe._gradients._sums.values()],
        "stages": [(s._searching, s.leaving, s._parameters, s._passes, len(s._others)) for s in stages],
        "inputs": x.clone(),
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def remains(mesh: DeviceMesh, gradients: str, steps: int, fails: bool) -> list[str]:
    """What is different after a dry run, or one that fails."""
    torch.manual_seed(1)
    layers = [layer.to(DEVICE) for layer in (Greedy(), Odd(), Odd(), nn.Linear(DIM, DIM))]
    x = inputs_of(2).float()
    pipe = stretto.Pipeline(
        layers,
        plan=one_f_one_b(devices=2, microbatches=2),
        loss=squares,
        mesh=mesh,
        gradients=gradients,  # type: ignore[arg-type]
        memory=stretto.Memory(sites={"*norm": "recompute", "*linear": "offload"}, min_bytes=0),
    )
    called: list[int] = []
    for parameter in pipe.parameters():
        parameter.register_hook(lambda _: called.append(1))
    for _ in range(steps):
        pipe.step(x.clone(), x)
    called.clear()
    layers[2].fails = fails
    here = list(pipe.layers.values())
    before = _state(pipe, here, x)
    try:
        pipe.dry_run(x, x)
        said = ""
    except Exception as error:
        said = str(error)
    after = _state(pipe, here, x)
    wrong = [f"{name} changed" for name, value in before.items() if not _same(value, after[name])]
    pipe.close()
    return wrong + ["a hook ran"] * bool(called) + ([] if bool(said) == fails else [f"it said {said!r}"])


def measured(mesh: DeviceMesh, schedule: str, policy: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """What a dry run says of this rank, and what a step really takes: gradients, receive buffers and host memory."""
    case = Case(schedule, mesh.size(), 6, layers=10, dtype=dtype)
    pipe = pipeline(mesh, case, memory=stretto.Memory(**policy))
    mine = pipe.dry_run(*case.batch()).ranks[pipe.rank]
    pipe.step(*case.batch())
    flat = {p.grad.untyped_storage()._cdata: p.grad.untyped_storage().nbytes() for p in pipe.parameters()}
    sums = {b.flat.untyped_storage()._cdata: b.flat.nbytes for b in pipe._gradients._buffers if b.flat is not None}
    buffers = sum(t.nbytes for b in pipe._binding._recv_buffers._buffers.values() for t in b.tensors)
    weights = sum(p.nbytes for p in pipe.parameters())
    host = pipe._binding.host_pool.nbytes
    pipe.close()
    copied = sum(nbytes for at, nbytes in flat.items() if at not in sums) if dtype is torch.bfloat16 else 0
    at_peak = sum((flat | sums).values()) - min(copied, mine.activations)
    return (mine.weights, mine.gradients, mine.buffers, mine.host), (weights, at_peak, buffers, host)


def peaks(mesh: DeviceMesh, schedule: str, policy: dict[str, Any]) -> tuple[int, int]:
    """The bytes of gradients, activations and buffers by a dry run, and the most that was alive after a task."""
    layers, dim, hidden, rows = 8, 32, 96, 64
    case = Case(schedule, mesh.size(), 6)
    pipe = stretto.Pipeline(
        mlps(layers, dim, hidden), plan=case.plan(), loss=squares, mesh=mesh, memory=stretto.Memory(**policy)
    )
    x = inputs_of(6, rows, dim)
    mine = pipe.dry_run(x, x).ranks[pipe.rank]
    seen = [0]
    with Alive() as alive:
        for stage in pipe._stages.values():
            for name in ("forward", "backward", "weight"):
                patched = mock.patch.object(stage, name, _watching(getattr(stage, name), pipe, x, alive, seen))
                patched.start()
        executor = pipe._binding._executor
        executor.bind(executor._lanes, pipe._binding._bound)
        pipe.step(x, x)
    mock.patch.stopall()
    pipe.close()
    return mine.gradients + mine.activations + mine.buffers, max(seen)


def within_tasks(mesh: DeviceMesh, policy: dict[str, Any]) -> tuple[int, int]:
    """What a dry run says of one microbatch on one rank, and the most that was alive after any operation."""
    plan = gpipe(devices=1, microbatches=1)
    pipe = stretto.Pipeline(mlps(12, 16, 48), plan=plan, loss=squares, mesh=mesh, memory=stretto.Memory(**policy))
    x = inputs_of(1, rows=256, dim=16)
    return _predicted_and_alive(pipe, x)


def _predicted_and_alive(pipe: stretto.Pipeline, x: Tensor) -> tuple[int, int]:
    mine = pipe.dry_run(x, x).ranks[0]
    with MostAlive((*pipe.parameters(), x)) as alive:
        pipe.step(x, x)
    pipe.close()
    return mine.gradients + mine.activations + mine.buffers, alive.most


class PassesOn(nn.Module):
    """Hands on a large tensor that nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(16, 48).double()

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.mlp(value), value.new_zeros(4096)
        return self.mlp(value[0]), value[1]


def passing_on(mesh: DeviceMesh, schedule: str) -> tuple[int, int]:
    """What a dry run says of several stages on one rank, and the most that was alive after any operation."""
    plan = getattr(stretto.schedules, schedule)(devices=1, microbatches=4)
    layers = [PassesOn().to(DEVICE) for _ in range(4)]
    pipe = stretto.Pipeline(layers, plan=plan, loss=lambda y, _: y[0].square().mean() + y[1].mean(), mesh=mesh)
    x = inputs_of(4, rows=16, dim=16)
    return _predicted_and_alive(pipe, x)


def _watching(run: Any, pipe: Any, x: Tensor, alive: Alive, seen: list[int]) -> Any:
    def watched(*arguments: Any, **named: Any) -> Any:
        out = run(*arguments, **named)
        arenas = (arena.memory for arena in pipe._binding.host_pool._arenas.values())
        seen.append(alive.bytes(pipe._module, (x, *arenas)))
        return out

    return watched


def on_mesh(
    mesh: DeviceMesh, sizes: Sizes, schedule: str, policy: dict[str, Any]
) -> tuple[list[str], MemoryReport, int]:
    """What differs after a dry run of our own model, the report, and the bytes of this rank's weights."""
    member = Member(mesh, sizes)
    config = dataclasses.replace(CONFIG, num_hidden_layers=4)
    tokens, targets = (member.own(tensor) for tensor in batch(config, 2 * MICROBATCHES * member.shape.replicas))
    results: list[list[Tensor]] = []
    for dry in (False, True):
        torch.manual_seed(1)
        model = CausalLM(config).to(DEVICE, torch.float64)
        plan, memory = member.plan(schedule), stretto.Memory(**policy)
        pipe = stretto.Pipeline(model.layers(), plan=plan, loss=causal_lm_loss, mesh=member.mesh, memory=memory)
        if dry:
            report = pipe.dry_run(tokens, targets)
        found = [torch.tensor(pipe.step(tokens, targets).loss)]
        found += [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        found += [b.clone() for layer in pipe.layers.values() for b in layer.buffers()]
        results.append(found)
        held = [*pipe.parameters(), *(b for layer in pipe.layers.values() for b in layer.buffers())]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}  # experts are parts of one
        pipe.close()
    wrong = [f"tensor {k} differs" for k, both in enumerate(zip(*results, strict=True)) if not torch.equal(*both)]
    return wrong, report, sum(storages.values())


class Clips(nn.Linear):
    """Changes its parameter in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def refused(mesh: DeviceMesh, how: str, steps: bool = False) -> str:
    """What a dry run that cannot run says on this rank, or a step."""
    sites = {"*": "offload"} if how in ("host_bytes", "machine", "ranks of a machine") else {}
    memory = stretto.Memory(sites=sites, min_bytes=0, host_bytes=1 << 20 if how == "host_bytes" else None)
    layers = mlps(6)
    if how == "lazy":
        layers[0] = nn.LazyLinear(DIM, dtype=torch.float64)
    if how == "clips":
        layers[0] = Clips(DIM, DIM, dtype=torch.float64, device=DEVICE)
    if how == "some targets":
        mesh = Member(mesh, {"dp": 2, "pp": 2}).mesh
    pipe = stretto.Pipeline(layers, plan=gpipe(devices=2, microbatches=4), loss=squares, mesh=mesh, memory=memory)
    x = inputs_of(4)
    targets = None if how == "some targets" and dist.get_rank() == 3 else x
    room = {"machine": 1 << 20, "ranks of a machine": 10 << 20}.get(how)
    available = mock.patch("stretto.pipeline.host_pool._available_bytes", return_value=room)
    try:
        with available if room else torch.set_grad_enabled(how != "no gradients"):
            (pipe.step if steps else pipe.dry_run)(None if how == "no inputs" else x, targets)
    except stretto.StrettoError as error:
        return str(error)
    finally:
        pipe.close()
    return "nothing"
