"""`stretto push` next to a receiver, as a user sees it on a terminal and with a secret."""

import os
import pty
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stretto.weights.receive.receiver import Receiver

SECONDS = 60.0
MODEL = {f"layers.{k}.weight": torch.arange(k, k + 5000.0) for k in range(9)}
ENVIRONMENT = {"COLUMNS": "100", "PATH": "", "TERM": "xterm"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    save_file(MODEL, tmp_path / "step-7.safetensors")
    return tmp_path / "step-7.safetensors"


@contextmanager
def receiving(address: str, secret: Path | None = None) -> Iterator[tuple[Receiver, dict[str, Tensor]]]:
    live = {name: torch.zeros_like(tensor) for name, tensor in MODEL.items()}
    with Receiver(address, into=live, secret_file=secret) as receiver:
        yield receiver.start(), live


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "stretto", "push", *map(str, arguments), "--device", "cpu"]


def on_a_terminal(arguments: list[str]) -> tuple[int, str]:
    """How it ends, and all that it shows on its errors' terminal, without what moves the cursor."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=theirs, env=ENVIRONMENT)
    os.close(theirs)
    late = threading.Timer(SECONDS, process.kill)
    late.start()
    shown = b""
    try:
        while part := _read(ours):
            shown += part
        return process.wait(), re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", shown.decode())
    finally:
        late.cancel()
        process.kill()
        process.wait()
        os.close(ours)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody has it open any more
        return b""


def test_a_terminal_shows_what_is_done_and_how_far_it_is(checkpoint: Path) -> None:
    with receiving(f"unix://{checkpoint.parent}/r") as (receiver, _):
        code, shown = on_a_terminal(command(checkpoint, "--to", receiver.address.text, "--bucket", "0.02MiB"))
        assert code == 0, shown
        assert receiver.ensure_serving() == "step-7.safetensors"
    assert re.search(r"registering .*0/180\.0 kB", shown)
    assert re.search(r"pushing .*0/180\.0 kB", shown)
    assert re.search(r"pushing .*180\.0/180\.0 kB", shown)
    assert shown.index("registering") < shown.index("pushing")


@pytest.mark.parametrize("known", [True, False])
def test_a_receiver_over_tcp_is_reached_by_who_knows_its_secret(checkpoint: Path, known: bool) -> None:
    secrets = [checkpoint.parent / name for name in ("theirs", "ours")]
    for number, file in enumerate(secrets):
        file.write_text(f"{number}e4bd8a1c3f0925566d0a7be18c2f94d\n")
        file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with receiving(address, secrets[0]) as (receiver, live):
        arguments = command(checkpoint, "--to", address, "--secret-file", secrets[0 if known else 1])
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS, env=ENVIRONMENT)
        if known:
            assert (done.returncode, done.stderr) == (0, "")
            assert f"{address} serves it, verified" in done.stdout
        else:
            said = f"stretto: {address} did not accept the secret\n"
            assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
        assert receiver.ensure_serving() == ("step-7.safetensors" if known else "initial")
        assert all(torch.equal(live[name], it if known else torch.zeros_like(it)) for name, it in MODEL.items())
