"""Jobs in which ranks of a pipeline fail, stay away or come late, and go on afterwards in the same processes."""

import contextlib
import gc
import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import stretto
from models import Block, disturb
from stretto.execute.groups import Groups, all_reduce
from stretto.schedules import dualpipe, one_f_one_b

BATCH = 4


def _pipeline(mesh: Any, timeout: float = 30.0, build: Any = None, seed: int = 0) -> stretto.Pipeline:
    torch.manual_seed(0)
    layers = [Block() for _ in range(2)]
    return stretto.Pipeline(
        build or layers.__getitem__,
        layer_count=2,
        plan=one_f_one_b(devices=2, microbatches=BATCH),
        loss=nn.functional.mse_loss,
        mesh=mesh,
        timeout=timeout,
        seed=seed,
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


def left_open(mesh: Any) -> tuple[float, list[str]]:
    """Pipelines that are let go of and not closed, one after the other; what is left of them."""
    before, sums = threading.active_count(), 0.0
    for _ in range(4):
        sums += _step(_pipeline(mesh))
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("stretto"))
    return sums, names


def late(mesh: Any) -> tuple[str, float]:
    said = ""
    if mesh.get_local_rank() == 0:
        try:
            _pipeline(mesh, timeout=1.5)
        except stretto.PipelineError as error:
            said = str(error)
    dist.barrier()
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


def unarrived(mesh: Any) -> str:
    """What a pipeline says if a group fails as those of devices do: what waits goes on, with any numbers."""

    def lose(group: dist.ProcessGroup, tensor: Tensor, op: Any) -> dist.Work:
        work = all_reduce(group, tensor.clone(), op)
        tensor.random_()
        return work

    def check(_: Groups) -> None:
        raise RuntimeError("a message was lost")

    with mock.patch("stretto.execute.team.all_reduce", lose), mock.patch.object(Groups, "check", check):
        try:
            plan = dualpipe(devices=2, microbatches=4)
            stretto.Pipeline([Block() for _ in range(4)], plan=plan, loss=nn.functional.mse_loss, mesh=mesh, timeout=30)
        except stretto.PipelineError as error:
            return str(error)
    return ""


def absent(mesh: Any) -> str:
    """What a rank says that begins a step without the other, which stays away until the first has given up."""
    pipe, said = _pipeline(mesh, timeout=5.0), ""
    _step(pipe)
    if mesh.get_local_rank() == 0:
        try:
            _step(pipe)
        except stretto.PipelineError as error:
            said = str(error)
    dist.barrier()
    return said


def own_operation(mesh: Any) -> float:
    rank = mesh.get_local_rank()
    pipe = _pipeline(mesh)
    numbers = torch.full((1,), float(rank + 1))
    work = dist.all_reduce(numbers, async_op=True) if rank == 0 else None
    if rank:
        disturb(pipe, 3, lambda: [][0])
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


def interrupted(mesh: Any, at: int) -> tuple[str, float, float]:
    """One rank fails between two groups that it makes, the others are in the middle of one; then all try again."""
    usual, made = Groups._new, [0]

    def new(self: Groups, *given: Any) -> Any:
        made[0] += 1
        if mesh.get_local_rank() == 1 and made[0] == at:
            raise KeyboardInterrupt
        return usual(self, *given)

    Groups._new = new  # type: ignore[method-assign]
    said = ""
    try:
        _pipeline(mesh, timeout=10)
    except (stretto.PipelineError, KeyboardInterrupt) as error:
        said = str(error)
    finally:
        Groups._new = usual  # type: ignore[method-assign]
    ones = torch.ones(1)
    dist.all_reduce(ones)
    pipe = _pipeline(mesh, timeout=10)
    loss = _step(pipe)
    pipe.close()
    return said, float(ones), loss


def side_by_side(mesh: Any) -> tuple[str, float, int]:
    """Two pipelines over four ranks, of which one is refused; then both are made anew."""
    pp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["pp"]
    said = ""
    try:
        _pipeline(pp, seed=int(mesh.get_local_rank() == 2)).close()
    except stretto.PipelineError as error:
        said = str(error)
    pipe = _pipeline(pp)
    loss = _step(pipe)
    pipe.close()
    return said, loss, pipe._key.replica


