"""What ranks of a mesh do to find out whether they train what one process would."""

import copy
import dataclasses
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import stretto
from causal_lms import LM, exact, uncut
from moe_jobs import CONFIG, DEVICE, batch
from strategies import SCHEDULES
from stretto.execute.team import Team
from stretto.ir.mesh import MeshShape
from stretto.model import CausalLM, causal_lm_loss, transformers_loss, update_router_biases
from stretto.moe import Experts, RoutedExperts, Router

MICROBATCHES = 8  # of each pipeline
Sizes = dict[str, int]


class Member:
    """This rank's place in a mesh of these sizes, and its part of what all replicas get."""

    def __init__(self, mesh: DeviceMesh, sizes: Sizes) -> None:
        self.shape = MeshShape.of(sizes)
        self.mesh = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _, self.replica = self.shape.place(dist.get_rank())

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.shape.replicas)[self.replica]

    def plan(self, schedule: str) -> stretto.Plan:
        more: dict[str, Any] = {"stages_per_device": 2, "overlap": True} if schedule == "interleaved" else {}
        return SCHEDULES[schedule].make(devices=self.shape.pp, microbatches=MICROBATCHES, **more)


def layers_for(sizes: Sizes) -> int:
    return 6 if sizes.get("pp", 1) > 2 else 4


def whole(config: Any, rows: int, options: dict[str, bool]) -> tuple[CausalLM, Tensor, Tensor]:
    """The model after one backward over the batch of all replicas, with its loss and count."""
    torch.manual_seed(1)
    model = CausalLM(config, **options).to(DEVICE, torch.float64)
    total, count = causal_lm_loss(model(batch(config, rows)[0]), batch(config, rows)[1])
    (total / count).backward()
    return model, total.detach() / count, count


def part_of(whole: Tensor | None, experts: Experts | None) -> Tensor | None:
    """This rank's part of a whole parameter's gradient."""
    if whole is None or experts is None:
        return whole
    return whole[experts.first : experts.first + len(experts.down_proj)]


def experts_in(pipe: stretto.Pipeline) -> dict[int, Experts]:
    return {id(p): m for m in pipe.modules() if isinstance(m, Experts) and m.ranks > 1 for p in m.parameters()}


def differences(pipe: stretto.Pipeline, model: nn.Module, tolerance: float = 1e-10) -> list[str]:
    """The parameters whose gradients are not those of the whole model."""
    wrong, experts = [], experts_in(pipe)
    expected = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        grad = part_of(expected[name].grad, experts.get(id(parameter)))
        if (grad is None) != (parameter.grad is None):
            wrong.append(f"{name} has a gradient in one of the two only")
        elif grad is not None and parameter.grad is not None:
            most = float(expected[name].grad.abs().max())  # type: ignore[union-attr]
            if not float((grad - parameter.grad).abs().max()) <= tolerance * most:
                wrong.append(f"{name} differs")
    return wrong


