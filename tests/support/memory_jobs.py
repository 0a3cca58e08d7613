"""What ranks do to find out whether a memory policy changes anything but memory."""

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
import stretto.pipeline.saving as saving
from mesh_jobs import Member, Sizes
from models import Case, disturb, gradients, pipeline
from moe_jobs import CONFIG, DEVICE, batch
from strategies import SCHEDULES
from stretto.costs import Link
from stretto.model import CausalLM, causal_lm_loss
from stretto.model.blocks import Block
from stretto.moe import AllToAll
from stretto.pipeline.compressed import compressed_bytes
from stretto.program.task import Kind

Found = tuple[list[float], dict[str, Any]]
"""The losses of all steps, and the gradients of the last."""


def each(mesh: DeviceMesh, job: Callable[..., Any], runs: list[tuple[Any, ...]]) -> list[Any]:
    """What a job finds in each of several runs, one after the other."""
    return [job(mesh, *arguments) for arguments in runs]


def trained(mesh: DeviceMesh, case: Case, policy: Any) -> tuple[Found, int, int]:
    """The same with how many passes left, and how much host memory they took."""
    pipe = pipeline(mesh, case, memory=policy)
    losses = [pipe.step(*case.batch()).loss for _ in range(case.steps)]
    left = sum(task.kind is Kind.OFFLOAD for task in pipe._binding.tasks)
    found = (losses, gradients(pipe)), left, pipe._binding._host_pool.nbytes
    pipe.close()
    return found


class Ragged(nn.Module):
    """Passes on as many rows as the data says, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.cat((x[:1], x[1:][x[1:, 0] > -1.0]))
        return kept + nn.functional.dropout(torch.tanh(self.inner(self.norm(kept))), 0.2)


def many_steps(mesh: DeviceMesh, schedule: str, policy: Any, steps: int) -> Found:
    """Steps whose batches and rows differ, with an optimizer: what a reused buffer holds would show in the next."""
    torch.manual_seed(3)
    plan = SCHEDULES[schedule].make(devices=mesh.size(), microbatches=6)
    layers = [Ragged().to(DEVICE) for _ in range(plan.stages)]
    pipe = stretto.Pipeline(
        layers,
        plan=plan,
        loss=lambda out, _: out.square().mean(),
        mesh=mesh,
        memory=policy,
        dynamic_shapes=True,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        rows = [int(torch.randint(2, 30, ())) for _ in range(6)]
        inputs, targets = [torch.randn(count, 8).to(DEVICE) for count in rows], [torch.zeros(1, device=DEVICE)] * 6
        result = pipe.step(inputs, targets)
        losses.append(result.loss)
        optimizer.step()
    found = losses, {name: grad.cpu().numpy() for name, grad in _grads(pipe)}
    pipe.close()
    return found


def with_experts(mesh: DeviceMesh, sizes: Sizes, schedule: str, policy: Any, **more: Any) -> tuple[Found, int]:
    """Two steps of a mixture of experts on a mesh, and how many passes left."""
    member = Member(mesh, sizes)
    config = dataclasses.replace(CONFIG, num_hidden_layers=4)
    torch.manual_seed(1)
    model = CausalLM(config, balance=True).to(DEVICE, torch.float32)
    pipe = stretto.Pipeline(
        model.layers(), plan=member.plan(schedule), loss=causal_lm_loss, mesh=member.mesh, memory=policy, **more
    )
    tokens, targets = (member.own(tensor) for tensor in batch(config, 16 * member.shape.replicas))
    losses = [pipe.step(tokens, targets).loss for _ in range(2)]
    left = sum(task.kind is Kind.OFFLOAD for task in pipe._binding.tasks)
    found = (losses, {name: grad.cpu().numpy() for name, grad in _grads(pipe)}), left
    pipe.close()
    return found


def sites_of_a_step(mesh: DeviceMesh, sites: dict[str, Any]) -> set[str]:
    """The sites of a mixture of experts by a dry run, before a step by the same policy."""
    member = Member(mesh, {"pp": 2, "ep": 2})
    config = dataclasses.replace(CONFIG, num_hidden_layers=4)
    model = CausalLM(config, balance=True).to(DEVICE)
    pipe = stretto.Pipeline(
        model.layers(), plan=member.plan("interleaved"), loss=causal_lm_loss, mesh=member.mesh, memory=sites
    )
    tokens, targets = (member.own(tensor) for tensor in batch(config, 16 * member.shape.replicas))
    report = pipe.dry_run(tokens, targets)
    pipe.step(tokens, targets)
    pipe.close()
    return {site.label for stage in report.stages for site in stage.sites}


def said_of_patterns(mesh: DeviceMesh, sites: dict[str, Any], dry: bool) -> tuple[str, list[str]]:
    """What two steps of a mixture of experts say about a policy, or two dry runs: an error, and warnings."""
    member = Member(mesh, {"pp": 2, "ep": 2})
    config = dataclasses.replace(CONFIG, num_hidden_layers=4)
    torch.manual_seed(1)
    model = CausalLM(config).to(DEVICE)
    for block in model.modules():
        if isinstance(block, Block):
            block.idle = nn.Linear(2, 2, bias=False).requires_grad_(False)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = stretto.Pipeline(
            model.layers(), plan=member.plan("interleaved"), loss=causal_lm_loss, mesh=member.mesh, memory=sites
        )
        try:
            for _ in range(2):
                batches = (member.own(tensor) for tensor in batch(config, 16 * member.shape.replicas))
                (pipe.dry_run if dry else pipe.step)(*batches)
        except stretto.PipelineError as refused:
            error = str(refused)
    pipe.close()
    return error, [str(it.message) for it in caught if "memory names" in str(it.message)]


def filled(mesh: DeviceMesh, policy: Any) -> tuple[Found, int]:
    """The same where PyTorch fills new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return with_experts(mesh, {"pp": 2, "ep": 2}, "interleaved", policy)
    finally:
        torch.use_deterministic_algorithms(False)