def mismatched(mesh: Any, option: str) -> str:
    """One rank is asked for something else than the other."""
    pipe, batch = _pipeline(mesh), torch.ones(BATCH, 3, 8)
    _step(pipe)
    try:
        pipe.step(batch, batch, **({option: True} if mesh.get_local_rank() else {}))
    except stretto.PipelineError as error:
        return str(error)
    return ""


def handlers(mesh: Any) -> tuple[int, float]:
    """How often the user's handler is called for a request that comes during a step, and how long one takes that
    comes long after several failures.
    """
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    before = signal.signal(signal.SIGTERM, count)
    for _ in range(4):
        pipe = _pipeline(mesh)
        with contextlib.suppress(stretto.PipelineError):
            pipe.step(torch.ones(3, 3, 8), torch.ones(BATCH, 3, 8))
    time.sleep(2.5)
    begun = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    while not calls[0] and time.monotonic() < begun + 20:
        time.sleep(0.01)
    took = time.monotonic() - begun
    pipe = _pipeline(mesh)
    disturb(pipe, 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    _step(pipe)
    time.sleep(6)
    pipe.close()
    signal.signal(signal.SIGTERM, before)
    return calls[0], took


def preempted(mesh: Any) -> tuple[str, int, float, bool]:
    """A handler of the user's that raises, for a request that comes in the middle of a step."""

    class Preempted(Exception):
        pass

    def leave(*_: Any) -> None:
        raise Preempted

    before, said = signal.signal(signal.SIGTERM, leave), ""
    pipe = _pipeline(mesh)
    _step(pipe)
    undo = disturb(pipe, 0, lambda: os.kill(os.getpid(), signal.SIGTERM)) if mesh.get_local_rank() else lambda: None
    try:
        _step(pipe)
    except Preempted:
        said = "preempted"
    undo()
    steps, loss = pipe.step_count, _step(pipe)
    pipe.close()
    mine = signal.signal(signal.SIGTERM, before) is leave
    return said, steps, loss, mine


def elsewhere(mesh: Any) -> list[float]:
    """With and without another device by default."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        layers, batch = [Block() for _ in range(2)], torch.ones(BATCH, 3, 8)
        torch.set_default_device(device)
        try:
            pipe = _pipeline(mesh, build=layers.__getitem__)
            found.append(pipe.step(batch, batch, record=True).loss)
            found.append(pipe.eval_step(batch, batch).loss)
            pipe.close()
        finally:
            torch.set_default_device("cpu")
    return found


def lost_collective(mesh: Any) -> str:
    """A collective in a layer ends because another rank has failed, which is what the user should read."""

    class Talks(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if mesh.get_local_rank():
                raise KeyError("a bad key")
            if x.requires_grad or torch.is_grad_enabled():
                time.sleep(1.0)
                raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
            return super().forward(x)

    rank = mesh.get_local_rank()
    layers = [Block(), Talks()] if rank else [Talks(), Block()]
    pipe = _pipeline(mesh, build=layers.__getitem__)
    if rank:  # which fails as soon as it is asked for anything
        disturb(pipe, 0, lambda: layers[1](torch.ones(1)))
    try:
        _step(pipe)
    except (stretto.PipelineError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def odd_timeout(mesh: Any) -> list[str]:
    said = []
    for timeout in (float("inf"), float("nan"), 1e14, 0):
        try:
            _pipeline(mesh, timeout=timeout)
        except stretto.PipelineError as error:
            said.append(str(error))
    return said


def own_error(mesh: Any) -> str:
    """Of a layer's, while it is given its state."""

    class Mine(RuntimeError):
        pass

    class Odd(Block):
        def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
            raise Mine("not today")

    pipe = _pipeline(mesh, build=[Odd(), Odd()].__getitem__)
    try:
        pipe.load_state_dict(pipe.state_dict())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        pipe.close()
    return ""
