"""Starts ranks that share one GPU: runs torchrun under CUDA MPS, and always stops MPS again."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import FrameType

from stretto.ir.errors import StrettoError

_CONTROL = "nvidia-cuda-mps-control"
_QUEUES = 64  # of all ranks, besides the broker's 32; MPS has no memory for twice as many
_LEAST_QUEUES, _MOST_QUEUES = 8, 16  # of a rank; 8 is CUDA's default


def launch(command: Sequence[str], devices: int, *, link: str | None, mps: bool) -> int:
    """Run a script on `devices` ranks, and return its exit code."""
    if devices < 1:
        raise StrettoError(f"a script runs on at least one device (got {devices})")
    if shutil.which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode:
        raise StrettoError(
            "no NVIDIA GPU is to be seen here; without one, the backend onecpu runs under plain torchrun"
        )
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if link is not None:
        environment["STRETTO_ONEGPU_LINK"] = link
    with contextlib.ExitStack() as stack:
        if mps:
            environment |= stack.enter_context(_mps())
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(max(1, 100 // devices))
            # A lane that waits blocks all other lanes in its queue.
            queues = min(max(_QUEUES // devices, _LEAST_QUEUES), _MOST_QUEUES)
            environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(queues))
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
        process = subprocess.Popen([*ranks, *command], env=environment, start_new_session=True)  # we forward signals
        with _forwarding_signals(process):
            return process.wait()


@contextlib.contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """Run a separate CUDA MPS; yield the environment variables that its clients need."""
    if shutil.which(_CONTROL) is None:
        raise StrettoError(f"{_CONTROL} is not installed; --no-mps runs without, ranks then take turns on the GPU")
    with tempfile.TemporaryDirectory(prefix="stretto-mps-", ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables}
        started = subprocess.run([_CONTROL, "-d"], env=environment, capture_output=True, text=True)
        if started.returncode:
            why = " ".join((started.stdout + started.stderr).split())
            raise StrettoError(f"CUDA MPS does not start ({why or started.returncode}); --no-mps runs without")
        try:
            yield variables
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([_CONTROL], input="quit\n", env=environment, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def _forwarding_signals(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Forward SIGTERM and SIGINT to torchrun; kill it if the block ends while it still runs."""

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()
