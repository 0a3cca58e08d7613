"""Fails at every task of a step, and at every turn of its end: everywhere.py BACKEND HOW FOLDER; tells what went wrong.

Ranks are forked from one process that has imported everything, several worlds at a time. After an exception all ranks
go on, in the same processes; of those that are killed or stopped, the survivors save what they have and end.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import stretto
import stretto.onegpu
from models import Block, disturb
from stretto.wire import timing

RANKS, TOGETHER, SECONDS = 2, 10, 60
timing.SILENCE = 1.5  # ranks on one machine blame early only who is stopped, however loaded it is
ENDS = ("_binding._executor._lanes.end", "_found_wrong", "_total", "_replicas.end", "_gradients.give_out")


def job(rank: int, backend: str, how: str, folder: Path, victim: int, at: int) -> list[str]:
    """What is wrong on this rank after a failure at a task of the victim's, or after one at each in turn."""
    meeting = f"file://{folder / f'meeting-{victim}-{at}'}"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=RANKS)
    dist.barrier()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    if how != "raise":
        return _one(rank, mesh, how, folder, victim, at)
    wrong, files, threads = [], 0, 0
    counted, _ = _pipeline(mesh)
    counted.close()
    for blamed in range(RANKS):
        for place in range(len(counted._binding.tasks) + len(ENDS)):
            wrong += [f"{blamed} {place}: {it}" for it in _raised(rank, mesh, folder, blamed, place)]
            gc.collect()
            files, threads = files or _open_files(), threads or threading.active_count()
    deadline = time.monotonic() + SECONDS  # supervisors stay for seconds, to tell of a failure
    while (_open_files() > files or threading.active_count() > threads) and time.monotonic() < deadline:
        time.sleep(0.1)
    if (left := _open_files()) > files:
        wrong.append(f"{left} files are open, and {files} were")
    if (left := threading.active_count()) > threads:
        wrong.append(f"{left} threads run, and {threads} did: {[it.name for it in threading.enumerate()]}")
    dist.destroy_process_group()
    return wrong


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _pipeline(mesh: Any, name: str = "dualpipe", microbatches: int = 4) -> tuple[stretto.Pipeline, Tensor]:
    torch.manual_seed(0)
    layers = [Block().double() for _ in range(2 * RANKS)]
    batch = torch.randn(microbatches, 3, 8, dtype=torch.float64)
    plan = getattr(stretto.schedules, name)(devices=RANKS, microbatches=microbatches)
    return stretto.Pipeline(layers, plan=plan, loss=nn.functional.mse_loss, mesh=mesh, timeout=20), batch


def _trap(pipe: stretto.Pipeline, at: int, spring: Callable[[], None]) -> str:
    """Let a task fail, or what follows the tasks; which that is."""
    tasks = pipe._binding.tasks
    if at < len(tasks):
        disturb(pipe, at, spring)
        return f"at {tasks[at]} of step 2"
    *path, name = ENDS[at - len(tasks)].split(".")
    thing: Any = reduce(getattr, path, pipe)
    setattr(thing, name, lambda *_, **__: spring())
    return "at the end of step 2"


def _raised(rank: int, mesh: Any, folder: Path, victim: int, at: int) -> list[str]:
    pipe, batch = _pipeline(mesh)
    first = pipe.step(batch, batch).loss
    before = {name: (it.detach().clone(), it.grad.clone()) for name, it in pipe.named_parameters()}  # type: ignore[union-attr]
    random = torch.get_rng_state()

    def spring() -> None:
        raise RuntimeError("out of luck")

    where = _trap(pipe, at, spring) if rank == victim else ""
    told, begun = "", time.monotonic()
    try:
        pipe.step(batch, batch)
    except RuntimeError as error:
        told = str(error)
    except stretto.PipelineError as error:
        told = str(error)
    said: list[Any] = [None] * RANKS
    dist.all_gather_object(said, where)
    place = said[victim]
    expected = "out of luck" if rank == victim else f"rank {victim} failed {place}: RuntimeError: out of luck"
    late = at >= len(pipe._binding.tasks) + len(ENDS) - 2 and not told  # once all is told of, a rank waits for no other
    wrong = [] if told.startswith(expected) or late else [f"told {told!r}, not {expected!r}"]
    if late:
        try:
            pipe.step(batch, batch)
        except stretto.PipelineError as error:
            wrong += [] if str(error).startswith(expected) else [f"told {error}, not {expected}"]
    if time.monotonic() - begun > 10:
        wrong.append(f"took {time.monotonic() - begun:.0f} s")
    for name, it in pipe.named_parameters():
        if not torch.equal(it, before[name][0]) or it.grad is None or not torch.equal(it.grad, before[name][1]):
            wrong.append(f"{name} has changed")
    for module in pipe.modules():
        if not module.training or module._forward_hooks or module._backward_hooks or "forward" in vars(module):
            wrong.append(f"{type(module).__name__} has changed")
    if not torch.equal(random, torch.get_rng_state()):
        wrong.append("random numbers have changed")
    for call in (pipe.step, pipe.eval_step):
        try:
            call(batch, batch)
            wrong.append("went on")
        except stretto.PipelineError as error:
            if "this pipeline has failed and is finished" not in str(error) or "make a new one" not in str(error):
                wrong.append(f"then said {error}")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if float(ones) != RANKS:
        wrong.append(f"ones add up to {float(ones)}")
    dist.barrier()
    dcp.save(pipe.state_dict(), checkpoint_id=folder / f"saved-{victim}-{at}")
    wrong += _threads()
    if at % 2:  # otherwise it is only forgotten
        pipe.close()
    del pipe
    again, batch = _pipeline(mesh)
    if again.step(batch, batch).loss != first:
        wrong.append("a new pipeline computes something else")
    again.close()
    return wrong


