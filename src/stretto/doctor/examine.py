"""Starts ranks on this machine, collects their results, and stops every process that it started."""

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stretto.doctor.report import Check, Note, Report, Setting, merged
from stretto.ir.errors import StrettoError

_RANK = str(Path(__file__).with_name("rank.py"))
_OUTPUT = "output"  # file with everything that ranks print
_ENDING = 10.0  # seconds for ranks to exit after SIGTERM
_MOST = 8  # ranks, unless the caller asks for more
_ALWAYS = [
    "several machines",
    "engines: vLLM and SGLang (docs/weights.md says how to feed them)",
    "large models, and speed under load (benchmarks/)",
]
_UNTESTED: dict[Setting, list[str]] = {
    "gloo": ["GPUs", "NCCL"],
    "onegpu": ["several GPUs", "NCCL"],
    "nccl": [],
}


def setting_of(gpus: int) -> Setting:
    """Return how ranks communicate on a machine with this many GPUs."""
    return "gloo" if gpus == 0 else "onegpu" if gpus == 1 else "nccl"


def examine(
    setting: Setting | None = None,
    ranks: int | None = None,
    *,
    seconds: int = 110,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run all tests on this machine within `seconds`. Calls `progress` with the name of the latest test."""
    import torch

    gpus = torch.cuda.device_count()
    setting = setting or setting_of(gpus)
    if setting != "gloo" and not gpus:
        raise StrettoError(f"no GPU is to be seen here, which {setting} needs; gloo needs none")
    if ranks is None:
        ranks = min(gpus, _MOST) if setting == "nccl" else 4
    if ranks < 1:
        raise StrettoError(f"a check runs at least 1 rank (got {ranks})")
    if setting == "nccl" and ranks > gpus:
        raise StrettoError(f"nccl runs one rank on each GPU, and there are {gpus} (got {ranks} ranks)")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stretto-doctor-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        failure = _run(_command(setting, ranks, folder, seconds), folder, seconds, progress)
        notes = [_read(folder / f"rank-{rank}.jsonl") for rank in range(ranks)]
        report = Report(
            versions=_versions(),
            setting=setting,
            ranks=ranks,
            training=merged(notes, "training"),
            links=sorted(merged(notes, "links"), key=lambda check: int(check.what.split()[0])),
            push=merged(notes, "push"),
            untested=[*_UNTESTED[setting], *_ALWAYS],
            seconds=time.monotonic() - began,
        )
        if failure or not report.push or all(check.state != "ok" for check in report.training):
            report.push.append(Check("the whole", "failed", _explain(failure, folder, notes)))
        return report


def _command(setting: Setting, ranks: int, folder: Path, seconds: int) -> list[str]:
    script = [_RANK, str(folder), setting, str(seconds + int(_ENDING))]
    if setting != "onegpu":
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [sys.executable, *launcher, *script]
    mps = [] if shutil.which("nvidia-cuda-mps-control") else ["--no-mps"]
    return [sys.executable, "-m", "stretto", "onegpu", "run", "--devices", str(ranks), *mps, *script]


def _run(command: list[str], folder: Path, seconds: int, progress: Callable[[str], None]) -> str:
    """Run the ranks; return why they failed, or an empty string."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}  # torchrun writes its logs to TMPDIR
    with _noting_a_request_to_end() as requests, (folder / _OUTPUT).open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            deadline = time.monotonic() + seconds
            while process.poll() is None and not requests:
                if time.monotonic() > deadline:
                    return f"not done after {seconds} s"
                with contextlib.suppress(OSError, IndexError):
                    progress(_read(folder / "rank-0.jsonl")[-1].check.what)
                time.sleep(0.2)
        finally:
            _stop(process, folder)
    return f"exit code {process.returncode}" if process.returncode else ""


@contextlib.contextmanager
def _noting_a_request_to_end() -> Iterator[list[int]]:
    """Note SIGTERM, and follow it only at the end of this context, when nothing is left behind."""
    requests: list[int] = []
    previous_handler = signal.signal(signal.SIGTERM, lambda number, _: requests.append(number))
    try:
        yield requests
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        if requests:
            sys.exit(128 + requests[0])


def _stop(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Stop the launcher and all ranks. If SIGKILL ends this process, the ranks' own alarm ends them."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING)
        # Kill ranks that remain, such as stopped ones: torchrun starts each in its own session.
        for path in folder.glob("process-*"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: Path) -> list[Note]:
    """Read a rank's results; ignore the last line if it is incomplete."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line, type=Note) for line in lines]


def _explain(failure: str, folder: Path, notes: list[list[Note]]) -> str:
    """Describe how the ranks failed, how far each of them got, and the last error that they printed."""
    reached = ", ".join(
        f"rank {rank} after {rank_notes[-1].check.what}" if rank_notes else f"rank {rank} before anything was tried"
        for rank, rank_notes in enumerate(notes)
    )
    lines = (folder / _OUTPUT).read_text(errors="replace").splitlines()
    errors = [line.strip() for line in lines if "Error" in line and "ChildFailedError" not in line]
    return f"{failure or 'ended too soon'}: {reached}" + (f"; {errors[-1]:.300}" if errors else "")


def _versions() -> dict[str, str]:
    import torch

    versions = {
        "stretto": sys.modules["stretto"].__version__,  # an editable install may say an older one
        "Python": platform.python_version(),
        "PyTorch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
        versions["GPUs"] = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions
