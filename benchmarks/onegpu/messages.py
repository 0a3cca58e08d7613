"""Messages between ranks that share a GPU: GB/s at 64 MiB and the time of a small one, by their streams' clocks.

    stretto onegpu run --devices 4 benchmarks/onegpu/messages.py

Messages are begun one after the other and waited for in the end, as a pipeline does. The peer is the plain thing: the
same bytes copied from the other process's memory, opened beforehand, without any signal.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import stretto.onegpu
from stretto import cuda

SIZE, ROUNDS, REPEAT = 64 * 2**20, 20, 9
Round = Callable[[], Any]
torch_cuda: Any = torch.cuda


def stream_seconds(run: Round, rounds: int) -> float:
    """How long a round takes by the slowest rank's stream, with all queued before it begins; the median of many."""
    found = []
    for _ in range(REPEAT):
        start, end = (torch_cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch_cuda._sleep(100_000_000)  # about 50 ms
        start.record()
        for work in [run() for _ in range(rounds)]:
            if work is not None:
                work.wait()
        end.record()
        while not end.query():
            time.sleep(0.001)
        took = torch.tensor(start.elapsed_time(end) / 1e3 / rounds)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        found.append(float(took))
    return statistics.median(found)


def main() -> None:
    dist.init_process_group("onegpu")
    torch.cuda.set_device(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    source = torch.full((ranks * SIZE,), rank, dtype=torch.uint8, device="cuda")  # the first part is sent by itself
    target = torch.empty_like(source)
    one, room = source[:SIZE], target[:SIZE]
    handles: list[tuple[bytes, int]] = [(b"", 0)] * ranks
    dist.all_gather_object(handles, cuda.share(source.data_ptr()))
    opened = {peer: cuda.open_shared(it[0]) + it[1] for peer, it in enumerate(handles) if peer != rank}
    stream = torch.cuda.current_stream().cuda_stream

    def send() -> Any:
        if rank == 0:
            return dist.isend(one, 1)
        return dist.irecv(room, 0) if rank == 1 else None

    def plain_send() -> None:
        if rank == 1:
            cuda.copy(stream, target.data_ptr(), opened[0], SIZE)

    def broadcast() -> Any:
        return dist.broadcast(one if rank == 0 else room, 0, async_op=True)

    def plain_broadcast() -> None:
        if rank:
            cuda.copy(stream, target.data_ptr(), opened[0], SIZE)

    def all_to_all() -> Any:
        return dist.all_to_all_single(target, source, async_op=True)

    def plain_all_to_all() -> None:
        for peer, place in opened.items():
            cuda.copy(stream, target.data_ptr() + peer * SIZE, place + rank * SIZE, SIZE)
        here = slice(rank * SIZE, (rank + 1) * SIZE)
        target[here].copy_(source[here])

    small = torch.zeros(256, device="cuda")

    def ping() -> None:
        if rank == 0:
            dist.send(small, 1)
            dist.recv(small, 1)
        elif rank == 1:
            dist.recv(small, 0)
            dist.send(small, 0)

    if rank == 0:
        print(f"{ranks} ranks, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n")
        print("| 64 MiB | ours, GB/s | plain copy, GB/s | ratio |\n|---|---|---|---|", flush=True)
    moved = {"send/recv": SIZE, "broadcast": SIZE * (ranks - 1), "all-to-all": SIZE * ranks * ranks}
    pairs = ((send, plain_send), (broadcast, plain_broadcast), (all_to_all, plain_all_to_all))
    for (name, count), (ours, plain) in zip(moved.items(), pairs, strict=True):
        stream_seconds(ours, ROUNDS)
        mine, theirs = stream_seconds(ours, ROUNDS), stream_seconds(plain, ROUNDS)
        if rank == 0:
            print(
                f"| {name} | {count / mine / 1e9:.0f} | {count / theirs / 1e9:.0f} | {theirs / mine:.2f} |", flush=True
            )
    stream_seconds(ping, 50)
    took = stream_seconds(ping, 50) / 2
    if rank == 0:
        print(f"\n1 KiB, one way: {took * 1e6:.1f} µs", flush=True)
    assert stretto.onegpu
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
