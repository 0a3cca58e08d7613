"""Groups over gloo are let go of at once, whatever they wait for."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from stretto.execute.gloo import abort_gloo, gloo_group

SCRIPT = """
import gc, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch
from torch._C import _distributed_c10d as c10d
from stretto.execute.gloo import gloo_group
from stretto.execute.groups import all_reduce

store = c10d.HashStore()
with ThreadPoolExecutor(2) as pool:
    groups = list(pool.map(lambda rank: gloo_group(store, rank, 2, timedelta(seconds=600)), range(2)))
tensor = torch.ones(4)
all_reduce(groups[0], tensor, torch.distributed.ReduceOp.SUM)  # rank 1 never takes part
begun = time.monotonic()
del groups[0]
gc.collect()
print(time.monotonic() - begun < 5, flush=True)
if sys.argv[1] == "peer leaves":
    del groups[0]
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(20)
    print(threading.active_count(), flush=True)
"""


def test_a_group_whose_collective_never_ends_is_let_go_of_at_once_and_so_is_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, ""], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_its_thread_ends_with_the_collective() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, "peer leaves"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "True\n1\n"), ended.stderr


def groups(size: int) -> list[Any]:
    """One group, as its ranks have it: all in this process."""
    store = c10d.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: gloo_group(store, rank, size, timedelta(seconds=600)), range(size)))


@pytest.mark.parametrize("gone", [1, 2])
def test_a_wait_for_a_rank_that_lives_is_ended_though_another_has_gone(gone: int) -> None:
    ranks: dict[int, Any] = dict(enumerate(groups(3)))
    waiting = ranks[0].recv([torch.empty(1)], 3 - gone, 0)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(RuntimeError):
            waiting.wait()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    lost = ranks[0].recv([torch.empty(1)], gone, 0)
    del ranks[gone]
    with pytest.raises(RuntimeError):
        lost.wait()
    assert not ended.wait(0.2)
    abort_gloo(ranks[0])
    assert ended.wait(20)
