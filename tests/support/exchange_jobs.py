"""What ranks do to find out whether experts that are divided among them are the whole experts."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import stretto
from causal_lms import LM, exact
from moe_jobs import CONFIG
from stretto.execute.members import Members
from stretto.execute.team import Team
from stretto.model import CausalLM, causal_lm_loss, transformers_loss
from stretto.model.blocks import Activations, MoeBlock
from stretto.moe import AllToAll, Exchange, ExpertRanks, Experts, RoutedExperts
from stretto.moe.grouped_linear import grouped_linear
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.pytree import Tree, entering, take_apart
from stretto.pipeline.segments import Segment, run_segment
from stretto.pipeline.split_backward import Deferral
from stretto.pipeline.storages import WeakStorage
from stretto.pipeline.weight_gradients import WeightGradient, add_grouped, add_together
from token_exchange import TokenExchange

WIDTH, HIDDEN = 6, 4
Make = Callable[[ExpertRanks], Exchange]


class Case(NamedTuple):
    """The tokens of each rank, and where they go."""

    tokens: tuple[int, ...]
    """The number of each rank's tokens."""
    each: int
    """The number of each rank's experts."""
    top_k: int
    favourite: bool
    """Whether all tokens go to the same experts."""
    seed: int

    @property
    def experts(self) -> int:
        return self.each * len(self.tokens)

    def indices(self) -> Tensor:
        """The experts of all ranks' tokens."""
        rows = [torch.randperm(self.experts)[: self.top_k] for _ in range(sum(self.tokens))]
        rows = [rows[0]] * len(rows) if rows and self.favourite else rows
        return torch.stack(rows) if rows else torch.empty(0, self.top_k, dtype=torch.int64)

    def own(self, every: Tensor, rank: int) -> Tensor:
        """A rank's part of what all ranks have."""
        return every.split(self.tokens)[rank].detach().clone()


def exchanges(name: str) -> Make:
    return {"all-to-all": AllToAll, "tokens": TokenExchange, "fp8": lambda ranks: AllToAll(ranks, fp8=True)}[name]


@contextmanager
def joined(mesh: DeviceMesh) -> Iterator[ExpertRanks]:
    """The ranks of a mesh as holders of experts. Tensors are made on their device."""
    device = torch.device(mesh.device_type)
    team = Team(Members.of_mesh(mesh), device, timeout=60)
    assert team.everybody is not None
    try:
        with device:
            yield ExpertRanks(team, team.everybody)
    finally:
        team.close()


def experts_of(case: Case) -> tuple[RoutedExperts, Tensor, Tensor, Tensor, Tensor]:
    """The same experts on all ranks, with all tokens, their experts, weights, and gradients of the outputs."""
    torch.manual_seed(case.seed)
    experts = RoutedExperts(case.experts, WIDTH, HIDDEN).double()
    indices = case.indices()
    x, grad = torch.randn(2, len(indices), WIDTH, dtype=torch.float64)
    return experts, x, indices, torch.rand(indices.shape, dtype=torch.float64), grad


def routed(mesh: DeviceMesh, cases: list[Case], name: str, recomputed: bool = False) -> list[str]:
    """What differs on this rank from one process that has all tokens and all experts."""
    rank, wrong = mesh.get_local_rank(), []
    with joined(mesh) as ranks:
        exchange = exchanges(name)(ranks)
        for case in cases:
            whole, x, indices, weights, grad = experts_of(case)
            x.requires_grad_()
            weights.requires_grad_()
            expected = whole(x, indices, weights)
            expected.backward(grad)
            part = experts_of(case)[0]
            part.shard(rank, len(case.tokens))
            part.exchange, part.members = exchange, ranks
            mine = [case.own(every, rank).requires_grad_() for every in (x, weights)]
            inputs = mine[0], case.own(indices, rank), mine[1]
            out = checkpoint(part, *inputs, use_reentrant=False) if recomputed else part(*inputs)
            out.backward(case.own(grad, rank))
            local = slice(part.first, part.first + case.each)
            if name == "all-to-all" and not torch.equal(out, case.own(expected, rank)):
                wrong.append(f"{case}: the output differs")
            pairs = {
                "output": (out, case.own(expected, rank)),
                "x": (mine[0].grad, case.own(_grad(x), rank)),
                "weights": (mine[1].grad, case.own(_grad(weights), rank)),
                "gate_up_proj": (part.gate_up_proj.grad, _grad(whole.gate_up_proj)[local]),
                "down_proj": (part.down_proj.grad, _grad(whole.down_proj)[local]),
            }
            wrong += [f"{case}: {key} differs" for key, pair in pairs.items() if not alike(*pair)]
    return wrong


