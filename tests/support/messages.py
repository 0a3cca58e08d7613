"""What ranks do over a group of ours, on any device, and what must come of it."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda parts: parts.sum(0),
    "AVG": lambda parts: parts.sum(0) / len(parts),
    "PRODUCT": lambda parts: parts.prod(0),
    "MAX": lambda parts: parts.amax(0),
    "MIN": lambda parts: parts.amin(0),
}


def numbers(rank: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """A rank's numbers, which all can work out, small and whole so that sums are exact."""
    made = (torch.arange(size) * (rank + 3) + rank) % 5 - 1
    return made.to(dtype).to(device)


def collectives(mesh: Any, dtype: torch.dtype, size: int) -> None:
    device, rank, ranks = mesh.device_type, dist.get_rank(), dist.get_world_size()
    mine = numbers(rank, size, dtype, device)
    every = torch.stack([numbers(other, size, dtype, device) for other in range(ranks)])
    for name, reduced in OPERATIONS.items():
        if name == "AVG" and not dtype.is_floating_point:
            continue
        total = mine.clone()
        dist.all_reduce(total, op=getattr(dist.ReduceOp, name))
        same(total, reduced(every).to(dtype))
    total = mine.clone()
    dist.reduce(total, dst=ranks - 1)
    if rank == ranks - 1:
        same(total, every.sum(0).to(dtype))
    for root in range(ranks):
        value = mine.clone()
        dist.broadcast(value, src=root)
        same(value, every[root])
    rooms = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(rooms, mine)
    same(torch.stack(rooms), every)
    flat = mine.new_empty(ranks * size)
    single("all_gather_single", "all_gather_into_tensor")(flat, mine)
    same(flat.view(ranks, size), every)
    whole = numbers(rank, ranks * size, dtype, device)
    wholes = torch.stack([numbers(other, ranks * size, dtype, device) for other in range(ranks)])
    share = torch.empty_like(mine)
    single("reduce_scatter_single", "reduce_scatter_tensor")(share, whole)
    same(share, wholes.sum(0).to(dtype).view(ranks, size)[rank])
    dist.reduce_scatter(share, list(whole.chunk(ranks)) if size else [mine] * ranks)
    same(share, wholes.sum(0).to(dtype).view(ranks, size)[rank])
    rooms = [torch.empty_like(mine) for _ in range(ranks)]
    dist.gather(mine, rooms if rank == 0 else None, dst=0)
    if rank == 0:
        same(torch.stack(rooms), every)
    part = torch.empty_like(mine)
    dist.scatter(part, [row.clone() for row in every] if rank == 1 % ranks else None, src=1 % ranks)
    same(part, every[rank])
    dist.barrier()


def single(new: str, old: str) -> Callable[..., Any]:
    """One function under its names of different releases of PyTorch."""
    return getattr(dist, new, None) or getattr(dist, old)  # type: ignore[no-any-return]


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def shapes(mesh: Any) -> None:
    """Tensors of any number of dimensions are reduced, and several are gathered at once: by rank, then by tensor."""
    device, rank, ranks = mesh.device_type, dist.get_rank(), dist.get_world_size()
    for shape in ((), (2, 3), (2, 0), (1, 2, 3)):
        total = torch.full(shape, float(rank + 1), device=device)
        dist.reduce(total, dst=0)
        if rank == 0:
            same(total, torch.full_like(total, ranks * (ranks + 1) / 2))
    mine = [torch.full((size,), 10.0 * rank + size, device=device) for size in (1, 2, 3)]
    rooms = [[torch.empty_like(tensor) for tensor in mine] for _ in range(ranks)]
    dist.all_gather_coalesced(rooms, mine)
    for other, row in enumerate(rooms):
        for size, room in enumerate(row, 1):
            same(room, torch.full((size,), 10.0 * other + size, device=device))


def uneven(mesh: Any, sizes: list[list[int]], width: int) -> None:
    """All to all: row r of sizes says how many rows rank r sends to each."""
    device, rank, ranks = mesh.device_type, dist.get_rank(), dist.get_world_size()

    def sent(source: int, target: int) -> Tensor:
        rows = torch.arange(sizes[source][target] * width, device=device).view(-1, width)
        return rows + 1000 * source + 100 * target

    given = torch.cat([sent(rank, target) for target in range(ranks)])
    incoming = [sizes[source][rank] for source in range(ranks)]
    out = given.new_empty((sum(incoming), width))
    dist.all_to_all_single(out, given, incoming, sizes[rank])
    same(out, torch.cat([sent(source, rank) for source in range(ranks)]))
    rooms = [given.new_empty((count, width)) for count in incoming]
    dist.all_to_all(rooms, list(given.split(sizes[rank])))
    same(torch.cat(rooms), out)


