"""Processes of a soak: engines that answer requests from their weights, and senders that push into them, for as long as
they are let. Each prints a line for whatever happens; `python soak.py engine ADDRESS` or `sender FOLDER ADDRESSES…`."""

import os
import sys
import threading
import time
from pathlib import Path

import torch

from stretto.ir.errors import WeightsError
from stretto.weights import Hooks, Receiver, Sender

SIZES = [(64, 33), (1000,), (), (5, 7, 11), (300_000,), (70, 900)]
TIMEOUT, BUCKET_TIMEOUT = 10.0, 3.0


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.full(size, value, dtype=torch.float64) for number, size in enumerate(SIZES)}


def say(*words: object) -> None:
    print(f"{time.monotonic():.3f}", *words, flush=True)


class Engine:
    """Answers requests from all of its weights: they must be of one version, and of the one it says it serves."""

    def __init__(self, address: str) -> None:
        self.live = tensors(0.0)
        self._free = threading.Condition()
        self._running, self._paused = 0, False
        hooks = Hooks(pause=self._pause, begin=lambda: None, resume=self._resume)
        self.receiver = Receiver(address, into=self.live, hooks=hooks, version="0").start()
        self.answered = 0

    def _pause(self, _: object) -> None:
        with self._free:
            self._paused = True
            self._free.wait_for(lambda: not self._running)

    def _resume(self) -> None:
        with self._free:
            self._paused = False
            self._free.notify_all()

    def request(self) -> None:
        with self._free:
            if self._paused:
                self._free.wait(0.05)
                return
            try:
                version = self.receiver.ensure_serving()
            except WeightsError:
                return
            self._running += 1
        try:
            values = {float(it) for tensor in self.live.values() for it in tensor.aminmax()}
            if values != {float(version)}:
                say("mixed", version, sorted(values))
            self.answered += 1
        finally:
            with self._free:
                self._running -= 1
                self._free.notify_all()


def engine(address: str) -> None:
    made = Engine(address)

    def serve_requests() -> None:
        while True:
            made.request()
            time.sleep(0.01)

    for _ in range(3):
        threading.Thread(target=serve_requests, daemon=True).start()
    while True:
        status = made.receiver.status
        files = len(os.listdir("/proc/self/fd"))
        say("engine", status.state, status.version, made.answered, files, threading.active_count())
        time.sleep(0.25)


def sender(folder: str, *addresses: str) -> None:
    """Until a file says to stop; versions are numbers that nobody else has."""
    with Sender(device="cpu", timeout=TIMEOUT, bucket_timeout=BUCKET_TIMEOUT, bucket_bytes=32768, split=True) as made:
        say("ready")
        count = 0
        while not (Path(folder) / "stop").exists():
            count += 1
            version = str(os.getpid() * 1000 + count % 1000)
            made.register(version, tensors(float(version)))
            say("pushes", version)
            try:
                report = made.push(version, list(addresses))
                say("pushed", version, *set(report.receivers.values()))
            except WeightsError as error:
                say("failed", version, str(error))
                time.sleep(0.05)
            say("files", len(os.listdir("/proc/self/fd")), threading.active_count())


if __name__ == "__main__":
    {"engine": engine, "sender": sender}[sys.argv[1]](*sys.argv[2:])
