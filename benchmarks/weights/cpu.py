"""A push between processes without a GPU, beside plain copies; and how long a million tensors take to plan.

python benchmarks/weights/cpu.py [--mib 512] [--senders 4]
"""

import argparse
import tempfile
import time
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from stretto.weights import Receiver, Sender
from stretto.weights.layout import lay_out
from stretto.weights.manifest import Manifest, TensorSpec
from stretto.weights.send.choose import Speeds, bucket_bytes_for, choose

PUSHES = 6
TENSOR = 1 << 20


def tensors(mib: int, rank: int, senders: int) -> dict[str, Tensor]:
    """A rank's share."""
    return {f"layers.{k}.weight": torch.full((TENSOR,), k % 251, dtype=torch.uint8) for k in range(rank, mib, senders)}


def sender(rank: int, senders: int, mib: int, meeting: str, addresses: list[str], results: "Queue[Any]") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=senders)
    with Sender(device="cpu") as made:
        for number in range(PUSHES):
            made.register(f"v{number}", tensors(mib, rank, senders))
            report = made.push(f"v{number}", addresses)
            if rank == 0:
                results.put((report.seconds, report.mode, report.buckets))
    dist.destroy_process_group()


def engine(address: str, mib: int, ready: "Queue[Any]") -> None:
    torch.set_num_threads(1)
    live = {f"layers.{k}.weight": torch.zeros(TENSOR, dtype=torch.uint8) for k in range(mib)}
    receiver = Receiver(address, into=live).start()
    ready.put(True)
    time.sleep(600)
    receiver.close()


def plain(mib: int, results: "Queue[Any]") -> None:
    """The least that a push does here: each device's bytes are copied into its buffer, and from there into place."""
    torch.set_num_threads(1)
    source, buffer, live = (torch.zeros(mib << 20, dtype=torch.uint8) for _ in range(3))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        buffer.copy_(source)
        live.copy_(buffer)
        times.append(time.perf_counter() - began)
    results.put(min(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--senders", type=int, default=4)
    given = parser.parse_args()
    context = mp.get_context("spawn")
    folder = tempfile.mkdtemp()
    results: Any = context.Queue()
    copies = [context.Process(target=plain, args=(given.mib, results)) for _ in range(given.senders)]
    for process in copies:
        process.start()
    ceiling = max(results.get(timeout=300) for _ in copies)
    addresses = [f"unix://{folder}/{k}" for k in range(given.senders)]
    engines = [context.Process(target=engine, args=(it, given.mib, results), daemon=True) for it in addresses]
    for process in engines:
        process.start()
    for _ in engines:
        results.get(timeout=120)
    arguments = (given.senders, given.mib, f"{folder}/meeting", addresses, results)
    senders = [context.Process(target=sender, args=(rank, *arguments), daemon=True) for rank in range(given.senders)]
    for process in senders:
        process.start()
    found = [results.get(timeout=300) for _ in range(PUSHES)]
    for process in (*senders, *engines):
        process.kill()
    gb = given.mib * (1 << 20) / 1e9
    best = min(seconds for seconds, _, _ in found)
    mode, buckets = found[-1][1:]
    print(f"{given.senders} senders and receivers, {given.mib} MiB into each, {buckets} buckets, mode {mode}")
    print(f"push: {gb / best:.2f} GB/s into each receiver (best of {PUSHES}); first {gb / found[0][0]:.2f}")
    print(f"two plain copies of the same bytes, {given.senders} processes at once: {gb / ceiling:.2f} GB/s")
    print(f"ratio {ceiling / best:.2f}; a push also broadcasts over loopback, and sums every bucket three times")
    began = time.perf_counter()
    model = Manifest("v", tuple(TensorSpec(f"layers.{k}.weight", "bfloat16", (64, k % 64)) for k in range(1_000_000)))
    made = time.perf_counter()
    model.check()
    bucket_bytes = bucket_bytes_for(model, 8, 1 << 40)
    layout = lay_out(model, bucket_bytes)
    choose(8, len(layout), bucket_bytes, Speeds(5e10, 1e11, 5e11), 1 << 40)
    digest = model.digest
    planned = time.perf_counter() - made
    print(f"planning 1,000,000 tensors ({digest[:8]}): {planned:.1f} s, after {made - began:.1f} s to make their list")


if __name__ == "__main__":
    main()
