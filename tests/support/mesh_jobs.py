"""What ranks of a mesh do to find out whether they train what one process would."""

import copy
import dataclasses
import functools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import stretto
from causal_lms import LM, exact, uncut
from moe_jobs import CONFIG, DEVICE, batch
from strategies import SCHEDULES
from stretto.execute.team import Team
from stretto.ir.mesh import MeshShape
from stretto.model import CausalLM, causal_lm_loss, transformers_loss, update_router_biases
from stretto.model.blocks import Activations, MoeBlock
from stretto.moe import AllToAll, Experts, Routed, RoutedExperts, Router, expert_phases
from stretto.pipeline.pytree import Tree
from stretto.program.task import Kind
from stretto.schedules import one_f_one_b

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
            if not torch.equal(found.cpu(), plain["model"][name]):
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
            case "shared experts" | "shared parameters":
                experts = Experts(8, 16, 8)
                block = [layer.block for layer in layers[1:-1] if hasattr(layer.block.mlp, "experts")]
                for each in (block[0], block[-1]):
                    each.mlp.experts = (
                        experts
                        if what == "shared experts"
                        else Experts.of(experts.gate_up_proj, experts.down_proj, activation=nn.functional.silu)
                    )
            case "tied experts":
                names = [name for layer in layers for name, _ in layer.named_parameters() if "experts.down" in name]
                more["tied"] = [(names[0], names[-1])]
            case "another exchange":
                more["exchange"] = functools.partial(AllToAll, fp8=dist.get_rank() == 0)
            case "no exchange":
                more["exchange"] = lambda ranks: ranks
            case "mean":
                more["loss"] = lambda output, target: causal_lm_loss(output, target)[0]
                rows = MICROBATCHES * (1 + dist.get_rank())
        pipe = stretto.Pipeline(layers, **more)
        if what == "other mesh":
            pipe.close()
            stretto.Pipeline(layers, **{**more, "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))})
        if what == "moments":
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for parameter in pipe.parameters():
                optimizer.state[parameter]["flat"] = torch.zeros(parameter.numel())
            pipe.optimizer_state_dict(optimizer)
        if what == "other experts":
            swapped = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
            state = {
                name: DTensor.from_local(value.to_local(), swapped, [Shard(0)]).redistribute(placements=[Replicate()])
                if isinstance(value, DTensor)
                else value
                for name, value in pipe.state_dict().items()
            }
            pipe.load_state_dict(state)
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


def repeated(mesh: DeviceMesh, sizes: Sizes) -> list[str]:
    """What is wrong with a recorded step, and with a pipeline that is given the program of another one."""
    member = Member(mesh, sizes)
    config = dataclasses.replace(CONFIG, num_hidden_layers=4)
    tokens, targets = (member.own(tensor) for tensor in batch(config, 2 * MICROBATCHES * member.shape.replicas))
    wrong, losses, program, plan = [], [], None, member.plan("interleaved")
    for _ in range(2):
        torch.manual_seed(1)
        layers = CausalLM(config).to(DEVICE, torch.float64).layers()
        schedule: dict[str, Any] = {"plan": plan} if program is None else {"program": program}
        pipe = stretto.Pipeline(layers, loss=causal_lm_loss, mesh=member.mesh, **schedule)
        program = pipe.program
        result = pipe.step(tokens, targets, record=True)
        losses.append(result.loss)
        if (result.timeline is not None) != (pipe.rank == 0):
            wrong.append("the timeline is on another rank than the first")
        if result.timeline is not None:
            simulated = stretto.simulate(program, stretto.fit(result.timeline))
            ends = [span for span in result.timeline.spans() if span.task.phase.startswith("dispatch")]
            wrong += [] if simulated.makespan > 0 and ends else ["the timeline cannot be simulated"]
        pipe.close()
    return wrong + ([] if losses[0] == losses[1] else [f"the losses are {losses}"])


def beside(mesh: DeviceMesh) -> tuple[float, float]:
    """The losses of two meshes that train beside each other, each on a part of a larger mesh; only one is closed."""
    whole = init_device_mesh(mesh.device_type, (2, 1, 2), mesh_dim_names=("replicate", "pp", "ep"))
    config = dataclasses.replace(CONFIG, num_hidden_layers=2)
    torch.manual_seed(1)
    plan = SCHEDULES["gpipe"].make(devices=1, microbatches=MICROBATCHES)
    pipe = stretto.Pipeline(
        CausalLM(config).to(DEVICE).layers(), plan=plan, loss=causal_lm_loss, mesh=whole["pp", "ep"]
    )
    loss = pipe.step(*batch(config)).loss
    return loss, float(pipe.rank)


class Crowd(nn.Module):
    """A layer whose experts get tokens as unevenly as can be."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.router, self.experts, self._how = nn.Linear(6, 4), RoutedExperts(4, 6, 5), how
        self.other = RoutedExperts(4, 6, 5)

    def forward(self, x_ND: Tensor) -> Tensor:
        scores, indices_NK = self.router(x_ND).sigmoid().topk(2)
        if self._how == "one expert":
            indices_NK = torch.stack([torch.full_like(indices_NK[:, 0], 3), torch.full_like(indices_NK[:, 0], 2)], 1)
        if self._how == "one rank":
            indices_NK = indices_NK % 2
        if self._how == "by data" and float(x_ND[0, 0]) > 0:
            return x_ND + self.other(x_ND, indices_NK, scores)
        if self._how == "unused gradients":
            x_ND = x_ND if x_ND.requires_grad else x_ND.detach().requires_grad_()
        y_ND = self.experts(x_ND, indices_NK, scores)
        if self._how == "unused gradients":
            (y_ND,) = torch.autograd.grad(y_ND.square().sum(), x_ND, create_graph=True)
        if self._how.startswith("unused") and float(x_ND[0, 0]) > 0:
            return x_ND * 1.0
        return x_ND + y_ND


def uneven(mesh: DeviceMesh, sizes: Sizes, how: str, more: dict[str, Any]) -> list[str]:
    """What differs from one process if experts or ranks get no token, or microbatches have one token each."""
    member = Member(mesh, sizes)
    torch.manual_seed(4)
    whole = nn.Sequential(*(Crowd(how) for _ in range(2 * member.shape.pp))).to(DEVICE, torch.float64)
    rows = MICROBATCHES * member.shape.replicas * (1 if how == "one token" else 3)
    x = torch.randn(rows, 6, dtype=torch.float64).to(DEVICE)

    if how == "a replica":  # only the first has losses that depend on anything
        for replica, rows in enumerate(x.chunk(member.shape.replicas)):
            rows[:, 0] = rows[:, 0].abs() * (1 if replica else -1)

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        if how in ("constant", "a replica") and float(target[0, 0]) > 0:  # there is no backward to run
            return output.new_zeros(()), len(output)
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


def mixed(mesh: DeviceMesh, sizes: Sizes) -> str:
    """What ranks say if they run other experts than each other at the same time."""
    try:
        uneven(mesh, sizes, "by data", {})
    except stretto.PipelineError as error:
        return str(error)
    return "nothing"


def evaluated(mesh: DeviceMesh, sizes: Sizes, counts: bool) -> str:
    """What differs if pipelines evaluate batches of different sizes, some of fewer rows than microbatches."""
    member = Member(mesh, sizes)
    torch.manual_seed(4)
    whole = nn.Sequential(*(Crowd("") for _ in range(2 * member.shape.pp))).to(DEVICE, torch.float64)
    sizes_of = [3 + 2 * replica for replica in range(member.shape.replicas)]
    x = torch.randn(sum(sizes_of), 6, dtype=torch.float64).to(DEVICE)

    def loss(output: Tensor, target: Tensor) -> Any:
        error = (output - target).square().sum()
        return (error, len(output)) if counts else error / len(output)

    with torch.no_grad():
        expected = float((whole(x) - x).square().sum() / len(x))
    pipe = stretto.Pipeline(list(whole), plan=member.plan("one_f_one_b"), loss=loss, mesh=member.mesh, timeout=30)
    own = x.split(sizes_of)[member.replica]
    try:
        found = pipe.eval_step(own, own, metrics={"same": loss}, outputs=True)
    except stretto.PipelineError as error:
        return str(error)
    pipe.close()
    near = all(abs(value - expected) < 1e-12 * expected for value in (found.loss, found.metrics["same"]))
    return "" if near else f"{found.loss} and {found.metrics}, not {expected}"


def cut_models(mesh: DeviceMesh, sizes: Sizes, schedule: str, kind: str) -> list[str]:
    """What differs from an uncut model of transformers."""
    member, lm = Member(mesh, sizes), LM(kind)
    model, (batch, labels) = lm.model(num_hidden_layers=4), lm.batch(2 * MICROBATCHES * member.shape.replicas)
    inputs, labels = {name: value.to(DEVICE) for name, value in batch.items()}, labels.to(DEVICE)
    whole = copy.deepcopy(model.to(DEVICE))
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


def waits(mesh: DeviceMesh, sizes: Sizes, schedule: str, policy: Any = "none") -> tuple[list[str], int]:
    """What made the host wait for the device in a step, under PyTorch's own watch; and how often rows were counted."""
    member = Member(mesh, sizes)
    config = dataclasses.replace(CONFIG, num_hidden_layers=4, hidden_size=32, moe_intermediate_size=16)
    torch.manual_seed(1)
    model = CausalLM(config).to(DEVICE, torch.bfloat16)
    pipe = stretto.Pipeline(
        model.layers(), plan=member.plan(schedule), loss=causal_lm_loss, mesh=member.mesh, memory=policy
    )
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


class TensorBlock(nn.Module):
    """A block of our model that takes and returns a plain tensor, so that it can be the last layer, with its phases."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.block = MoeBlock(config)

    def phases(self) -> list[tuple[stretto.Phase, Any]]:
        mlp = self.block.mlp
        return expert_phases(mlp.experts, route=self._route, finish=self._finish, count=mlp.gate.count)

    def _route(self, x: Tensor) -> Routed:
        h, indices, weights, rest = self.block._route(Activations(x))
        return Routed(h, indices, weights, rest.x_NTD)

    def _finish(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out.view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        for _, run in self.phases():
            x = run(x)
        return x


def losses_of_steps(mesh: DeviceMesh, sizes: Sizes, schedule: str, steps: int) -> list[float]:
    """The loss of the same batch in each of several steps, where nothing is trained. On a GPU, layers are large enough
    for lanes to run at the same time.
    """
    member = Member(mesh, sizes)
    width, tokens = (1024, 512) if DEVICE.type == "cuda" else (CONFIG.hidden_size, 8)
    config = dataclasses.replace(CONFIG, hidden_size=width, moe_intermediate_size=width // 2, num_hidden_layers=4)
    torch.manual_seed(1)
    layers = [TensorBlock(config).to(DEVICE, torch.float32) for _ in range(8)]
    pipe = stretto.Pipeline(layers, plan=member.plan(schedule), loss=_distance, mesh=member.mesh)
    x = torch.randn(MICROBATCHES, tokens, width, device=DEVICE)
    losses = [pipe.step(x, x.roll(1, 0)).loss for _ in range(steps)]
    pipe.close()
    return losses


def _distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def kept_alive(mesh: DeviceMesh) -> tuple[int, int]:
    """How many values of forward tasks a step keeps alive where lanes are streams, and how many it reads and makes,
    except losses.
    """
    member = Member(mesh, {"pp": 1})
    torch.manual_seed(1)
    layers = [TensorBlock(CONFIG) for _ in range(2)]
    pipe = stretto.Pipeline(layers, plan=one_f_one_b(devices=1, microbatches=2), loss=_distance, mesh=member.mesh["pp"])
    pipe._binding._used = kept = []  # as on a GPU, but nothing is let go
    x = torch.randn(2, 8, CONFIG.hidden_size)
    pipe.step(x, x)
    forwards = sum(task.kind is Kind.F for task in pipe._binding.tasks)
    pipe.close()
    return sum(isinstance(value, Tree) for value in kept), 2 * forwards - 2
