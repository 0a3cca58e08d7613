"""What ranks do with batches of any number of rows: train, evaluate, measure, and hand out outputs."""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
from models import TOKENS, VOCABULARY, WIDTH, Case, gradients, pipeline

Found = tuple[float, dict[str, Any]]


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randint(VOCABULARY, (rows, TOKENS)), torch.randint(VOCABULARY, (rows, TOKENS))


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(-1) == target).sum(), target.numel()


def certainty(output: Tensor, target: Tensor) -> Tensor:
    """The mean of a microbatch."""
    return output.softmax(-1).gather(-1, target.unsqueeze(-1)).mean()


def rows_seen(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Plain numbers, of which the whole batch has as many as rows."""
    del target
    return float(len(output)), 1


METRICS: dict[str, Any] = {"certainty": certainty, "accuracy": accuracy, "rows": rows_seen}


def train(mesh: DeviceMesh, case: Case, every: list[int]) -> list[Found]:
    """The loss and gradients of a step on each number of rows; the shapes of some have occurred before."""
    pipe = pipeline(mesh, case)
    found = [(pipe.step(*batch(rows)).loss, gradients(pipe)) for rows in every]
    pipe.close()
    return found


def plain(case: Case, rows: int) -> Found:
    model = nn.Sequential(*case.modules())
    inputs, targets = batch(rows)
    loss = case.loss(model(inputs), targets)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return float(loss.detach()), {name: p.grad.numpy() for name, p in named if p.grad is not None}


def train_recorded(mesh: DeviceMesh, case: Case, rows: int) -> tuple[list[float], int]:
    """Losses with and without a timeline, and how many tasks it has."""
    pipe = pipeline(mesh, case)
    first, second = pipe.step(*batch(rows)), pipe.step(*batch(rows), record=True)
    losses, timeline = [first.loss, second.loss], second.timeline
    pipe.close()
    return losses, 0 if timeline is None else len(list(timeline.spans()))


def train_in_lists(mesh: DeviceMesh, case: Case, lengths: list[int]) -> tuple[Found, Found, Found]:
    """By a pipeline on lists of microbatches of these rows; by plain autograd, where each weighs alike; and by a
    pipeline on a whole batch.
    """
    inputs, targets = batch(sum(lengths))
    pipe = pipeline(mesh, case)
    whole = pipe.step(inputs, targets).loss, gradients(pipe)
    listed = pipe.step(list(inputs.split(lengths)), list(targets.split(lengths))).loss, gradients(pipe)
    pipe.close()
    model = nn.Sequential(*case.modules())
    parts = zip(inputs.split(lengths), targets.split(lengths), strict=True)
    loss = torch.stack([case.loss(model(x), y) for x, y in parts]).mean()
    loss.backward()
    alike = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return listed, (float(loss.detach()), alike), whole


def whole_and_listed(mesh: DeviceMesh, case: Case) -> tuple[list[Found], list[float]]:
    """The same even microbatches, as a whole batch and as a list, trained and evaluated."""
    inputs, targets = batch(2 * case.microbatches)
    listed = list(inputs.chunk(case.microbatches)), list(targets.chunk(case.microbatches))
    pipe = pipeline(mesh, case)
    found = [(pipe.step(*given).loss, gradients(pipe)) for given in ((inputs, targets), listed)]
    evaluated = [pipe.eval_step(*given).loss for given in ((inputs, targets), listed)]
    pipe.close()
    return found, evaluated


def evaluate(mesh: DeviceMesh, case: Case, every: list[int]) -> list[tuple[float, dict[str, float], list[Any], bool]]:
    """The loss, metrics and outputs of each number of rows, where ranks that need no batch are given none."""
    pipe = pipeline(mesh, case)
    placement = pipe.program.placement
    homes = {stage for rank, stage in placement.homes if rank == mesh.get_local_rank()}
    found = []
    for rows in every:
        inputs, targets = batch(rows)
        given = inputs if 0 in homes else None, targets if placement.stages - 1 in homes else None
        result = pipe.eval_step(*given, metrics=METRICS, outputs=True)
        again = pipe.eval_step(*given)
        outputs = [None if output is None else output.numpy() for output in result.outputs]
        same = again.loss == result.loss and again.metrics == {} and again.outputs is None
        found.append((result.loss, result.metrics, outputs, same))
    pipe.close()
    return found


def plain_measures(case: Case, rows: int) -> tuple[float, dict[str, float], Any]:
    inputs, targets = batch(rows)
    with torch.no_grad():
        output = nn.Sequential(*case.modules())(inputs)
        loss = case.loss(output, targets)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        correct, count = accuracy(output, targets)
        measured = {"accuracy": float(correct) / count, "certainty": float(certainty(output, targets))}
    return float(loss), measured, output.numpy()


def handed_out(mesh: DeviceMesh, schedule: str) -> tuple[list[Any], list[Any], Any]:
    """Outputs that the last stage was itself handed, before and after further evaluations; and what they should be."""
    torch.manual_seed(0)
    plan = Case(schedule, 2, 4).plan()
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    layers += [nn.Identity() for _ in range(plan.stages - 1)]
    balance = [3] + [1] * (plan.stages - 1)
    pipe = stretto.Pipeline(layers, plan=plan, loss=F.mse_loss, mesh=mesh, balance=balance)
    inputs = torch.randn(7, WIDTH, dtype=torch.float64)
    outputs = pipe.eval_step(inputs, outputs=True).outputs
    assert outputs is not None
    before = [None if output is None else output.clone().numpy() for output in outputs]
    pipe.eval_step(inputs * 2, inputs)
    pipe.eval_step(inputs * 3, outputs=True)
    after = [None if output is None else output.numpy() for output in outputs]
    assert not any(output is not None and output.requires_grad for output in outputs)
    pipe.close()
    return before, after, nn.Sequential(*layers)(inputs).detach().numpy()


def without_targets(mesh: DeviceMesh) -> list[str]:
    """What a result says of itself, its loss and its metrics."""
    pipe = pipeline(mesh, Case("one_f_one_b", 2, 4))
    result = pipe.eval_step(batch(5)[0], metrics=METRICS, outputs=True)
    said = [repr(result)]
    for read in (lambda: result.loss, lambda: result.metrics):
        try:
            said.append(str(read()))
        except stretto.PipelineError as error:
            said.append(str(error))
    pipe.close()
    return said


def containers(mesh: DeviceMesh) -> list[Any]:
    """Outputs in a container, with what is no tensor, and with a buffer that every forward changes."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> dict[str, Any]:
            self.seen += 1
            return {"x": x, "rows": len(x), "seen": self.seen}

    plan = stretto.schedules.one_f_one_b(devices=2, microbatches=3)
    pipe = stretto.Pipeline(
        [nn.Identity(), Last()], plan=plan, loss=lambda out, y: (out["x"] - y).square().mean(), mesh=mesh
    )
    x = torch.arange(4.0).unsqueeze(1)
    found = [
        None if output is None else (output["x"].flatten().tolist(), output["rows"], float(output["seen"]))
        for output in pipe.eval_step(x, x, outputs=True).outputs or ()
    ]
    pipe.close()
    return found


def uncounted(mesh: DeviceMesh) -> tuple[float, float]:
    """A metric that counted nothing, and one that is infinite, beside a loss that is neither."""
    case = Case("one_f_one_b", 2, 4)
    pipe = pipeline(mesh, case)
    metrics = {"none": lambda out, _: (out.sum() * 0, 0), "infinite": lambda out, _: out.sum() + float("inf")}
    found = pipe.eval_step(*batch(5), metrics=metrics).metrics
    pipe.close()
    return found["none"], found["infinite"]


REFUSED = {
    "few rows in a step": "inputs have 3 rows, but the plan has 4 microbatches; a step needs at least one row for each",
    "few targets in a step": "targets have 3 rows, but the plan has 4 microbatches; a step needs at least one row",
    "no rows": "inputs cannot be cut into microbatches: their tensors' first dimensions are [0]",
    "unlike rows": "inputs cannot be cut into microbatches: their tensors' first dimensions are [5, 7]",
    "fewer targets": "inputs have 7 rows, but targets have 5; give as many of both",
    "fewer targets in a step": "inputs have 7 rows, but targets have 5; give as many of both",
    "a list of targets": "inputs have 7 rows, which 4 microbatches cannot share equally, and targets are a list of",
    "a list of inputs": "targets have 7 rows, which 4 microbatches cannot share equally, and inputs are a list of",
    "a list of targets in a step": "inputs have 7 rows, which 4 microbatches cannot share equally, and targets are a",
    "a short list": "the plan has 4 microbatches, but inputs has 3",
    "no targets": "rank 1 runs stage 1 and needs targets",
    "other metrics": "rank 1 was given other metrics than rank 0 (accuracy, rows and accuracy, certainty); give all",
    "fewer metrics": "rank 1 was given other metrics than rank 0 (none and accuracy); give all ranks the same",
    "outputs on one rank": "rank 1 was given outputs=False, but rank 0 outputs=True; give all ranks the same",
    "a metric alone": 'metrics are functions of output and target, by name, such as {"accuracy": accuracy} (got <func',
    "no metric": "metrics are functions of output and target, by name, such as {\"accuracy\": accuracy} (got {'a': 1",
    "many numbers": "the metric 'many' of microbatch 0 is a tensor of torch.float64 and shape (2,); it must be",
    "complex": "the metric 'complex' of microbatch 0 is a tensor of torch.complex128 and shape (); it must be",
    "some counted": "the metric 'some' of some microbatches has a count, of others none; it must have one in all or",
    "no count": "the count of the metric 'odd' of microbatch 0 is a str; it must be one number",
    "a metric that fails": "the metric 'odd' failed: ZeroDivisionError: division by zero",
    "changed": "the output of microbatch 0 was changed in place after the last layer had returned it; let the layer",
}


def refused(mesh: DeviceMesh, name: str) -> str:
    case, rank = Case("gpipe", 2, 4), mesh.get_local_rank()
    x, y = batch(7)
    pipe = pipeline(mesh, case)
    kinds = iter([0, 1, 0, 1])

    def evaluate(*metrics: str) -> None:
        pipe.eval_step(x, y, metrics={each: METRICS[each] for each in metrics})

    try:
        match name:
            case "a metric that fails":
                pipe.eval_step(x, y, metrics={"odd": lambda *_: 1 / 0})
            case "few rows in a step":
                pipe.step(x[:3], y)
            case "few targets in a step":
                pipe.step(x, y[:3])
            case "no rows":
                pipe.eval_step(x[:0], y)
            case "unlike rows":
                pipe.eval_step((x, x[:5]), y)
            case "fewer targets":
                pipe.eval_step(x, y[:5])
            case "fewer targets in a step":
                pipe.step(x, y[:5])
            case "a list of targets":
                pipe.eval_step(x, list(y.chunk(4)))
            case "a list of inputs":
                pipe.eval_step(list(x.chunk(4)), y)
            case "a list of targets in a step":
                pipe.step(x, list(y.chunk(4)))
            case "a short list":
                pipe.eval_step(list(x.chunk(3)), list(y.chunk(4)))
            case "no targets":
                pipe.eval_step(x)
            case "other metrics":
                evaluate("accuracy", "rows" if rank else "certainty")
            case "fewer metrics":
                evaluate(*[] if rank else ["accuracy"])
            case "outputs on one rank":
                pipe.eval_step(x, y, outputs=not rank)
            case "a metric alone":
                pipe.eval_step(x, y, metrics=accuracy)
            case "no metric":
                pipe.eval_step(x, y, metrics={"a": 1})
            case "many numbers":
                pipe.eval_step(x, y, metrics={"many": lambda out, _: out.mean((1, 2))})
            case "complex":
                pipe.eval_step(x, y, metrics={"complex": lambda out, _: out.sum() * 1j})
            case "some counted":
                pipe.eval_step(x, y, metrics={"some": lambda out, _: (out.sum(), 1) if next(kinds) else out.sum()})
            case "no count":
                pipe.eval_step(x, y, metrics={"odd": lambda out, _: (out.sum(), "1")})
            case "changed":
                scratch = torch.zeros(2, TOKENS, VOCABULARY, dtype=torch.float64)
                for module in pipe.modules():
                    if type(module).__name__ == "Head":
                        module.forward = lambda h: scratch[: len(h)].copy_(h @ torch.ones(WIDTH, VOCABULARY).double())
                pipe.eval_step(x, outputs=True)
    except (stretto.StrettoError, RuntimeError, TypeError) as error:
        return str(error)
    finally:
        with contextlib.suppress(stretto.StrettoError):
            pipe.close()
    return ""


def unlike_routes(mesh: DeviceMesh, check_finite: bool) -> str:
    """Two routes that no rank joins, each of which is given a batch of its own in the second step."""
    rows = ["0F0,0B0,0F1,0B1", "1F0,1B0,1F1,1B1", "0F2,0B2,0F3,0B3", "1F2,1B2,1F3,1B3"]
    placement = stretto.schedules.Placement(((0, 1), (2, 3)), 4)
    plan = stretto.Plan(stretto.parse_plan("\n".join(rows)).rows, placement)
    pipe = stretto.Pipeline([nn.Linear(2, 2) for _ in range(2)], plan=plan, loss=F.mse_loss, mesh=mesh, timeout=30)
    seven, five = torch.ones(7, 2), torch.ones(5, 2)
    pipe.step(seven, seven)
    mine = seven if mesh.get_local_rank() < 2 else five
    try:
        pipe.step(mine, mine, check_finite=check_finite)
        pipe.step(seven, seven)
    except stretto.PipelineError as error:
        return str(error)
    finally:
        pipe.close()
    return ""