def in_order(mesh: Any, count: int) -> None:
    """Many messages each way between all, of different sizes, begun before any is waited for."""
    device, rank, ranks = mesh.device_type, dist.get_rank(), dist.get_world_size()
    others = [other for other in range(ranks) if other != rank]
    rooms = {other: [torch.empty(k % 7 + 1, device=device) for k in range(count)] for other in others}
    works = []
    for k in range(count):
        for other in others:
            works.append(dist.irecv(rooms[other][k], other))
            works.append(dist.isend(torch.full((k % 7 + 1,), float(1000 * rank + k), device=device), other))
    for work in works:
        work.wait()
    for other in others:
        for k, room in enumerate(rooms[other]):
            same(room, torch.full_like(room, 1000 * other + k))


def far_ahead(mesh: Any, count: int) -> None:
    """Both send all before they receive any, and then both receive all before they send any."""
    device, other = mesh.device_type, 1 - dist.get_rank()
    for sends_first in (True, False):
        rooms = [torch.empty(1, device=device) for _ in range(count)]
        works = [] if sends_first else [dist.irecv(room, other) for room in rooms]
        works += [dist.isend(torch.full((1,), float(k), device=device), other) for k in range(count)]
        works += [dist.irecv(room, other) for room in rooms] if sends_first else []
        for work in works:
            work.wait()
        same(torch.cat(rooms), torch.arange(float(count), device=device))


def left_behind(mesh: Any) -> list[str]:
    """What a rank waits for in a group that it has left itself."""
    group, errors = dist.new_group([0, 1]), list[str]()
    dist.barrier()
    if dist.get_rank() == 0:
        works = [dist.irecv(torch.zeros(1, device=mesh.device_type), 1, group=group)]
        works.append(dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=group, async_op=True))
        dist.destroy_process_group(group)
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(str(error))
    dist.barrier()
    return errors


def ring(mesh: Any) -> None:
    """Everybody sends before it receives."""
    device, rank, ranks = mesh.device_type, dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.full((1000,), float(rank), device=device), torch.empty(1000, device=device)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, (rank + 1) % ranks), dist.P2POp(dist.irecv, theirs, (rank - 1) % ranks)]
    )
    for work in works:
        work.wait()
    same(theirs, torch.full_like(theirs, (rank - 1) % ranks))


def rendezvous(mesh: Any) -> tuple[bool, bool]:
    """Whether a send had ended before and after it was received."""
    device, rank = mesh.device_type, dist.get_rank()
    tensor = torch.ones(10, device=device)
    if rank != 0:
        dist.barrier()
        dist.recv(tensor, 0)
        dist.barrier()
        return False, True
    work = dist.isend(tensor, 1)
    time.sleep(0.2)
    before = work.is_completed()
    dist.barrier()
    work.wait()
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    return before, work.is_completed()


def sub_groups(mesh: Any) -> None:
    """Groups within groups, at the same time; each pair's messages by their own group."""
    device, rank, ranks = mesh.device_type, dist.get_rank(), dist.get_world_size()
    groups = {(a, b): dist.new_group([a, b]) for a in range(ranks) for b in range(a + 1, ranks)}
    works = []
    for (a, b), group in groups.items():
        if rank in (a, b):
            total = torch.full((3,), float(rank + 1), device=device)
            works.append((dist.all_reduce(total, group=group, async_op=True), total, a + b + 2))
    for work, total, expected in reversed(works):
        work.wait()
        same(total, torch.full_like(total, expected))