def trained(mesh: DeviceMesh, sizes: Sizes, schedule: str, options: dict[str, bool], more: dict[str, Any]) -> list[str]:
    """What differs from the whole model on this rank, after a step: loss, gradients, norm, loads, biases, names."""
    member = Member(mesh, sizes)
    config = dataclasses.replace(
        CONFIG, num_hidden_layers=layers_for(sizes), tie_word_embeddings=options.get("mtp", False)
    )
    rows = 2 * MICROBATCHES * member.shape.replicas
    model, loss, count = whole(config, rows, options)
    torch.manual_seed(1 + dist.get_rank())  # only the first rank's values count
    twin = CausalLM(config, **options).to(DEVICE, torch.float64)
    if dist.get_rank() == 0 or sizes.get("ep", 1) > 1 or sizes.get("pp", 1) > 1:
        twin.load_state_dict(model.state_dict())
    pipe = stretto.Pipeline(twin.layers(), plan=member.plan(schedule), loss=causal_lm_loss, mesh=member.mesh, **more)
    tokens, targets = (member.own(tensor) for tensor in batch(config, rows))
    wrong = []
    for _ in range(2):  # the second step begins like the first
        result = pipe.step(tokens, targets)
        if not abs(result.loss - float(loss)) <= 1e-12 * float(loss) or result.count != float(count):
            wrong.append(f"the loss is {result.loss} of {result.count}, not {float(loss)} of {float(count)}")
        wrong += differences(pipe, model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    if not torch.allclose(pipe.clip_grad_norm_(0.01), norm, rtol=1e-10):
        wrong.append("the norm differs")
    wrong += differences(pipe, model)
    counts = {}
    for number, router in enumerate(module for module in model.modules() if isinstance(module, Router)):
        counts[number] = 2 * router.counts_E.clone()
        router.counts_E *= 2
        router.update_bias(0.01)
    loads = update_router_biases(pipe, rate=0.01)
    if not all(any(torch.equal(load, known) for known in counts.values()) for load in loads.values()):
        wrong.append(f"the loads are {loads}")
    state, expected = pipe.state_dict(), model.state_dict()
    for name, value in state.items():
        if value.shape != expected[name].shape:
            wrong.append(f"{name} has the shape {tuple(value.shape)}")
        if "bias" in name and not torch.equal(value, expected[name]):
            wrong.append(f"{name} is {value.tolist()}")
    evaluated = pipe.eval_step(tokens, targets).loss
    with torch.no_grad():
        model.eval()
        total, count = causal_lm_loss(model(batch(config, rows)[0]), batch(config, rows)[1])
    if not abs(evaluated - float(total / count)) <= 1e-12 * evaluated:
        wrong.append(f"the loss of an evaluation is {evaluated}, not {float(total / count)}")
    pipe.close()
    return wrong


def saved_and_loaded(
    mesh: DeviceMesh, folder: str, first: Sizes, second: Sizes, schedules: tuple[str, str]
) -> tuple[list[str], int]:
    """What differs after a checkpoint of one mesh and plan was loaded into another, with the optimizer's state.

    Also return how many states of experts were compared.
    """
    pipes, optimizers = [], []
    for seed, (sizes, schedule) in enumerate(zip((first, second), schedules, strict=True)):
        member = Member(mesh, sizes)
        config = dataclasses.replace(CONFIG, num_hidden_layers=4)
        torch.manual_seed(1 + seed)
        model = CausalLM(config).to(DEVICE, torch.float64)
        pipe = stretto.Pipeline(model.layers(), plan=member.plan(schedule), loss=causal_lm_loss, mesh=member.mesh)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        tokens, targets = (member.own(tensor) for tensor in batch(config, 2 * MICROBATCHES * member.shape.replicas))
        pipe.step(tokens, targets)
        optimizer.step()
        pipes.append(pipe)
        optimizers.append(optimizer)

    def state(k: int) -> dict[str, Any]:
        return {"model": pipes[k].state_dict(), "optimizer": pipes[k].optimizer_state_dict(optimizers[k])}

    dcp.save(state(0), checkpoint_id=folder)
    loaded = state(1)
    dcp.load(loaded, checkpoint_id=folder)
    pipes[1].load_state_dict(loaded["model"])
    dist.barrier()
    whole = CausalLM(dataclasses.replace(CONFIG, num_hidden_layers=4)).to(torch.float64)
    plain = {"model": whole.state_dict()}
    dcp.load(plain, checkpoint_id=folder, no_dist=True)
    wrong = []
    for k in (0, 1):
        for name, value in pipes[k].state_dict().items():
            found = value.full_tensor() if isinstance(value, DTensor) else value
            if not torch.equal(found, plain["model"][name]):
                wrong.append(f"{name} of pipeline {k}")
    moments = [
        {
            f"{name}.{key}": value.full_tensor() if isinstance(value, DTensor) else value
            for name, parts in state(k)["optimizer"].items()
            for key, value in parts.items()
        }
        for k in (0, 1)
    ]
    both = moments[0].keys() & moments[1].keys()
    wrong += [name for name in both if not torch.equal(moments[0][name], moments[1][name])]
    for pipe in pipes:
        pipe.close()
    return wrong, sum("experts" in name for name in both)


def refused(mesh: DeviceMesh, sizes: Sizes, what: str) -> str:
    """What a pipeline says of something that it does not do."""
    member = Member(mesh, sizes)
    config = dataclasses.replace(CONFIG, num_hidden_layers=4)
    torch.manual_seed(1)
    layers: Any = CausalLM(config).layers()
    more: dict[str, Any] = {
        "plan": member.plan("one_f_one_b"),
        "mesh": member.mesh,
        "loss": causal_lm_loss,
        "timeout": 20,
    }
    rows = 2 * MICROBATCHES
    try:
        match what:
            case "dense":
                layers = [nn.Linear(4, 4) for _ in range(4)]
            case "plan":
                more["plan"] = SCHEDULES["one_f_one_b"].make(devices=member.shape.pp + 1, microbatches=MICROBATCHES)
            case "another mesh":
                more["plan"] = more["plan"].on_mesh({"pp": member.shape.pp, "dp": 5})
            case "program of a pipeline":
                more["program"] = stretto.lower(more.pop("plan"))
            case "names":
                more["mesh"] = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("tp", "pp"))
            case "experts":
                layers = CausalLM(dataclasses.replace(config, n_routed_experts=9, n_group=3, topk_group=2)).layers()
            case "exchange":
                more["exchange"] = "all-to-all"
            case "mean":
                more["loss"] = lambda output, target: causal_lm_loss(output, target)[0]
                rows = MICROBATCHES * (1 + dist.get_rank())
        pipe = stretto.Pipeline(layers, **more)
        if what == "frozen" and dist.get_rank() == 0:
            next(pipe.parameters()).requires_grad_(False)
        if what == "shape":
            pipe.load_state_dict({name: value[:1] for name, value in CausalLM(config).state_dict().items()})
        tokens, targets = batch(config, rows)
        if what == "calls" and dist.get_rank() == 1:
            pipe.eval_step(tokens, targets)
        else:
            pipe.step(tokens, targets)
    except stretto.StrettoError as error:
        return str(error)
    return "nothing"


