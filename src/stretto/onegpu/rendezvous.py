"""The ranks of a new group agree on a broker and on a name, through the store of torch.distributed."""

import uuid

from torch._C import _distributed_c10d as c10d

from stretto.onegpu.engine import Engine


def meet(store: c10d.Store, rank: int, size: int) -> tuple[str, str]:
    """Return a broker's address and a key that no other group has; the store may have served groups before."""
    if rank > 0:
        address, key = store.get(f"broker {rank} {store.add(f'asked {rank}', 1)}").decode().split()
        return address, key
    address, key = Engine.any_address(), uuid.uuid4().hex
    for peer in range(1, size):
        asked, answered = store.add(f"asked {peer}", 0), store.add(f"answered {peer}", 0)
        number = answered if asked < answered else max(asked, answered + 1)  # replace an answer that no rank has read
        store.set(f"broker {peer} {number}", f"{address} {key}")
        store.add(f"answered {peer}", number - answered)
    return address, key
