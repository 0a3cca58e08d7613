"""Starts ranks that share one GPU: CUDA MPS around torchrun, and MPS stopped again whatever happens."""

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
_QUEUES = 64  # of all ranks, beside the broker's 32; MPS has no memory for twice as many
_LEAST_QUEUES, _MOST_QUEUES = 8, 16  # of a rank; 8 is what CUDA gives to a process that does not ask


def launch(command: Sequence[str], devices: int, *, link: str | None, mps: bool) -> int:
    """Run a script on that many ranks; its exit code."""
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
            # A lane that waits holds up every other lane that shares its queue.
            queues = min(max(_QUEUES // devices, _LEAST_QUEUES), _MOST_QUEUES)
            environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(queues))
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
        process = subprocess.Popen([*ranks, *command], env=environment, start_new_session=True)  # signals come by us
        with _passing_on(process):
            return process.wait()


@contextlib.contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """An MPS of our own, by what its clients must know of it."""
    if shutil.which(_CONTROL) is None:
        raise StrettoError(f"{_CONTROL} is not installed; --no-mps runs without, ranks then take turns on the GPU")
    with tempfile.TemporaryDirectory(prefix="stretto-mps-", ignore_cleanup_errors=True) as folder:
        known = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **known}
        started = subprocess.run([_CONTROL, "-d"], env=environment, capture_output=True, text=True)
        if started.returncode:
            why = " ".join((started.stdout + started.stderr).split())
            raise StrettoError(f"CUDA MPS does not start ({why or started.returncode}); --no-mps runs without")
        try:
            yield known
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([_CONTROL], input="quit\n", env=environment, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def _passing_on(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Requests to end go to the ranks, and we end when they have."""

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()