def second_order(mesh: DeviceMesh, name: str) -> list[str]:
    """What differs on this rank if a loss has gradients of outputs in it, from one process with all experts."""
    case = Case((3, 2, 0, 4)[: mesh.size()], 2, 2, False, 4)
    rank, found = mesh.get_local_rank(), []
    with joined(mesh) as ranks:
        for is_part in (False, True):
            experts, x, indices, weights, grad = experts_of(case)
            experts.gate_up_proj.data.mul_(50)  # so that second derivatives are not near 0
            if is_part:
                experts.shard(rank, mesh.size())
                experts.exchange, experts.members = exchanges(name)(ranks), ranks
                x, indices, weights, grad = (case.own(every, rank) for every in (x, indices, weights, grad))
            leaves = x.requires_grad_(), weights.requires_grad_()
            firsts = torch.autograd.grad((experts(x, indices, weights) * grad).sum(), leaves, create_graph=True)
            torch.stack([first.square().sum() for first in firsts]).sum().backward()
            found.append([*firsts, *map(_grad, (*leaves, *experts.parameters()))])
    whole, part = found
    local = slice(2 * rank, 2 * rank + 2)
    expected = [*(case.own(every, rank) for every in whole[:4]), *(every[local] for every in whole[4:])]
    return [f"tensor {k}" for k, pair in enumerate(zip(part, expected, strict=True)) if not alike(*pair)]


def without_gradients(mesh: DeviceMesh, what: str, name: str) -> list[bool]:
    """Which gradients rank 0 and the others get, if rank 0 needs none (of what is named)."""
    case = Case((2,) * mesh.size(), 2, 2, False, 5)
    rank = mesh.get_local_rank()
    with joined(mesh) as ranks:
        part, x, indices, weights, grad = experts_of(case)
        part.shard(rank, mesh.size())
        part.exchange, part.members = exchanges(name)(ranks), ranks
        mine = [case.own(every, rank).requires_grad_(rank > 0 or what == "experts") for every in (x, weights)]
        part.requires_grad_(rank > 0 or what == "inputs")
        part(mine[0], case.own(indices, rank), mine[1]).backward(case.own(grad, rank))
    return [tensor.grad is not None for tensor in (*mine, part.gate_up_proj)]


def in_half(mesh: DeviceMesh) -> list[str]:
    """What differs in bfloat16, under autocast and without, from one process; forwards are equal to the bit."""
    case, rank, wrong = Case((5, 0, 3, 9)[: mesh.size()], 2, 2, False, 1), mesh.get_local_rank(), []
    with joined(mesh) as ranks:
        for autocast in (False, True):
            dtype = torch.float32 if autocast else torch.bfloat16
            outs = []
            for is_part in (False, True):
                experts, x, indices, weights, _ = experts_of(case)
                experts.to(dtype)
                x, weights = x.to(dtype), weights.float()
                if is_part:
                    experts.shard(rank, mesh.size())
                    experts.exchange, experts.members = AllToAll(ranks), ranks
                    x, indices, weights = (case.own(every, rank) for every in (x, indices, weights))
                with torch.autocast(mesh.device_type, torch.bfloat16, enabled=autocast):
                    out = experts(x, indices, weights)
                outs.append(out if is_part else case.own(out, rank))
            if outs[0].dtype != dtype or not torch.equal(*outs):
                wrong.append(f"autocast={autocast}")
    return wrong


