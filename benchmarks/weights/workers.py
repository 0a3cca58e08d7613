"""Feeds checkpoint-engine's own worker function, unmodified, from our sender: python benchmarks/weights/workers.py"""

import os
import sys
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from stretto.weights import Sender
from stretto.weights.adapters.checkpoint_engine import CheckpointEngineWorkers
from stretto.weights.ipc_buffers import device_name, resolved

SHAPES = {f"layers.{k}.weight": (1024, 1000 + k) for k in range(60)}


def worker(paths: Any, answer: Any) -> None:
    import zmq
    from checkpoint_engine.worker import update_weights_from_ipc

    torch.cuda.set_device(0)
    live: dict[str, Tensor] = {}

    def load(tensors: list[tuple[str, Tensor]]) -> None:
        live.update((name, tensor.cpu()) for name, tensor in tensors)

    with zmq.Context() as sockets:
        while (where := paths.get()) is not None:
            update_weights_from_ipc(sockets, where[0][1], 0, run=load, post_hook=lambda: answer.put(dict(live)))


def main() -> None:
    context = mp.get_context("spawn")
    paths, answer = context.Queue(), context.Queue()
    context.Process(target=worker, args=(paths, answer), daemon=True).start()
    uuid = device_name(resolved("cuda"))
    with Sender(device="cuda", bucket_bytes=16 << 20) as sender:
        endpoint = CheckpointEngineWorkers(uuid, paths.put)
        for seed in range(2):
            torch.manual_seed(seed)
            model = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
            sender.register(f"v{seed}", model)
            report = sender.push(f"v{seed}", [endpoint])
            found = answer.get(timeout=60)
            same = sum(torch.equal(found[name], tensor) for name, tensor in model.items())
            print(
                f"push {seed + 1}: {same} of {len(model)} tensors the same to the bit, {report.receivers}", flush=True
            )
            assert same == len(model)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
