"""What ranks do to run a program that they were given, and to sum over each other while they do."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
from gradient_jobs import MICROBATCHES, WIDTH, batch, differing, layers, mean, plan_of
from models import Case, gradients, pipeline
from stretto.layers import DENSE, cut_layers
from stretto.program.program import Program
from stretto.program.task import Kind
from stretto.schedules import dualpipe, gpipe


def lowered(case: Case) -> Program:
    phases = [stretto.Phase("attn"), stretto.Phase("dispatch", "comm")]
    phases += [stretto.Phase("mlp"), stretto.Phase("combine", "comm")]
    block = stretto.layers.Layer("block", tuple(phases))
    whole = [stretto.layers.Layer("other", (stretto.Phase(name),)) for name in ("embed", "head")]
    plan = case.plan()
    if not case.phased:
        return stretto.lower(plan, ties=[(0, plan.stages - 1)] if case.tied else [])
    count = case.layers or plan.stages
    model = [whole[0], *[block] * (count - 2), whole[1]]
    return stretto.lower(plan, layers=cut_layers(model, stages=plan.stages))


def by_program(mesh: DeviceMesh, case: Case) -> list[str]:
    """What differs between a pipeline that was given a plan, and one that was given the plan's program."""
    one = pipeline(mesh, case)
    program = lowered(case)
    other = pipeline(mesh, case, plan=None, program=program)
    inputs, targets = case.batch()
    wrong = [] if other.program is program else ["the program"]
    for _ in range(2):
        if one.step(inputs, targets).loss != other.step(inputs, targets).loss:
            wrong.append("the loss")
    theirs = gradients(other)
    wrong += [name for name, grad in gradients(one).items() if not np.array_equal(grad, theirs[name])]
    if one.eval_step(inputs, targets).loss != other.eval_step(inputs, targets).loss:
        wrong.append("the loss of evaluation")
    step = other.step(inputs, targets, record=True)
    if step.timeline is not None and step.timeline.program is not program:
        wrong.append("the program that was recorded")
    return wrong


def in_its_order(mesh: DeviceMesh) -> list[str]:
    """A program whose last device has its last two weight parts the other way round: that is how it runs."""
    case = Case("zb_h1", 2, 4)
    text = str(stretto.lower(case.plan()))
    assert "1W2,1W3" in text
    program = stretto.parse_program(text.replace("1W2,1W3", "1W3,1W2"))
    pipe = pipeline(mesh, case, plan=None, program=program)
    step = pipe.step(*case.batch(), record=True)
    if step.timeline is None:
        return []
    spans = sorted(step.timeline.spans(), key=lambda span: span.start)
    return [str(span.task) for span in spans if span.task.kind is Kind.W and span.task.device == 1]


def without_need(program: Program) -> Program:
    """A program whose first sum waits for nothing."""
    task = int(np.flatnonzero(program.work.kind == Kind.REDUCE)[0])
    a, b = program.need_start[task : task + 2]
    start = program.need_start.copy()
    start[task + 1 :] -= b - a
    return replace(program, need=np.delete(program.need, range(a, b)), need_start=start)


REFUSED = {
    "both": "give a pipeline a plan, or the program that it is to run, and not both",
    "neither": "give a pipeline a plan, or the program that it is to run",
    "a plan for a program": "program is a Program, such as stretto.lower(plan) makes (got Plan(",
    "an update": "this program trains nothing; stretto.lower(plan) makes one that does",
    "an own program": "this program trains nothing; stretto.lower(plan) makes one that does",
    "offload": "the program offloads, but memory does not say what; name it there, or lower without offload",
    "no offload": "memory offloads, but the program copies nothing to host memory; lower with offload=1",
    "recompute": "a pipeline recomputes within its backwards, not in tasks of their own; lower without recompute",
    "costs": "costs are what a plan is woven by; a program is woven already",
    "other devices": "the program is for 4 devices, but the mesh has 2 ranks",
    "unsound": "the program is not sound: dependencies: 1REDUCE_GRAD does not wait for 1B5.wgrad",
    "no sums": "the program does not sum the gradients of stage 0, which several devices hold; programs that lower()",
    "no ties": "the program is for stages that share weights as [] says, but these layers do as [(0, 1)]; give that",
    "ties": "the program is for stages that share weights as [(0, 1)] says, but these layers do as []; give that to",
    "phases": "the program runs stage 0 in the phases attn (compute), mlp (compute), but its layers offer none",
    "one plan, one program": "rank 1 was given another plan than rank 0",
    "others": "rank 1 was given another program than rank 0",
    "used elsewhere": "a gradient of 1.linear.weight came after it was summed over the ranks that hold it: a layer of",
}


