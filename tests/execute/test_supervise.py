"""The supervisor by itself: what a request to end does around a failure."""

import signal
import subprocess
import sys

SCRIPT = """
import os, signal, time
from stretto.execute.supervise import Supervisor
try:
    with Supervisor(0, timeout=5).guarding():
        raise ValueError("a bad batch")
except ValueError as error:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    print(error, flush=True)
time.sleep(60)
"""


def test_a_request_to_end_leaves_time_to_tell_of_a_failure() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30)
    assert ended.stdout == "a bad batch\n"
    assert ended.returncode == -signal.SIGTERM