def in_fp8(mesh: DeviceMesh) -> tuple[float, float]:
    """How far outputs are from those without FP8, and gradients of tokens, relative to the largest."""
    case, rank = Case((7, 4)[: mesh.size()], 2, 2, False, 2), mesh.get_local_rank()
    found = []
    with joined(mesh) as ranks:
        for name in ("all-to-all", "fp8"):
            part, x, indices, weights, grad = experts_of(case)
            part.shard(rank, mesh.size())
            part.exchange, part.members = exchanges(name)(ranks), ranks
            mine = case.own(x, rank).requires_grad_()
            out = part(mine, case.own(indices, rank), case.own(weights, rank))
            out.backward(case.own(grad, rank))
            found.append((out, _grad(mine)))
    (out, grad), (other, other_grad) = found
    far = (float((one - two).abs().max() / one.abs().max()) for one, two in ((out, other), (grad, other_grad)))
    return next(far), next(far)


def on_streams(mesh: DeviceMesh, fp8: bool) -> list[str]:
    """What differs on a GPU if communication has a stream of its own, and only `sizes` may make the host wait."""
    rank, size = mesh.get_local_rank(), mesh.size()
    with joined(mesh) as ranks:
        torch.manual_seed(rank)
        experts = RoutedExperts(4 * size, 64, 32).bfloat16()
        experts.shard(rank, size)
        exchange, found = AllToAll(ranks, fp8=fp8), []
        x = torch.randn(500, 64, dtype=torch.bfloat16)
        indices = torch.rand(500, 4 * size).topk(3).indices
        weights, grad = torch.rand(500, 3), torch.randn_like(x)
        for comm in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            experts.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                out = _on_streams(experts, exchange, comm, leaves, indices)
                out.backward(grad)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            found.append([out.detach(), *map(_grad, (*leaves, *experts.parameters()))])
    return [
        f"tensor {k} of run {run}"
        for run, tensors in enumerate(found)
        for k, (one, other) in enumerate(zip(tensors, found[0], strict=True))
        if not torch.equal(one, other)
    ]


def _on_streams(experts: Experts, exchange: AllToAll, comm: Any, leaves: tuple[Tensor, Tensor], indices: Tensor) -> Any:
    compute, (x, weights) = torch.cuda.current_stream(), leaves
    comm.wait_stream(compute)
    with torch.cuda.stream(comm):
        counted = exchange.count(indices, experts.total)
        sized = exchange.sizes(counted)
        rows, weights, counts, state = exchange.dispatch(x, weights, sized)
    compute.wait_stream(comm)
    experts.exchange = exchange
    rows = experts.run_sorted(grouped_linear, rows, counts, weights)
    comm.wait_stream(compute)
    with torch.cuda.stream(comm):
        out = exchange.combine(rows, state, tokens=len(x), dtype=x.dtype)
    compute.wait_stream(comm)
    return out


def deserted(mesh: DeviceMesh, what: str) -> str:
    """What a rank says that waits for a group which another aborts; a device then goes on, with any numbers."""
    with joined(mesh) as ranks:
        team = ranks._team
        assert isinstance(team, Team)
        group, exchange, ones = team.make([0, 1]), AllToAll(ranks), torch.ones(4)
        assert group is not None
        assert team.groups is not None
        if mesh.get_local_rank() == 0:
            time.sleep(0.5)
            team.groups.abort()
            return ""
        try:
            if what == "counts":
                exchange.sizes(exchange.count(torch.zeros(3, 1, dtype=torch.int64), 2))
            else:
                team.all_reduce(ones, group, dist.ReduceOp.SUM)
                team.catch_up("the sums")
        except stretto.StrettoError as error:
            return str(error)
        return "went on"


