"""Real processes that run jobs together over gloo on loopback, with deadlines; nothing is left behind."""

import faulthandler
import gc
import multiprocessing
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import FORKS

Job = Callable[..., Any]


class Ranks:
    """Processes that wait for jobs. A job is a function of an importable module, run on each with its rank."""

    def __init__(self, count: int, *, backend: str = "gloo", device: str = "cpu") -> None:
        self._count, self._number = count, 0
        self._over = backend, device
        self._folder = tempfile.TemporaryDirectory()
        self._start()

    def _start(self) -> None:
        cuda = self._over[1] == "cuda"  # which a copy of another process could not use
        context: Any = multiprocessing.get_context("spawn") if cuda else FORKS
        self._jobs = [context.Queue() for _ in range(self._count)]
        self._results: Any = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(rank, self._jobs[rank], self._results, *self._over), daemon=True)
            for rank in range(self._count)
        ]
        for process in self._processes:
            process.start()

    def run(
        self,
        job: Job,
        count: int,
        *arguments: Any,
        timeout: float = float(os.environ.get("STRETTO_TEST_SECONDS", "120")),
    ) -> list[Any]:
        """The result of each rank; raises if one fails or is not done in time, and begins anew with fresh processes."""
        self._number += 1
        meeting = Path(self._folder.name) / str(self._number)
        for rank in range(count):
            self._jobs[rank].put((job, rank, count, str(meeting), arguments))
        results: dict[int, Any] = {}
        while len(results) < count:
            try:
                rank, failed, result = self._results.get(timeout=timeout)
            except queue.Empty:
                self._tell_where()
                self._restart()
                missing = sorted(set(range(count)) - set(results))
                raise TimeoutError(f"{job.__name__}: ranks {missing} were not done after {timeout} s") from None
            if failed:
                self._restart()
                raise AssertionError(f"rank {rank} failed:\n{result}")
            results[rank] = result
        return [results[rank] for rank in range(count)]

    def stop(self) -> None:
        self._kill()
        self._folder.cleanup()

    def _tell_where(self) -> None:
        """Let all print where they are."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _restart(self) -> None:
        self._kill()
        self._start()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, jobs: Any, results: Any, backend: str, device: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    import torch

    if backend != "gloo":
        import stretto.onegpu  # noqa: F401  (registers the backends)
    if device == "cuda":
        torch.cuda.set_device(0)

    torch.set_num_threads(1)
    while True:
        job, _, count, meeting, arguments = jobs.get()
        try:
            results.put((rank, False, _together(job, rank, count, meeting, arguments, backend, device)))
        except BaseException:
            results.put((rank, True, traceback.format_exc()))


def _together(
    job: Job, rank: int, count: int, meeting: str, arguments: tuple[Any, ...], backend: str, device: str
) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count)
    dist.barrier()  # a rank that is done at once must not leave while another is still connecting
    try:
        mesh = init_device_mesh(device, (count,), mesh_dim_names=("pp",))
        return job(mesh["pp"], *arguments)
    finally:
        gc.collect()  # pipelines of which a step failed: their groups end when both ends let go of them
        dist.destroy_process_group()
