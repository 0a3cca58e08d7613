"""Jobs in which ranks of a pipeline fail, stay away or come late, and go on afterwards in the same processes."""

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stretto
from models import Block

BATCH = 4


def _pipeline(mesh: Any, timeout: float = 30.0, build: Any = None) -> stretto.Pipeline:
    torch.manual_seed(0)
    layers = [Block() for _ in range(2)]
    return stretto.Pipeline(
        build or layers.__getitem__,
        layer_count=2,
        plan=stretto.one_f_one_b(devices=2, microbatches=BATCH),
        loss=nn.functional.mse_loss,
        mesh=mesh,
        timeout=timeout,
    )


def _step(pipe: stretto.Pipeline) -> float:
    batch = torch.ones(BATCH, 3, 8)
    return pipe.step(batch, batch).loss


def closed(mesh: Any) -> tuple[list[str], float]:
    pipe = _pipeline(mesh)
    _step(pipe)
    pipe.close()
    pipe.close()
    begun, said = time.monotonic(), []
    for call in (pipe.step, pipe.eval_step):
        try:
            call(torch.ones(BATCH, 3, 8), torch.ones(BATCH, 3, 8))
        except stretto.PipelineError as error:
            said.append(str(error))
    return said, time.monotonic() - begun


def late(mesh: Any) -> tuple[str, float]:
    said = ""
    if mesh.get_local_rank():
        time.sleep(3)
    else:
        try:
            _pipeline(mesh, timeout=1.5)
        except stretto.PipelineError as error:
            said = str(error)
    pipe = _pipeline(mesh)
    loss = _step(pipe)
    pipe.close()
    return said, loss


def unmade(mesh: Any) -> tuple[str, float, float]:
    def build(number: int) -> nn.Module:
        if number == 1 and mesh.get_local_rank() == 1:
            raise FileNotFoundError("no such weights")
        return Block()

    said = ""
    try:
        _pipeline(mesh, build=build)
    except (stretto.PipelineError, FileNotFoundError) as error:
        said = str(error)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    pipe = _pipeline(mesh)
    loss = _step(pipe)
    pipe.close()
    return said, float(ones), loss


def absent(mesh: Any) -> str:
    pipe = _pipeline(mesh, timeout=1.0)
    _step(pipe)
    if mesh.get_local_rank():
        time.sleep(9)
        return ""
    try:
        _step(pipe)
    except stretto.PipelineError as error:
        return str(error)
    return "went on"


def own_operation(mesh: Any) -> float:
    rank = mesh.get_local_rank()
    pipe = _pipeline(mesh)
    numbers = torch.full((1,), float(rank + 1))
    work = dist.all_reduce(numbers, async_op=True) if rank == 0 else None
    if rank:
        pipe._passes._runs[3] = lambda: [][0]
    with contextlib.suppress(stretto.PipelineError, IndexError):
        _step(pipe)
    work = work or dist.all_reduce(numbers, async_op=True)
    assert work is not None
    work.wait()
    return float(numbers)


def missing_key(mesh: Any) -> str:
    pipe = _pipeline(mesh)
    state = {name: value for name, value in pipe.state_dict().items() if not name.endswith("up.bias")}
    said = ""
    try:
        pipe.load_state_dict({**state, "7.unknown": torch.ones(1)})
    except RuntimeError as error:
        said = str(error)
    pipe.close()
    return said


def asked_late(mesh: Any) -> tuple[float, float, str, float]:
    """Losses that are asked for after a pipeline was closed, and after it has failed."""
    batch = torch.ones(BATCH, 3, 8)
    pipe = _pipeline(mesh)
    expected = _step(pipe)
    result = pipe.step(batch, batch, check_finite=False)
    pipe.close()
    found, said = result.loss, ""
    pipe = _pipeline(mesh)
    result = pipe.step(batch, batch, check_finite=False)
    with contextlib.suppress(stretto.PipelineError):
        pipe.step(batch[:3], batch)
    begun = time.monotonic()
    try:
        result.loss  # noqa: B018
    except stretto.PipelineError as error:
        said = str(error)
    return expected, found, said, time.monotonic() - begun