def blocks(mesh: DeviceMesh, sequences: tuple[int, ...], name: str, apart: bool, frozen: bool) -> list[str]:
    """What differs on this rank from one block on all sequences. With `apart`, each phase is a segment of its own."""
    rank = mesh.get_local_rank()
    with joined(mesh) as ranks:
        torch.manual_seed(3)
        whole, part = (MoeBlock(CONFIG).double() for _ in range(2))
        part.load_state_dict(whole.state_dict())
        x, grad = torch.randn(2, sum(sequences), 3, CONFIG.hidden_size, dtype=torch.float64)
        x.requires_grad_(not frozen)
        balance = torch.zeros((), dtype=torch.float64) if all(sequences) else None
        expected = whole(Activations(x, balance=balance))
        _loss(expected, grad, len(x)).backward()
        part.mlp.experts.shard(rank, mesh.size())
        part.mlp.experts.exchange, part.mlp.experts.members = exchanges(name)(ranks), ranks
        mine = x.split(sequences)[rank].detach().requires_grad_(not frozen)
        run = _in_segments if apart else _at_once
        out = run(part, Activations(mine, balance=balance), grad.split(sequences)[rank], len(mine))
        wrong = [] if alike(out, expected.x_NTD.split(sequences)[rank]) else ["the output differs"]
        if not frozen and not alike(mine.grad, _grad(x).split(sequences)[rank]):
            wrong.append("the input's gradient differs")
        counts = part.mlp.gate.counts_E.clone()
        dist.all_reduce(counts)
        wrong += [] if torch.equal(counts, whole.mlp.gate.counts_E) else ["the router's counts differ"]
        for key, parameter in part.named_parameters():
            other = _grad(whole.get_parameter(key))
            if key in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
                other, found = other.chunk(mesh.size())[rank], _grad(parameter)
            else:
                found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(found)
            wrong += [] if alike(found, other) else [f"the gradient of {key} differs"]
    return wrong


def _at_once(block: MoeBlock, value: Activations, grad: Tensor, sequences: int) -> Tensor:
    out = block(value)
    _loss(out, grad, sequences).backward()
    return out.x_NTD  # type: ignore[no-any-return]


def _loss(out: Activations, grad: Tensor, sequences: int) -> Tensor:
    """A loss whose gradient is that of the block's output, and the balance loss, which is a mean over sequences."""
    loss = (out.x_NTD * grad).sum()
    return loss if out.balance is None else loss + out.balance * sequences


def _in_segments(block: MoeBlock, value: Activations, grad: Tensor, sequences: int) -> Tensor:
    """Run and differentiate each phase by itself, as a stage does; phases without a backward run without a graph.

    Weight gradients come last.
    """
    deferral, deferred = Deferral(block, gradients := Gradients()), list[WeightGradient]()
    with deferral.overrides, deferral.into(deferred):
        out = _through_phases(block, value, grad, sequences)
    assert sum(one.add is add_grouped for one in deferred) == 2
    with torch.no_grad():
        add_together([deferred])
    gradients.give_out()
    return out


def _through_phases(block: MoeBlock, value: Activations, grad: Tensor, sequences: int) -> Tensor:
    anchor = torch.zeros((), requires_grad=True)
    tree, inputs = entering(value)
    tree = tree if inputs else take_apart(value)
    segments: list[tuple[Segment, list[Any], list[Any]]] = []
    for phase, run in block.phases():
        if phase.backward:
            before = tree.leaves
            tree, segment = run_segment(run, tree, anchor)
            segments.append((segment, before, tree.leaves))
            continue
        needed = {id(leaf) for leaf, needs in zip(tree.leaves, tree.needs, strict=True) if needs}
        with torch.no_grad():
            after = take_apart(run(tree.value()))
        assert needed <= {id(leaf) for leaf in after.leaves}
        tree = Tree(after.leaves, after.spec, [id(leaf) in needed for leaf in after.leaves], after.shared)
    out = tree.value()
    grads: dict[int, Tensor | None] = {id(out.x_NTD): grad}
    if out.balance is not None:
        grads[id(out.balance)] = torch.full_like(out.balance, sequences)
    for segment, before, after_leaves in reversed(segments):
        arrived = segment.backward([grads.get(id(leaf)) for leaf in after_leaves])
        grads = {id(leaf): found for leaf, found in zip(before, arrived, strict=True) if found is not None}
    if value.x_NTD.requires_grad:
        value.x_NTD.grad = next(iter(grads.values()))
    return out.x_NTD  # type: ignore[no-any-return]


