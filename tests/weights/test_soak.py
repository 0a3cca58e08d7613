"""Minutes of pushes while processes are killed and stopped: nothing mixed, nothing hanging, nothing left behind.

`make slow` runs ten minutes of it; STRETTO_SOAK_SECONDS sets another time, STRETTO_SOAK_SEED other moments.
"""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

import pytest

import soak
from pushes import until
from stretto.ir.errors import WeightsError
from stretto.weights import Sender, status

SECONDS = float(os.environ.get("STRETTO_SOAK_SECONDS", "600"))
SEED = int(os.environ.get("STRETTO_SOAK_SEED", "1"))
ENGINES, SENDERS = 3, 2
LONGEST = 90.0  # seconds of a push, whatever happens; much more than its deadlines, for the machine may be busy


class Victim:
    """A process, and what it has said."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self.said: deque[list[str]] = deque(maxlen=10_000)
        self.begin()

    def begin(self) -> None:
        command = [sys.executable, soak.__file__, *self._words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.heard = time.monotonic()
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if process is self.process:
                self.heard = time.monotonic()
                self.said.append(line.split())
        process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)
        self.heard = time.monotonic()  # its silence is ours

    def all_said(self, word: str) -> list[list[str]]:
        return [words for words in list(self.said) if len(words) > 1 and words[1] == word]


@pytest.mark.slow
def test_nothing_is_mixed_hangs_or_is_left_behind(folder: Path) -> None:
    chance = random.Random(SEED)
    addresses = [f"unix://{folder}/engine-{number}" for number in range(ENGINES)]
    before = set(os.listdir("/dev/shm"))
    engines = [Victim("engine", address) for address in addresses]
    senders: list[Victim] = []
    try:
        for number in range(ENGINES):
            until((folder / f"engine-{number}").exists, LONGEST)
        senders = [Victim("sender", str(folder), *addresses) for _ in range(SENDERS)]
        done = _torment([*engines, *senders], chance)
        (folder / "stop").touch()
        for sender in senders:
            sender.process.wait(LONGEST)
        pushed = sum(len(sender.all_said("pushed")) for sender in senders)
        whys = Counter(_why(words) for sender in senders for words in sender.all_said("failed"))
        print(f"\nsoak of {SECONDS:g} s: {dict(done)}; {pushed} pushes went well, {whys.total()} did not:")
        print("\n".join(f"{count:6} {why}" for why, count in whys.most_common()))
        assert pushed > SECONDS / 20
        with Sender(device="cpu") as last:  # whatever they have been through, the next push repairs all
            last.register("7", soak.tensors(7.0))
            assert _patiently(last, addresses) == dict.fromkeys(addresses, "verified")
        for engine, address in zip(engines, addresses, strict=True):
            assert (status(address).state, status(address).version) == ("serving", "7")
            told = engine.all_said("engine")
            answered = int(told[-1][4])
            until(lambda engine=engine, answered=answered: int(engine.all_said("engine")[-1][4]) > answered, LONGEST)
            assert engine.all_said("mixed") == []
            assert int(engine.all_said("engine")[-1][5]) < 40  # files
            assert int(engine.all_said("engine")[-1][6]) < 40  # threads
        for sender in senders:
            files = [int(words[2]) for words in sender.all_said("files")]
            assert not files or max(files[-3:]) < 40
    finally:
        for victim in (*engines, *senders):
            victim.kill()
    assert set(os.listdir("/dev/shm")) <= before


def _why(words: list[str]) -> str:
    """Why a push failed, without what differs from time to time."""
    return re.sub(r"unix://\S+|\d+", "…", " ".join(words[3:]))


def _torment(victims: list[Victim], chance: random.Random) -> "Counter[str]":
    """Kill and stop them at random. Each that lives must go on saying something."""
    done: Counter[str] = Counter()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(chance.choice([0.02, 0.1, 0.3, 1.0, 3.0]) * chance.random())
        victim = chance.choice(victims)
        match chance.choice(["kill", "stop", "stop", "leave"]):
            case "kill":
                victim.kill()
                time.sleep(chance.random())
                victim.begin()
                done["killed"] += 1
            case "stop":
                victim.stop(chance.choice([0.1, 1.0, 5.0, 9.0]) * chance.random())
                done["stopped"] += 1
            case _:
                done["left alone"] += 1
        for one in victims:
            assert one.process.poll() is None, f"{one._words} ended by itself: {list(one.said)[-3:]}"
            silent = time.monotonic() - one.heard
            assert silent < LONGEST, f"{one._words} has said nothing for {silent:.0f} s: {list(one.said)[-3:]}"
    return done


def _patiently(sender: Sender, addresses: list[str]) -> dict[str, str]:
    deadline = time.monotonic() + LONGEST
    while True:
        try:
            return dict(sender.push("7", addresses).receivers)
        except WeightsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
