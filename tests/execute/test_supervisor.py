"""The supervisor by itself: what it says of others, and what a request to end does around a failure."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from stretto.execute.ring_messages import RingMessage
from stretto.execute.supervisor import Supervisor
from stretto.ir.errors import PeerError
from stretto.wire import timing
from stretto.wire.frames import pack_message

SCRIPT = """
import os, signal, time
from stretto.execute.supervisor import Supervisor
supervisor = Supervisor(0, timeout=5)
supervisor.watch({})
try:
    with supervisor.guarding("step 1"):
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


HANGING = """
import ctypes, os, signal, sys, threading, time
from stretto.execute.supervisor import Supervisor
supervisor = Supervisor(0, timeout=600)
supervisor.watch({})
with supervisor.guarding("step 1"):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if sys.argv[1] == "python":
        time.sleep(60)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time for ever: a handler written in Python never has its turn
        libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("where", ["python", "C"])
def test_a_request_to_end_is_followed_though_the_step_hangs(where: str) -> None:
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", HANGING, where], capture_output=True, text=True, timeout=40)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert time.monotonic() - begun > 5  # until then it might have come back


FORKING = """
import os, socket, sys, time
from stretto.execute.supervisor import Supervisor
with socket.create_server(("127.0.0.1", 0)) as server:
    ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
made = [Supervisor(rank, timeout=5) for rank in range(2)]
for rank, supervisor in enumerate(made):
    supervisor.watch({1 - rank: ends[rank]})
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
time.sleep(0.5)
for supervisor in made:
    with supervisor.guarding("step 1"):
        supervisor.check()
print("fine")
"""


def test_a_child_that_ends_does_not_say_farewell_for_its_parent() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (ended.stdout, ended.returncode) == ("fine\n", 0), ended.stderr


class Speechless(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def test_an_error_that_cannot_even_be_asked_is_told(two: list[Supervisor]) -> None:
    first, second = two
    with pytest.raises(Speechless), first.guarding("step 1"):
        raise Speechless
    assert re.search(r"rank 0 failed .*Speechless: \(an error that cannot say what it is", told(second))


def test_a_rank_that_is_closed_in_the_middle_of_a_step_is_named(two: list[Supervisor]) -> None:
    first, second = two
    with first.guarding("step 1"):
        first.task = lambda: "0F0"
        first.close()
    with pytest.raises(PeerError, match=r"^rank 0 was closed at 0F0 of step 1"), second.guarding("step 1"):
        second.wait(Never(), lambda: "the value of 0F0")


def told(supervisor: Supervisor) -> str:
    """Return why a supervisor cannot go on, once it knows; a loaded machine may take its time."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            supervisor.check()
        except PeerError as error:
            return str(error)
        time.sleep(0.05)
    raise AssertionError("nothing was told")


class Never:
    """Something that does not come."""

    done, error = False, None

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False