class Borrowing(nn.Module):
    """A layer that uses another one's weight, and does not say so."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.own, self._other = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + x @ self._other[0].linear.weight  # type: ignore[union-attr,operator,no-any-return]


def refused(mesh: DeviceMesh, what: str) -> str:
    rank, dual = mesh.get_local_rank(), plan_of("dualpipe")
    program = stretto.lower(dual)
    given: dict[str, Any] = {"program": program, "loss": mean, "mesh": mesh, "timeout": 20}
    made = layers(2)
    try:
        match what:
            case "both":
                given["plan"] = dual
            case "neither":
                given["program"] = None
            case "a plan for a program":
                given["program"] = dual
            case "an update":
                given["program"] = stretto.weight_update(devices=2, buckets=3)
            case "an own program":
                given["program"] = stretto.program_of([stretto.Call("a"), stretto.Call("b", 1)])
            case "offload":
                given["program"] = stretto.lower(dual, offload=1)
            case "no offload":
                given["memory"] = {"*": "offload"}
            case "recompute":
                given["program"] = stretto.lower(dual, recompute=True)
            case "costs":
                given["costs"] = stretto.Costs()
            case "other devices":
                given["program"] = stretto.lower(gpipe(devices=4, microbatches=MICROBATCHES))
            case "unsound":
                given["program"] = without_need(program)
            case "no sums":
                lines = str(program).splitlines()
                kept = [",".join(cell for cell in line.split(",") if "REDUCE" not in cell) for line in lines]
                given["program"] = stretto.parse_program("\n".join(kept))
            case "no ties":
                made[1].linear.weight = made[0].linear.weight  # type: ignore[union-attr]
            case "ties":
                given["program"] = stretto.lower(dual, ties=[(0, 1)])
            case "phases":
                given["program"] = stretto.lower(dual, layers=[[DENSE]] * 2)
            case "one plan, one program":
                given.update({"plan": dual, "program": None} if rank == 0 else {})
            case "others":
                given["program"] = stretto.lower(plan_of(("one_f_one_b", "gpipe")[rank]))
            case "used elsewhere":
                made = [Borrowing(made[1]), made[1]]
        stretto.Pipeline(made, **given).step(*batch())
    except (stretto.StrettoError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


def borrowed(mesh: DeviceMesh) -> list[str]:
    """What differs where a later stage borrows an earlier one's weight: its gradient comes in time."""
    first, _ = layers(2)
    made = [first, Borrowing(first)]
    pipe = stretto.Pipeline(made, plan=plan_of("dualpipe"), loss=mean, mesh=mesh)
    pipe.step(*batch())
    torch.manual_seed(0)
    again = layers(2)[0]
    model = nn.Sequential(again, Borrowing(again))
    model.load_state_dict({**{f"0.{k}": v for k, v in first.state_dict().items()}, **_prefixed(made[1])})
    x, y = batch()
    mean(model(x), y).backward()
    return differing(pipe, model)


def _prefixed(layer: nn.Module) -> dict[str, Tensor]:
    return {f"1.{name}": value for name, value in layer.state_dict().items()}


def summed(mesh: DeviceMesh, case: Case) -> list[str]:
    """What is odd about the times of sums in a recorded step."""
    pipe = pipeline(mesh, case)
    pipe.step(*case.batch())
    timeline = pipe.step(*case.batch(), record=True).timeline
    if timeline is None:
        return []
    program, wrong = timeline.program, []
    sums = np.flatnonzero(program.work.kind == Kind.REDUCE).tolist()
    for task in sums:
        if not timeline.end[task] > timeline.start[task]:
            wrong.append(f"{program.task(task)} took no time")
        for need in program.needs(task):
            if timeline.end[need] > timeline.start[task] + 1e-3:
                wrong.append(f"{program.task(task)} began before the end of {program.task(need)}")
    return [*wrong, str(len(sums))]


class Reading(nn.Module):
    """A head that reads the table of an embedding."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.t()


def sparse_table(mesh: DeviceMesh, transposed: bool) -> list[str]:
    """What differs where a table has sparse gradients on one rank and dense ones on another."""

    def made() -> list[nn.Module]:
        torch.manual_seed(1)
        table = torch.randn(4, 8, dtype=torch.float64).t() if transposed else torch.randn(8, 4, dtype=torch.float64)
        embedding = nn.Embedding(8, 4, sparse=True)
        embedding.weight = nn.Parameter(table)
        return [embedding, nn.Linear(4, 4).double(), Reading(embedding.weight)]

    torch.manual_seed(2)
    x, y = torch.randint(8, (2, 8))
    loss = nn.functional.cross_entropy
    pipe = stretto.Pipeline(made(), plan=gpipe(devices=2, microbatches=4), loss=loss, mesh=mesh)
    pipe.step(x, y)
    model = nn.Sequential(*made())
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (loss(model(part), target) / 4).backward()
    return differing(pipe, model)


def changed_on_one_rank(mesh: DeviceMesh, how: str) -> str:
    """What is said if a table with sparse gradients, which two ranks hold, becomes another on one of them."""
    torch.manual_seed(1)
    made = [nn.Embedding(8, 4, sparse=True), nn.Linear(4, 8)]
    plan = dualpipe(devices=2, microbatches=4)
    pipe = stretto.Pipeline(made, plan=plan, loss=nn.functional.cross_entropy, mesh=mesh, timeout=20)
    x, y = torch.randint(8, (2, 8))
    pipe.step(x, y)
    if mesh.get_local_rank():
        table: Any = made[0].weight
        table.grad = None
        match how:
            case "rows":
                table.data = torch.randn(12, 4)
            case "type":
                table.data = table.data.double()
                made[0].register_forward_hook(lambda _module, _given, out: out.float())
            case "strides":
                table.data = table.data.t().contiguous().t()
    try:
        pipe.step(x, y)
    except stretto.PipelineError as error:
        return str(error)
    return "nothing was refused"


def late_sums(mesh: DeviceMesh) -> list[str]:
    """What differs where inputs depend on a weight that ranks sum: what comes by them is there after the step."""
    given, other = layers(2), layers(2)
    pipe = stretto.Pipeline(given, plan=plan_of("dualpipe"), loss=mean, mesh=mesh, timeout=30)
    x, y = batch()
    wrong = []
    for step in range(2):
        pipe.step(x @ given[0].linear.weight + step, y)  # type: ignore[union-attr,operator]
        model = nn.Sequential(*other)
        model.zero_grad()
        mean(model(x @ other[0].linear.weight + step), y).backward()  # type: ignore[union-attr,operator,no-untyped-call]
        wrong += [f"step {step}: {name}" for name in differing(pipe, model)]
    return wrong
