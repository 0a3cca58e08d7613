"""Sessions with a receiver, spoken word by word: a version is offered, then come messages of any kind."""

from typing import Any

import torch

from stretto.weights.connection import Connection
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.manifest import Manifest, TensorSpec
from stretto.weights.messages import Buffers, Message, Open, Ready

SECONDS = 30.0
MANIFEST = Manifest("evil", (TensorSpec("w", "float32", (100,)),))


def opening(**changes: Any) -> Open:
    how = {
        "bucket_bytes": 512,
        "split": False,
        "buffers": Buffers(99, 512),
        "silence": 6.0,
        "manifest": MANIFEST,
        **changes,
    }
    return Open("evil", MANIFEST.digest, "", **how)


def after_opening(connection: Connection, *words: Message) -> list[Message]:
    """The answer to each of them, after a version was properly offered."""
    shared = SharedBuffers(512, torch.device("cpu"))
    buffers, files = shared.described(local=connection.local)
    heard = []
    try:
        connection.send(opening(buffers=buffers), files)
        assert isinstance(connection.recv(seconds=SECONDS)[0], Ready)
        for word in words:
            connection.send(word)
            heard.append(connection.recv(seconds=SECONDS)[0])
    finally:
        shared.close()
    return heard