def _threads() -> list[str]:
    """Threads of ours that are left, after a moment; some stay until a pipeline is closed, or let go of."""
    kept = ("stretto supervisor", "stretto gloo group", "stretto onegpu", "stretto onecpu")
    deadline = time.monotonic() + 5
    while True:
        names = [it.name for it in threading.enumerate()]
        left = [name for name in names if name.startswith("stretto") and not name.startswith(kept)]
        if not left or time.monotonic() > deadline:
            return [f"{name} is left" for name in left]
        time.sleep(0.02)


def _one(rank: int, mesh: Any, how: str, folder: Path, victim: int, at: int) -> list[str]:
    pipe, batch = _pipeline(mesh, "zb_h1", 2)
    pipe.step(batch, batch)

    def spring() -> None:
        time.sleep(0.5)  # long enough for a heartbeat to tell where it is
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    tasks = pipe._binding.tasks
    if rank == victim:
        _trap(pipe, at, spring)
    begun, wrong = time.monotonic(), []
    try:
        pipe.step(batch, batch)
        return ["went on"]
    except stretto.PipelineError as error:
        told = str(error)
    if rank == victim:  # it was stopped, the others have gone on without it, and now it wakes
        expected = f"the other ranks gave up on this one: rank {victim} has not been heard of for "
        return [] if told.startswith(expected) else [f"the victim was told {told!r}"]
    expected = (
        f"rank {victim} died; it was last seen at" if how == "kill" else f"rank {victim} has not been heard of for"
    )
    if not told.startswith(expected) or " of step 2" not in told:
        wrong.append(f"told {told!r}")
    if time.monotonic() - begun > 12:
        wrong.append(f"took {time.monotonic() - begun:.0f} s")
    torch.save(pipe.state_dict(), folder / f"mine-{victim}-{at}.pt")
    wrong += _threads()
    return wrong if tasks else ["no tasks"]


def main() -> None:
    backend, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    worlds = [(0, 0)] if how == "raise" else [(victim, at) for victim in range(RANKS) for at in range(10)]
    found: dict[str, list[str]] = {}
    for begin in range(0, len(worlds), TOGETHER):
        running: dict[tuple[int, int, int], tuple[int, Path]] = {}
        for victim, at in worlds[begin : begin + TOGETHER]:
            for rank in range(RANKS):
                said = folder / f"said-{victim}-{at}-{rank}"
                running[victim, at, rank] = _forked(rank, backend, how, folder, victim, at, said), said
        deadline = time.monotonic() + (SECONDS if how != "raise" else 200)
        waiting = dict(running)
        while waiting and time.monotonic() < deadline:
            for (victim, at, rank), (child, _) in list(waiting.items()):
                done, _ = os.waitpid(child, os.WNOHANG)
                survivors = [(v, a, r) for v, a, r in waiting if (v, a) == (victim, at) and r != victim]
                if done:
                    del waiting[victim, at, rank]
                elif how == "stop" and rank == victim and not survivors:
                    os.kill(child, signal.SIGCONT)
            time.sleep(0.05)
        for (victim, at, rank), (child, said) in running.items():
            name = f"{how} {backend}, rank {victim} at {at}, on rank {rank}"
            if (victim, at, rank) in waiting:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                found[name] = ["not done in time"]
            elif how == "kill" and rank == victim:
                pass
            elif not said.exists():
                found[name] = ["ended without a word"]
            elif wrong := json.loads(said.read_text()):
                found[name] = wrong
    print(json.dumps({"worlds": len(worlds), "wrong": found}))


def _forked(rank: int, backend: str, how: str, folder: Path, victim: int, at: int, said: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        wrong = job(rank, backend, how, folder, victim, at)
        said.write_text(json.dumps(wrong))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
