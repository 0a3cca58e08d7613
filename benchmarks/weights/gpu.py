"""Pushes from pinned host memory into another process's tensors on one GPU, beside checkpoint-engine's.

python benchmarks/weights/gpu.py [--gib 24] [CASE …], e.g. ours-4MiB ours-70k ours-256MiB ours-engine theirs-4MiB
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from mini_engine.model import Config, entries
from mini_engine.shard import Shard
from stretto.execute.host_memory import in_parallel
from stretto.weights import Hooks, Receiver, Sender
from stretto.weights.manifest import TensorSpec

GIB = 1 << 30
PUSHES = 4


def shapes(case: str, gib: float) -> list[TensorSpec]:
    """What a model consists of."""
    total = int(gib * GIB)
    if case == "engine":
        layers = max(1, round(14 * gib / 24))
        found: list[TensorSpec] = entries(engine_config(layers))
        return found
    size = {"256MiB": 256 << 20, "4MiB": 4 << 20, "70k": int(24 * GIB / 70_000) // 2 * 2}[case]
    return [TensorSpec(f"layers.{k}.weight", "bfloat16", (size // 2,)) for k in range(max(1, total // size))]


def engine_config(layers: int) -> Any:
    return Config(
        vocabulary=32768,
        layers=layers,
        width=4096,
        heads=32,
        kv_heads=8,
        head_width=128,
        experts=32,
        expert_width=2048,
    )


def host_tensors(model: list[TensorSpec]) -> dict[str, Tensor]:
    """A model in ordinary host memory, each byte of it different from its neighbours."""
    whole = torch.empty(sum(entry.nbytes for entry in model), dtype=torch.uint8)
    pattern = torch.arange(1 << 20).remainder_(251).to(torch.uint8)
    in_parallel(lambda part: part.copy_(pattern[: len(part)]), torch.split(whole, 1 << 20))
    found, at = {}, 0
    for entry in model:
        found[entry.name] = whole[at : at + entry.nbytes].view(torch.bfloat16).view(entry.shape)
        at += entry.nbytes
    return found


def ours(case: str, gib: float) -> dict[str, float]:
    model = shapes(case, gib)
    address = f"unix://{tempfile.mkdtemp()}/engine"
    context = mp.get_context("spawn")
    ready, check, answer = context.Event(), context.Event(), context.Queue()
    engine = context.Process(target=_our_engine, args=(address, case, gib, ready, check, answer), daemon=True)
    engine.start()
    tensors = host_tensors(model)
    nbytes = sum(entry.nbytes for entry in model)
    assert ready.wait(60)
    found: dict[str, float] = {}
    with Sender(device="cuda") as sender:
        for number in range(PUSHES):
            began = time.perf_counter()
            sender.register(f"v{number}", tensors)
            registered = time.perf_counter()
            report = sender.push(f"v{number}", [address])
            pushed = time.perf_counter()
            found[f"register {number + 1}, s"] = registered - began
            found[f"push {number + 1}, s"] = pushed - registered
            print(f"  {report}", flush=True)
        found["buffers, GiB"] = 2 * report.bucket_bytes / GIB
        found["sender's GPU memory, GiB"] = torch.cuda.max_memory_reserved() / GIB
    check.set()
    if case != "engine":
        for name, data in answer.get(timeout=60).items():
            assert torch.equal(data, tensors[name]), f"{name} is not what was pushed"
    engine.kill()
    found["GB"] = nbytes / 1e9
    return found


def _our_engine(address: str, case: str, gib: float, ready: Any, check: Any, answer: Any) -> None:
    torch.cuda.set_device(0)
    model = shapes(case, gib)
    if case == "engine":
        shard = Shard(engine_config(max(1, round(14 * gib / 24))), device="cuda")
        hooks = Hooks(begin=shard.begin, finish=shard.finish)
        receiver = Receiver(address, shard.load, retains=True, hooks=hooks, device="cuda").start()
    else:
        live = {e.name: torch.zeros(e.shape, dtype=torch.bfloat16, device="cuda") for e in model}
        receiver = Receiver(address, into=live).start()
    ready.set()
    check.wait()
    names = [entry.name for entry in model][:: max(1, len(model) // 20)]
    answer.put({name: live[name].cpu() for name in names} if case != "engine" else {})
    time.sleep(30)
    receiver.close()


def theirs(case: str, gib: float) -> dict[str, float]:
    """checkpoint-engine's own parameter server and worker function."""
    from checkpoint_engine import ParameterServer

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    os.environ["PS_MAX_BUCKET_SIZE_GB"] = "1"  # three buffers of 1 GiB
    model = shapes(case, gib)
    context = mp.get_context("spawn")
    ready, paths, answer = context.Event(), context.Queue(), context.Queue()
    engine = context.Process(target=_their_engine, args=(case, gib, ready, paths, answer), daemon=True)
    engine.start()
    tensors = host_tensors(model)
    assert ready.wait(60)
    server = ParameterServer(auto_pg=True)
    found: dict[str, float] = {}
    for number in range(PUSHES):
        began = time.perf_counter()
        server.register_checkpoint("v", named_tensors=tensors, use_shared_memory_pool=True)
        server.gather_metas("v")
        registered = time.perf_counter()
        server.update("v", paths.put)
        pushed = time.perf_counter()
        found[f"register {number + 1}, s"] = registered - began
        found[f"push {number + 1}, s"] = pushed - registered
        server.unregister_checkpoint("v")
    paths.put(None)
    for name, data in answer.get(timeout=60).items():
        assert torch.equal(data, tensors[name]), f"{name} is not what was pushed"
    engine.kill()
    found["buffers, GiB"] = 3.0
    found["GB"] = sum(entry.nbytes for entry in model) / 1e9
    return found


def _their_engine(case: str, gib: float, ready: Any, paths: Any, answer: Any) -> None:
    import zmq
    from checkpoint_engine.worker import update_weights_from_ipc

    torch.cuda.set_device(0)
    model = shapes(case, gib)
    live = {e.name: torch.zeros(e.shape, dtype=torch.bfloat16, device="cuda") for e in model}

    def load(tensors: list[tuple[str, Tensor]]) -> None:
        torch._foreach_copy_([live[name] for name, _ in tensors], [tensor for _, tensor in tensors])

    ready.set()
    with zmq.Context() as sockets:
        while (where := paths.get()) is not None:
            update_weights_from_ipc(sockets, where[0][1], 0, run=load)
    names = [entry.name for entry in model][:: max(1, len(model) // 20)]
    answer.put({name: live[name].cpu() for name in names})
    time.sleep(30)


CASES = ["ours-256MiB", "ours-4MiB", "ours-70k", "ours-engine", "theirs-4MiB", "theirs-70k", "theirs-256MiB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=24.0)
    parser.add_argument("cases", nargs="*", default=CASES)
    chosen = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    for name in chosen.cases:
        who, case = name.split("-", 1)
        found = {"ours": ours, "theirs": theirs}[who](case, chosen.gib)
        rates = ", ".join(f"{found['GB'] / found[f'push {k + 1}, s']:.1f}" for k in range(PUSHES))
        rest = ", ".join(f"{key} {value:.2f}" for key, value in found.items())
        print(f"{name}: GB/s {rates}; {rest}", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
