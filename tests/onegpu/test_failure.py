"""A rank that dies, leaves or stands still is named by every other, and nothing is left behind."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from processes import running

TESTS = Path(__file__).parent.parent / "support"
PATHS = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
WORDS = {"dies": "rank 1 died", "leaves": "rank 1 has left", "stops": " s for rank 1 to "}


@pytest.mark.parametrize("operation", ["all_reduce", "messages"])
@pytest.mark.parametrize("how", sorted(WORDS))
def test_every_other_rank_names_it(tmp_path: Path, how: str, operation: str) -> None:
    mark = f"STRETTO_TEST={uuid.uuid4()}"
    script, rendezvous = str(TESTS / "ending.py"), str(tmp_path / "meeting")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "3", rendezvous, "1", how, operation],
            stdout=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **dict([mark.split("=")])},
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        ready = time.monotonic()
        said = [process.communicate(timeout=60)[0] for rank, process in enumerate(processes) if rank != 1]
        assert time.monotonic() - ready < 10
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert all(WORDS[how] in text for text in said), said
    deadline = time.monotonic() + 10
    while running("stretto.onegpu_broker.serve", mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running("stretto.onegpu_broker.serve", mark)
