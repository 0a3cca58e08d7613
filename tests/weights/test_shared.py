"""Buffers on a GPU that another process made: what it says of them is checked before anything is read or written."""

import multiprocessing as mp
from typing import Any

import pytest
import torch

from stretto.ir.errors import WeightsError
from stretto.weights.ipc_buffers import OpenedBuffers, SharedBuffers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NBYTES = 1 << 20
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"offset": 1 << 40}, "are said to be bytes"),
        ({"offset": -256}, "are said to be bytes -256 to"),
        ({"nbytes": 1 << 40}, "are said to be bytes"),
        ({"nbytes": -(1 << 20)}, "are said to be bytes"),
        ({"handle": b"\\1" * 64}, "cannot open the sender's buffers"),
        ({"handle": b"short"}, "cannot open the sender's buffers"),
    ],
)
def test_what_a_peer_says_of_its_memory_is_checked(change: dict[str, Any], said: str) -> None:
    context = mp.get_context("spawn")
    told, done = context.Queue(), context.Event()
    peer = context.Process(target=make, args=(told, done), daemon=True)
    peer.start()
    try:
        buffers = told.get(timeout=60)
        for name, value in change.items():
            setattr(buffers, name, value)
        if said:
            with pytest.raises(WeightsError, match=said):
                OpenedBuffers(buffers, [], GPU)
        else:
            opened = OpenedBuffers(buffers, [], GPU)
            assert [it[:3].tolist() for it in opened.tensors] == [[7, 7, 7], [9, 9, 9]]
            opened.close()
        assert torch.ones(5, device=GPU).sum() == 5  # the device is as good as before
    finally:
        done.set()
        peer.join(30)
        peer.kill()


def make(told: Any, done: Any) -> None:
    made = SharedBuffers(NBYTES, GPU)
    made.tensors[0].fill_(7)
    made.tensors[1].fill_(9)
    torch.cuda.synchronize()
    told.put(made.described(local=True)[0])
    done.wait(60)
    made.close()