def meshes(mesh: Any) -> None:
    """DeviceMesh in two dimensions, and functional collectives on it."""
    device, rank = mesh.device_type, dist.get_rank()
    both = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    mine = torch.full((4,), float(rank), device=device)
    group = both.get_group("tp")
    row = [2 * (rank // 2), 2 * (rank // 2) + 1]
    same(functional.all_reduce(mine, "sum", group).clone(), torch.full((4,), float(sum(row)), device=device))
    gathered = functional.all_gather_tensor(mine, 0, group).clone()
    same(gathered, torch.tensor([float(row[0])] * 4 + [float(row[1])] * 4, device=device))
    share = functional.reduce_scatter_tensor(mine, "sum", 0, both.get_group("dp")).clone()
    same(share, torch.full((2,), float(rank % 2 * 2 + 2), device=device))
    given = torch.arange(4.0, device=device) + 10 * rank
    swapped = functional.all_to_all_single(given, None, None, group).clone()
    place = rank % 2
    same(swapped, torch.cat([torch.arange(4.0, device=device)[2 * place : 2 * place + 2] + 10 * r for r in row]))


def wrong_sizes(mesh: Any) -> str:
    """One rank sends more than the other wants."""
    device, rank = mesh.device_type, dist.get_rank()
    try:
        if rank == 0:
            dist.send(torch.zeros(4, device=device), 1)
        elif rank == 1:
            dist.recv(torch.zeros(3, device=device), 0)
        if device == "cuda":
            torch.cuda.synchronize()
            time.sleep(0.5)
        dist.send(torch.zeros(4, device=device), 1 - rank)
    except RuntimeError as error:
        return str(error)
    return ""


def unknown_reduction(mesh: Any) -> str:
    """Refused before anything is sent, so that the group goes on."""
    tensor = torch.ones(2, device=mesh.device_type)
    try:
        dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(2.0))
    except ValueError as error:
        dist.all_reduce(tensor)
        return f"{error} {tensor.tolist()}"
    return ""


def refused(mesh: Any) -> list[str]:
    """What cannot be moved is refused on all ranks before anything is posted, and the group goes on."""
    device, rank, ranks = mesh.device_type, dist.get_rank(), dist.get_world_size()
    mine, errors = torch.full((4,), float(rank), device=device), []
    apart = [torch.zeros(4, device=device) for _ in range(ranks)]
    apart[(rank + 2) % ranks] = torch.zeros(8, device=device)[::2]
    short = [torch.zeros(4, device=device)] * (ranks - 1) + [torch.zeros(3, device=device)]
    lazy = [torch.zeros(4, device=device)] * (ranks - 1) + [torch._neg_view(torch.zeros(4, device=device))]
    for rooms in (apart, short, lazy, apart[1:]):
        try:
            dist.all_gather(rooms, mine + 100)
        except ValueError as error:
            errors.append(str(error))
    try:
        dist.all_reduce(mine, op=dist.ReduceOp.BAND)
    except RuntimeError as error:
        errors.append(type(error).__name__)
    rooms = [torch.zeros(4, device=device) for _ in range(ranks)]
    dist.all_gather(rooms, mine)
    same(torch.stack(rooms)[:, 0], torch.arange(float(ranks), device=device))
    return errors


def refused_by_one(mesh: Any) -> str:
    """A collective that one rank was refused must not be taken for the next."""
    device, rank = mesh.device_type, dist.get_rank()
    works = []
    room = torch.full((4,), 7.0, device=device)
    try:
        with suppress(ValueError):
            works.append(dist.broadcast(room if rank == 0 else torch.zeros(8, device=device)[::2], 0, async_op=True))
        room = torch.full((4,), 8.0, device=device) if rank == 0 else torch.zeros(4, device=device)
        dist.broadcast(room, 0)
        while True:
            dist.barrier()
            dist.broadcast(room, 0)
    except RuntimeError as error:
        return f"{error} {room[0].item():g}"


def lazy_tensors(mesh: Any) -> None:
    """Negatives that PyTorch has put off, and tensors of inference mode."""
    device, rank = mesh.device_type, dist.get_rank()
    if rank == 0:
        dist.send(torch._neg_view(torch.tensor([1.0, 2.0], device=device)), 1)
    else:
        room = torch.zeros(2, device=device)
        dist.recv(room, 0)
        same(room, torch.tensor([-1.0, -2.0], device=device))
    for size in (2, 100_000):
        total = torch._neg_view(torch.ones(size, device=device))
        dist.all_reduce(total)
        same(total.resolve_neg(), torch.full((size,), -2.0, device=device))
    with torch.inference_mode():
        total, room = torch.ones(2, device=device), torch.full((2,), float(rank), device=device)
        dist.all_reduce(total)
        dist.broadcast(room, 0)
        same(total, torch.full((2,), 2.0, device=device))
        same(room, torch.zeros(2, device=device))
    dist.all_reduce(total)
    same(total, torch.full((2,), 4.0, device=device))