@pytest.fixture
def two(request: pytest.FixtureRequest) -> Iterator[list[Supervisor]]:
    """Two supervisors that watch each other, with the timeout of the test's parameter."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
    made = [Supervisor(rank, timeout=getattr(request, "param", 0.6)) for rank in range(2)]
    for rank, supervisor in enumerate(made):
        supervisor.watch({1 - rank: ends[rank]})
        supervisor.ready()
    yield made
    for supervisor in made:
        supervisor.close()


@pytest.mark.parametrize("two", [3.0], indirect=True)
def test_a_rank_that_is_always_seen_at_the_same_task_of_another_step_is_not_blamed(two: list[Supervisor]) -> None:
    first, second = two
    for step in range(1, 9):
        with first.guarding(f"step {step}"):
            first.task = lambda: "0F0"
            time.sleep(0.5)
    second.check()
    with first.guarding("step 9"):
        first.task = lambda: "0F0"
        assert "rank 0 has been at 0F0 of step 9 for " in told(second)


def test_a_rank_that_left_is_named_by_those_who_go_on_without_it(two: list[Supervisor]) -> None:
    first, second = two
    with first.guarding("step 1"), second.guarding("step 1"):
        pass
    first.close()
    with second.guarding():  # more of the same step, in which nobody is missing
        time.sleep(0.3)
    second.check()
    with (
        pytest.raises(PeerError, match=r"rank 0 left after step 1, before step 2: it was closed, or its program"),
        second.guarding("step 2"),
    ):
        second.wait(Never(), lambda: "nothing")


def test_who_has_not_begun_is_named(two: list[Supervisor]) -> None:
    with (
        pytest.raises(PeerError, match=r"rank 0 has not begun step 1; it was last seen before its first step; rank 1 "),
        two[1].guarding("step 1"),
    ):
        two[1].wait(Never(), lambda: "the value of 0F0")


def test_ranks_that_do_different_things_are_told(two: list[Supervisor]) -> None:
    first, second = two
    with (
        pytest.raises(
            PeerError,
            match=r"^rank . runs (evaluation|step) 1 while rank . runs (step|evaluation) 1; all ranks must",
        ),
        first.guarding("evaluation 1"),
        second.guarding("step 1"),
    ):
        second.wait(Never(), lambda: "the value of 0F0")


def test_the_step_in_which_a_rank_died_is_known_however_short_steps_are(two: list[Supervisor]) -> None:
    first, second = two
    for step in range(1, 30):
        with first.guarding(f"step {step}"):
            pass
    first._closing = True  # as if it had died
    assert re.search(r"rank 0 died; it was last seen (at the start of|after) step 29", told(second))


def test_a_rank_that_was_given_up_on_is_told_so(two: list[Supervisor]) -> None:
    first, second = two
    second.fail("rank 0 has not been heard of for 6 s; it was last seen at 0F0 of step 1", 0)
    assert told(first).startswith("the other ranks gave up on this one: rank 0 has not been heard of")
    assert told(second).startswith("rank 0 has not been heard of")


def test_a_process_that_says_nothing_is_blamed_only_if_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lets none of its threads run, as a long garbage collection does, is judged by the timeout."""
    monkeypatch.setattr(timing, "SILENCE", 0.5)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        with socket.create_server(("127.0.0.1", 0)) as server:
            end, other = socket.create_connection(server.getsockname()), server.accept()[0]
        watching = Supervisor(1, timeout=60)
        watching.watch({0: end}, on_one_machine=True)
        beat = RingMessage(0, process.pid, "at 0F0 of step 1", 1, "step 1", True)
        other.sendall(pack_message(beat))
        time.sleep(1.5)
        watching.check()
        process.send_signal(signal.SIGSTOP)
        assert re.search(r"rank 0 has not been heard of for \d+ s; it was last seen at 0F0 of step 1", told(watching))
        process.kill()
        watching.close()
        other.close()


def test_nobody_is_blamed_while_any_rank_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three in a row, the last hears only of one that waits itself, and that somebody is busy.

    A thread may have to wait a second or two for its turn on a loaded machine, which must not count as silence.
    """
    monkeypatch.setattr(timing, "SILENCE", 0.5)
    made = [Supervisor(rank, timeout=5.0) for rank in range(3)]
    peers: list[dict[int, socket.socket]] = [{}, {}, {}]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for rank in range(2):
            peers[rank][rank + 1], peers[rank + 1][rank] = (
                socket.create_connection(server.getsockname()),
                server.accept()[0],
            )
    for supervisor, some in zip(made, peers, strict=True):
        supervisor.watch(some, on_one_machine=True)
    stop = threading.Event()

    def work() -> None:
        with made[0].guarding("step 1"):
            for task in range(16):
                made[0].task = lambda task=task: f"0F{task}"  # type: ignore[misc]
                stop.wait(0.5)

    def wait() -> None:
        with contextlib.suppress(PeerError), made[1].guarding("step 1"):
            made[1].wait(Never(), lambda: "the value of 0F7")

    threads = [threading.Thread(target=it) for it in (work, wait)]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    with pytest.raises(PeerError, match=r"waited for the value of"), made[2].guarding("step 1"):
        made[2].wait(Never(), lambda: "the value of 1F7")
    assert time.monotonic() - begun > 12  # eight seconds of work, and then the timeout
    stop.set()
    for thread in threads:
        thread.join()
    for supervisor in made:
        supervisor.close()