def cut_models(mesh: DeviceMesh, kind: str, name: str) -> list[str]:
    """What differs on this rank from whole cut models that run every rank's sequences, one rank's after another's."""
    lm = LM(kind, padding="right")
    batch, labels = lm.batch(sequences=2 * mesh.size())
    own = [
        ({key: tensor.chunk(mesh.size())[k] for key, tensor in batch.items()}, labels.chunk(mesh.size())[k])
        for k in range(mesh.size())
    ]
    with exact(kind):
        model = lm.model()
        wrong = _models(mesh, stretto.cut(lm.model()), stretto.cut(model), own, transformers_loss, name)
    if model.num_parameters() != lm.model().num_parameters():
        wrong.append("the experts of the user's model are divided")
    return wrong


def own_models(mesh: DeviceMesh, name: str) -> list[str]:
    """The same of our own model, with multi-token prediction and the auxiliary loss."""
    torch.manual_seed(1)
    whole, part = (CausalLM(CONFIG, mtp=True, balance=True).double() for _ in range(2))
    part.load_state_dict(whole.state_dict())
    tokens = torch.randint(0, CONFIG.vocab_size, (mesh.size(), 2, 6))
    own = [(rows[:, :-1], rows[:, 1:]) for rows in tokens]
    return _models(mesh, whole.layers(), part.layers(), own, causal_lm_loss, name)


def _models(
    mesh: DeviceMesh, whole: list[nn.Module], layers: list[nn.Module], own: list[Any], loss_of: Any, name: str
) -> list[str]:
    rank = mesh.get_local_rank()
    with joined(mesh) as ranks:
        expected = [_loss_and_grads(whole, *part, loss_of) for part in own]
        divided = [module for layer in layers for module in layer.modules() if isinstance(module, Experts)]
        for experts in divided:
            experts.shard(rank, mesh.size())
            experts.exchange, experts.members = exchanges(name)(ranks), ranks
        loss, grads = _loss_and_grads(layers, *own[rank], loss_of)
    wrong = [] if divided and alike(loss, expected[rank][0]) else [f"the loss is {loss}, not {expected[rank][0]}"]
    for key, grad in grads.items():
        other = expected[rank][1][key]
        if key.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
            other = torch.stack([one[key] for _, one in expected]).sum(0).chunk(mesh.size())[rank]
        if grad.shape != other.shape or (grad - other).abs().max() > 1e-10 * other.abs().max():
            wrong.append(f"the gradient of {key} differs")
    return wrong