def after_a_failure(mesh: DeviceMesh, case: Case, policy: Any) -> tuple[str, Found]:
    """What a step says in which a rank fails while something comes back, and what a new pipeline finds."""
    pipe = pipeline(mesh, case, memory=policy)
    pipe.step(*case.batch())
    back = next((at for at, task in enumerate(pipe._binding.tasks) if task.kind is Kind.ONLOAD), None)
    if mesh.get_local_rank() == 0:
        assert back is not None

        def fail() -> None:
            raise ValueError("out of luck")

        disturb(pipe, back + 1, fail)
    said = ""
    try:
        pipe.step(*case.batch())
    except (ValueError, stretto.StrettoError) as error:
        said = str(error)
    pipe.close()
    del pipe
    found, *_ = trained(mesh, case, policy)
    return said, found


class Counting(AllToAll):
    """Counts how often tokens are sent to experts."""

    sent = 0

    def dispatch(self, *given: Any) -> Any:
        Counting.sent += 1
        return super().dispatch(*given)


def dispatches(mesh: DeviceMesh, policy: Any) -> int:
    """How often this rank sends tokens to experts in a step of a mixture of experts."""
    Counting.sent = 0
    with_experts(mesh, {"pp": 2, "ep": 2}, "interleaved", policy, exchange=Counting)
    return Counting.sent


def _grads(pipe: stretto.Pipeline) -> list[tuple[str, Tensor]]:
    return [(name, it.grad) for name, it in pipe.named_parameters() if it.grad is not None]


def refused(mesh: DeviceMesh, options: list[dict[str, Any]]) -> str:
    """What a pipeline with these options says, of which each rank is given its own."""
    case = Case("one_f_one_b", mesh.size(), 4, layers=4)
    try:
        pipe = pipeline(mesh, case, **options[mesh.get_rank() % len(options)])
        pipe.step(*case.batch())
    except stretto.StrettoError as error:
        return str(error)
    return ""