class Crowd(nn.Module):
    """A layer whose experts get tokens as unevenly as can be."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.router, self.experts, self._how = nn.Linear(6, 4), RoutedExperts(4, 6, 5), how

    def forward(self, x_ND: Tensor) -> Tensor:
        scores, indices_NK = self.router(x_ND).sigmoid().topk(2)
        if self._how == "one expert":
            indices_NK = torch.stack([torch.full_like(indices_NK[:, 0], 3), torch.full_like(indices_NK[:, 0], 2)], 1)
        if self._how == "one rank":
            indices_NK = indices_NK % 2
        return x_ND + self.experts(x_ND, indices_NK, scores)


def uneven(mesh: DeviceMesh, sizes: Sizes, how: str, more: dict[str, Any]) -> list[str]:
    """What differs from one process if experts or ranks get no token, or microbatches have one token each."""
    member = Member(mesh, sizes)
    torch.manual_seed(4)
    whole = nn.Sequential(*(Crowd(how) for _ in range(2 * member.shape.pp))).double()
    x = torch.randn(MICROBATCHES * member.shape.replicas * (1 if how == "one token" else 3), 6, dtype=torch.float64)

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        if how == "constant" and float(target[0, 0]) > 0:  # depends on nothing, so there is no backward to run
            return torch.zeros((), dtype=torch.float64), len(output)
        return (output - target).square().sum(), len(output)

    twin = copy.deepcopy(whole)
    pieces = x.chunk(MICROBATCHES * member.shape.replicas)
    total = sum(loss(whole(piece), piece)[0] for piece in pieces) / len(x)
    assert isinstance(total, Tensor)
    total.backward()
    pipe = stretto.Pipeline(
        list(twin), plan=member.plan("one_f_one_b"), loss=loss, mesh=member.mesh, timeout=30, **more
    )
    result = pipe.step(member.own(x), member.own(x))
    pipe.close()
    wrong = [] if abs(result.loss - float(total.detach())) < 1e-12 * result.loss else [f"the loss is {result.loss}"]
    return wrong + differences(pipe, whole)


def cut_models(mesh: DeviceMesh, sizes: Sizes, schedule: str, kind: str) -> list[str]:
    """What differs from an uncut model of transformers."""
    member, lm = Member(mesh, sizes), LM(kind)
    model, (inputs, labels) = lm.model(num_hidden_layers=4), lm.batch(2 * MICROBATCHES * member.shape.replicas)
    whole = copy.deepcopy(model)
    with exact(kind):
        loss, grads = uncut(whole, inputs, labels, MICROBATCHES * member.shape.replicas)
        pipe = stretto.Pipeline(
            stretto.cut(model), plan=member.plan(schedule), loss=transformers_loss, mesh=member.mesh, timeout=30
        )
        result = pipe.step({name: member.own(value) for name, value in inputs.items()}, member.own(labels))
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        parameter.grad = grads[name]
    wrong = [] if abs(result.loss - loss) < 1e-10 * loss else [f"the loss is {result.loss}, not {loss}"]
    wrong += differences(pipe, whole)
    state = whole.state_dict()
    wrong += [name for name, value in pipe.state_dict().items() if value.shape != state[name].shape]
    pipe.load_state_dict(state)
    pipe.close()
    return wrong


def waits(mesh: DeviceMesh, sizes: Sizes, schedule: str) -> tuple[list[str], int]:
    """What made the host wait for the device in a step, under PyTorch's own watch; and how often rows were counted."""
    member = Member(mesh, sizes)
    config = dataclasses.replace(CONFIG, num_hidden_layers=4, hidden_size=32, moe_intermediate_size=16)
    torch.manual_seed(1)
    model = CausalLM(config).to(DEVICE, torch.bfloat16)
    pipe = stretto.Pipeline(model.layers(), plan=member.plan(schedule), loss=causal_lm_loss, mesh=member.mesh)
    tokens, targets = (member.own(tensor) for tensor in batch(config, 2 * MICROBATCHES * member.shape.replicas))
    for _ in range(2):
        pipe.step(tokens, targets, check_finite=False)
    torch.cuda.synchronize()
    waited: list[str] = []
    usual = Team.catch_up

    def catch_up(team: Team, what: str) -> None:
        waited.append(what)
        usual(team, what)

    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch.object(Team, "catch_up", catch_up):
            pipe.step(tokens, targets, check_finite=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    counted = sum(task.phase.startswith("counts") for task in pipe._binding.tasks)
    pipe.close()
    return waited, counted