def _loss_and_grads(
    layers: list[nn.Module], batch: Any, labels: Tensor, loss_of: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    value = batch
    for layer in layers:
        layer.zero_grad()
    for layer in layers:
        value = layer(value)
    loss, _ = loss_of(value, labels)
    loss.backward()
    return loss.detach(), {name: _grad(value).clone() for layer in layers for name, value in layer.named_parameters()}


def running_others(mesh: DeviceMesh, what: str, name: str) -> str:
    """What experts say if rank 1 runs others than the other ranks, or at another time. All have equally many rows."""
    rank = mesh.get_local_rank()
    with joined(mesh) as ranks:
        experts = RoutedExperts(2 * mesh.size(), WIDTH, HIDDEN)
        experts.shard(rank, mesh.size())
        experts.exchange, experts.members, experts.number = exchanges(name)(ranks), ranks, 3
        ranks.begin((5, 2), notes=True)
        if rank == 1:
            match what:
                case "experts":
                    experts.number = 4
                case "turn":
                    ranks.begin((5, 3), notes=True)
        inputs = torch.randn(2, WIDTH), torch.tensor([[0], [1]]), torch.ones(2, 1)
        try:
            with torch.set_grad_enabled(what != "gradients" or rank == 1):
                experts(*inputs)
        except stretto.PipelineError as error:
            return str(error)
    return ""


def noted_outputs(mesh: DeviceMesh) -> list[bool]:
    """Whether experts note what their exchange returns, in one call, in phases and without gradients."""
    rank, noted = mesh.get_local_rank(), []
    with joined(mesh) as ranks:
        experts = RoutedExperts(2 * mesh.size(), WIDTH, HIDDEN)
        experts.shard(rank, mesh.size())
        experts.exchange, experts.members = AllToAll(ranks), ranks
        x, indices, weights = torch.randn(2, WIDTH), torch.tensor([[0], [1]]), torch.ones(2, 1)
        ranks.begin((0,), notes=True)
        out = experts(x, indices, weights)
        noted.append([id(one) for one in ranks.outputs()] == [id(out)])
        block = MoeBlock(CONFIG)
        block.mlp.experts.shard(rank, mesh.size())
        block.mlp.experts.exchange, block.mlp.experts.members = experts.exchange, ranks
        ranks.begin((1,), notes=True)
        block(Activations(torch.randn(1, 3, CONFIG.hidden_size)))
        noted.append([tuple(one.shape) for one in ranks.outputs()] == [(3, CONFIG.hidden_size)])
        ranks.begin((2,), notes=True)
        with torch.no_grad():
            experts(x, indices, weights)
        noted.append(not ranks.outputs())
        ranks.begin((3,), notes=False)
        experts(x, indices, weights)
        noted.append(not ranks.outputs())
    return noted


def refused(mesh: DeviceMesh, what: str) -> str:
    """What experts say that cannot run."""
    with joined(mesh) as ranks:
        experts = RoutedExperts(6, WIDTH, HIDDEN)
        x, indices, weights = torch.randn(2, WIDTH), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
        try:
            match what:
                case "uneven":
                    AllToAll(ranks).count(indices, 5)
                case "alone":
                    experts.shard(ranks.rank, ranks.size)
                    experts(x, indices, weights)
                case "below" | "above":
                    experts.shard(ranks.rank, ranks.size)
                    experts.exchange, experts.members = AllToAll(ranks), ranks
                    indices[1] = -1 if what == "below" else 6
                    experts(x, indices, weights)
        except stretto.PipelineError as error:
            return str(error)
    return ""


def alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal within 1e-12 of the largest number."""
    if one is None or other is None or one.shape != other.shape:
        return False
    one, other = one.detach(), other.detach()
    return not one.numel() or bool((one - other).abs().max() <= 1e-12 * max(1e-3, float(other.abs().max())))


def _grad(tensor: Tensor | nn.Parameter) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


class Whole(nn.Module):
    """Runs experts without phases, and something after them that a recomputation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = nn.Linear(WIDTH, 4), RoutedExperts(4, WIDTH, HIDDEN), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, indices, weights) + torch.tanh(self.shared(x)).sum()


def remains(mesh: DeviceMesh, policy: Any, dry: bool) -> list[bool]:
    """Whether parameters are still there when a pipeline with shared experts is closed and gone."""
    torch.manual_seed(1)
    plan = stretto.schedules.one_f_one_b(devices=1, microbatches=2)
    whole = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("pp", "ep"))
    pipe = stretto.Pipeline([Whole(), Whole()], plan=plan, loss=_squares, mesh=whole, memory=policy)
    x = torch.randn(8, WIDTH)
    (pipe.dry_run if dry else pipe.step)(x, x)
    parameters = [WeakStorage(parameter.untyped_storage()) for parameter in pipe.parameters()]
    pipe.close()
    del pipe
    gc.collect()
    return [parameter.is_gone for parameter in parameters]


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()