def recorded(mesh: DeviceMesh, schedule: str) -> list[tuple[str, str]]:
    """The copies of a recorded step: each with the lane on which it was recorded."""
    case = Case(schedule, mesh.size(), 8)
    pipe = pipeline(mesh, case, memory=stretto.Memory(sites={"*": "offload"}, min_bytes=0))
    timeline = pipe.step(*case.batch(), record=True).timeline
    pipe.close()
    spans = () if timeline is None else timeline.spans()
    return [(str(it.task), it.task.lane.name) for it in spans if it.task.kind in (Kind.OFFLOAD, Kind.ONLOAD)]


class Scaled(nn.Module):
    """Two products with weights, in modules or not."""

    def __init__(self, frozen: bool, function: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256, bias=False)
        self.second.weight.requires_grad_(not frozen)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return nn.functional.linear(y, self.second.weight) if self._function else self.second(y)


def compressed_shapes(mesh: DeviceMesh, frozen: bool, function: bool) -> set[tuple[int, ...]]:
    """The shapes of the tensors that a step under autocast stores in float8."""
    shapes: set[tuple[int, ...]] = set()

    def noted(saved: Tensor, features: int) -> Tensor:
        shapes.add(tuple(saved.shape))
        return compressed_bytes(saved, features)

    plan = SCHEDULES["gpipe"].make(devices=1, microbatches=2)
    policy = stretto.Memory(sites={"*": "fp8"}, min_bytes=0)
    layers = [Scaled(frozen, function).to(DEVICE) for _ in range(2)]
    pipe = stretto.Pipeline(layers, plan=plan, loss=lambda out, _: out.square().mean(), mesh=mesh, memory=policy)
    x = torch.randn(8, 256, device=DEVICE)
    with mock.patch.object(saving, "compressed_bytes", noted), torch.autocast(DEVICE.type, torch.bfloat16):
        pipe.step(x, x)
    pipe.close()
    return shapes


