"""Groups over gloo: aborted ones hold up nobody, and others end what they have begun."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from stretto.execute.gloo import abort_gloo, gloo_group

LOST = """
import gc, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from stretto.execute.gloo import abort_gloo, gloo_group
from stretto.execute.groups import all_reduce

def lost(*_):
    raise RuntimeError("this closes nothing")

store = c10d.HashStore()
with ThreadPoolExecutor(2) as pool:
    groups = list(pool.map(lambda rank: gloo_group(store, rank, 2, timedelta(seconds=600)), range(2)))
all_reduce(groups[0], torch.ones(4), dist.ReduceOp.SUM)  # rank 1 never takes part
dist.ProcessGroup.recv = lost
abort_gloo(groups[0])
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


def test_an_aborted_group_is_let_go_of_at_once_though_a_wait_is_lost_and_so_is_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", LOST, ""], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_its_thread_ends_with_the_wait() -> None:
    ended = subprocess.run([sys.executable, "-c", LOST, "peer leaves"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "True\n1\n"), ended.stderr


EARLY = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from stretto.execute.gloo import gloo_group
from stretto.execute.groups import all_reduce

rank, meeting, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
group = gloo_group(c10d.FileStore(meeting, 2), rank, 2, timedelta(seconds=600))
if rank == 0:
    time.sleep(3)
tensor = torch.ones(4)
work = all_reduce(group, tensor, dist.ReduceOp.SUM)
if rank == 0:
    work.wait()
    print(tensor.tolist(), flush=True)
elif how == "dropped":
    del group
"""


@pytest.mark.parametrize("how", ["dropped", "kept"])
def test_a_process_that_ends_early_still_takes_part_in_what_it_has_begun(tmp_path: Path, how: str) -> None:
    commands = [[sys.executable, "-c", EARLY, str(rank), str(tmp_path / "store"), how] for rank in range(2)]
    ranks = [subprocess.Popen(it, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for it in commands]
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)] == [(0, f"{[2.0] * 4}\n"), (0, "")]


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