def said_of_float8(mesh: DeviceMesh, dtype: torch.dtype) -> list[str]:
    """What two steps of a model of this dtype warn of."""
    plan = SCHEDULES["gpipe"].make(devices=1, microbatches=2)
    layers = [Scaled(frozen=False, function=False).to(DEVICE, dtype)]
    policy = stretto.Memory(preset="k2", sites={"*": "fp8"}, min_bytes=0)
    pipe = stretto.Pipeline(layers, plan=plan, loss=lambda out, _: out.square().mean(), mesh=mesh, memory=policy)
    x = torch.randn(8, 256, device=DEVICE, dtype=dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step(x, x)
    pipe.close()
    return [str(warning.message) for warning in caught]


class CompressedFound(NamedTuple):
    """What steps with tensors in float8 give, and the bytes of a microbatch by a dry run."""

    losses: list[float]
    gradients: dict[str, Any]
    experts: int
    """What experts keep or offload."""
    kept: int
    """What stays on the device of all sites."""


def compressed(mesh: DeviceMesh, sizes: Sizes, schedule: str, policy: Any) -> CompressedFound:
    """Two steps of a mixture of experts in bfloat16, whose rows are at least as long as a tile."""
    member = Member(mesh, sizes)
    config = dataclasses.replace(CONFIG, num_hidden_layers=4, hidden_size=128, moe_intermediate_size=128)
    torch.manual_seed(1)
    model = CausalLM(config).to(DEVICE, torch.bfloat16)
    pipe = stretto.Pipeline(
        model.layers(), plan=member.plan(schedule), loss=causal_lm_loss, mesh=member.mesh, memory=policy
    )
    tokens, targets = (member.own(tensor) for tensor in batch(config, 16 * member.shape.replicas))
    report = pipe.dry_run(tokens, targets)
    losses = [pipe.step(tokens, targets).loss for _ in range(2)]
    gradients = {name: grad.float().cpu().numpy() for name, grad in _grads(pipe)}
    pipe.close()
    sites = [site for stage in report.stages for site in stage.sites if site.label != "loss"]
    experts = sum(site.kept + site.offloaded for site in sites if "experts" in site.label)
    return CompressedFound(losses, gradients, experts, sum(site.kept for site in sites))


def chosen(mesh: DeviceMesh, case: Case, costs: stretto.Costs, policy: Any) -> tuple[Found, Any, list[int], str]:
    """What steps find with a policy that costs complete, the choice, what each stage offloads, and what is logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("stretto.pipeline.pipeline")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        pipe = pipeline(mesh, case, memory=policy, costs=costs)
    finally:
        log.removeHandler(handler)
    losses = [pipe.step(*case.batch()).loss for _ in range(case.steps)]
    found = losses, gradients(pipe)
    report = pipe.dry_run(*case.batch())
    pipe.close()
    return found, pipe.memory_choice, [stage.offloaded for stage in report.stages], "\n".join(lines)


def counted(mesh: DeviceMesh, case: Case, policy: Any, costs: stretto.Costs) -> tuple[stretto.Costs, list[float]]:
    """The costs of a dry run, and each rank's bytes by it."""
    pipe = pipeline(mesh, case, memory=policy)
    report = pipe.dry_run(*case.batch())
    pipe.close()
    return report.costs(costs, host=Link(bandwidth=1e9)), [float(rank.total) for rank in report.ranks]


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def compressed_linears(mesh: DeviceMesh, schedule: str, action: Any = "fp8") -> dict[str, list[float]]:
    """The gradients of four stages on two ranks, on every rank all of them."""
    torch.manual_seed(1)
    layers = [Tanh().to(DEVICE, torch.bfloat16) for _ in range(4)]
    plan = SCHEDULES[schedule].make(devices=2, microbatches=4)
    policy = stretto.Memory(sites={"*": action}, min_bytes=0)
    pipe = stretto.Pipeline(layers, plan=plan, loss=lambda y, _: y.float().square().mean(), mesh=mesh, memory=policy)
    x = torch.randn(16, 128, device=DEVICE).bfloat16()
    pipe.step(x, x)
    every: list[Any] = [None] * 2
    dist.all_gather_object(every, {name: grad.flatten().tolist() for name, grad in _grads(pipe)})
    pipe.close()
    return dict(sorted((every[0] | every[1]).items()))


class Quantizes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        quantized = torch.quantize_per_tensor(x, 0.05, 10, torch.quint8)
        ctx.save_for_backward(quantized)
        return quantized.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].dequantize()  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Saves a quantized tensor, and has a site whose first tensor is on no device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.site = nn.Linear(8, 8), OddSite()

    def forward(self, x: Tensor) -> Tensor:
        quantized = Quantizes.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return self.site(torch.empty(2, device="meta"), quantized)  # type: ignore[no-any-return]


class OddSite(nn.Module):
    def forward(self, _: Tensor, x: Tensor) -> Tensor:
        return x.sin().exp()


def with_odd_tensors(mesh: DeviceMesh, policy: Any) -> list[Any]:
    """The loss and gradients of a step."""
    torch.manual_seed(1)
    plan = SCHEDULES["interleaved"].make(devices=1, microbatches=4)
    layers = [Odd().to(DEVICE) for _ in range(2)]
    pipe = stretto.Pipeline(layers, plan=plan, loss=lambda y, _: y.square().mean(), mesh=mesh, memory=policy)
    x = torch.randn(4, 8, device=DEVICE)
    found = [pipe.step(x, x).loss, *(grad.tolist() for _, grad in _grads(pipe))]
    pipe.close()
    return found


def said_of_offload(mesh: DeviceMesh, min_bytes: int) -> list[tuple[str, str]]:
    """What two steps with offload warn of."""
    plan = SCHEDULES["gpipe"].make(devices=1, microbatches=4)
    policy = stretto.Memory(sites={"*": "offload"}, min_bytes=min_bytes)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(DEVICE)]
    pipe = stretto.Pipeline(layers, plan=plan, loss=lambda y, _: y.square().mean(), mesh=mesh, memory=policy)
    x = torch.randn(8, 8, device=DEVICE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step(x, x)
    host = pipe.dry_run(x, x).ranks[0].host
    pipe.close()
    assert bool(host) == (min_bytes == 0)
    return [(str(warning.message), warning.filename) for warning in caught]
