"""Whatever dies, stops, is slow or wrong is named, nobody hangs, nothing is mixed, and the next push repairs."""

import os
import re
import signal
import struct
import threading
import time
from pathlib import Path

import pytest
import torch

from mini_engine import Config, Engine, Unavailable, checkpoint, reference
from pushes import tensors_of, until
from stretto.ir.errors import StrettoError
from stretto.weights.send.sender import Sender
from weights_victims import BUCKET, SECONDS, SPEC, Senders, Team, Worker

BOUND = 15.0  # seconds in which all others have ended: one silence of 8 s, and not a second one
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


# A receiver.


@pytest.mark.parametrize(("how", "senders"), [(signal.SIGKILL, 1), (signal.SIGKILL, 3), (signal.SIGSTOP, 3)])
def test_a_receiver_that_dies_or_stops_is_named_and_its_senders_stay_usable(
    tmp_path: Path, how: signal.Signals, senders: int
) -> None:
    with Team(tmp_path, senders=senders, troubles=("in place", "")) as team:
        victim, other = team.receivers
        victim.arm("load", 4, how)
        team.senders.begin("v2", team.addresses)
        fell = team.fall_of(victim)
        for told in team.senders.heard(fell + BOUND).values():
            assert team.addresses[0] in told
            assert team.addresses[1] not in told
        left = other.settled(fell + BOUND)
        assert left.state == "dirty"
        assert team.addresses[0] in left.error
        team.repaired("v3", team.senders, but=[0])


def test_a_receiver_that_beats_but_does_not_get_on_is_slow(tmp_path: Path) -> None:
    with Team(tmp_path, senders=2, troubles=("slow", ""), timeout=5.0) as team:
        began = time.monotonic()
        team.senders.begin("v2", team.addresses)
        for told in team.senders.heard(began + BOUND).values():
            assert f"{team.addresses[0]} is slow" in told
        assert team.receivers[1].settled(began + BOUND).state == "dirty"
        assert team.receivers[0].ask("release") == "released"
        assert team.receivers[0].settled(time.monotonic() + SECONDS).state == "dirty"
        team.repaired("v3", team.senders)


@pytest.mark.parametrize("senders", [1, 2])
def test_a_loader_without_memory_is_named(tmp_path: Path, senders: int) -> None:
    with Team(tmp_path, senders=senders, troubles=("memory", "in place")) as team:
        for told in team.senders.push("v2", team.addresses).values():
            assert f"{team.addresses[0]}: the loader failed at bucket " in told
            assert "(t5): OutOfMemoryError: out of memory" in told
        for receiver in team.receivers:
            left = receiver.settled(time.monotonic() + SECONDS)
            assert left.state == "dirty"
            assert "OutOfMemoryError" in left.error
        team.repaired("v3", team.senders)


def test_the_next_push_may_come_at_once_while_another_receiver_is_still_at_the_last(tmp_path: Path) -> None:
    with Team(tmp_path, troubles=("memory", "a little slow")) as team:
        (told,) = team.senders.push("v2", team.addresses).values()
        assert "OutOfMemoryError" in told
        team.repaired("v3", team.senders)


# A sender.


@pytest.mark.parametrize("how", SIGNALS)
def test_a_sender_of_several_that_dies_or_stops_is_named_by_the_others(tmp_path: Path, how: signal.Signals) -> None:
    with Team(tmp_path, senders=3, troubles=("in place", "", "")) as team:
        victim = team.senders.ranks[1]
        victim.arm("broadcast", 5, how)
        team.senders.begin("v2", team.addresses)
        fell = team.fall_of(victim)
        for told in team.senders.heard(fell + BOUND, but=[1]).values():
            assert "rank 1 " in told
            assert "start the senders again" in told
        for number, receiver in enumerate(team.receivers):
            left = receiver.settled(fell + BOUND)
            assert left.state == "dirty"
            assert ("the sender " if number == 1 else "rank 1 ") in left.error
        team.senders.begin("v2", team.addresses, but=[1])
        for told in team.senders.heard(but=[1]).values():
            assert "start the senders again" in told
        team.senders.close(but=[1])
        team.repaired("v3", team.fresh(3))


@pytest.mark.parametrize("how", SIGNALS)
def test_receivers_of_a_single_sender_that_dies_or_stops_know_that_it_was_the_sender(
    tmp_path: Path, how: signal.Signals
) -> None:
    with Team(tmp_path, troubles=("in place", "")) as team:
        (victim,) = team.senders.ranks
        victim.arm("reload", 5, how)
        team.senders.begin("v2", team.addresses)
        fell = team.fall_of(victim)
        why = "(has closed the connection|is gone)" if how is signal.SIGKILL else "has been silent"
        for receiver in team.receivers:
            left = receiver.settled(fell + BOUND)
            assert left.state == "dirty"
            assert re.search(f"the sender {why}", left.error)
        team.repaired("v3", team.fresh(1))


@pytest.mark.parametrize("senders", [1, 2])
def test_a_bit_that_flips_in_a_buffer_is_found(tmp_path: Path, senders: int) -> None:
    with Team(tmp_path, senders=0) as team:
        wrong = team.fresh(senders, troubles=["flipped bit"])
        for told in wrong.push("v2", team.addresses).values():
            assert re.search(r"bucket 4 \(t\d\) arrived changed", told)
            assert any(f"{address}: " in told for address in team.addresses)
        for receiver in team.receivers:
            assert receiver.settled(time.monotonic() + SECONDS).state == "dirty"
        team.repaired("v3", wrong)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("little memory", "do not fit 1,000 free bytes"),
        ("no room", "12,288 bytes of buffers are needed, and 1,000 are free"),
        ("no memory", "rank 1: OutOfMemoryError: out of memory"),
    ],
)
def test_without_memory_for_buffers_nobody_is_touched(tmp_path: Path, trouble: str, said: str) -> None:
    with Team(tmp_path, senders=0) as team:
        poor = team.fresh(2, troubles=["", trouble], bucket_bytes=None if trouble == "little memory" else BUCKET)
        for told in poor.push("v2", team.addresses).values():
            assert said in told
        assert [receiver.settled(0).version for receiver in team.receivers] == ["v1", "v1"]
        team.repaired("v3", poor)


# Files.


def safetensors(path: Path) -> str:
    """A file with the tensors of v1, written by hand."""
    entries, data = [], b""
    names = {"uint8": "U8", "bfloat16": "BF16", "float32": "F32"}
    for (name, tensor), (dtype, shape) in zip(tensors_of(SPEC, 1).items(), SPEC, strict=True):
        raw = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        where = f'"dtype":"{names[dtype]}","shape":{list(shape)},"data_offsets":[{len(data)},{len(data) + len(raw)}]'
        entries.append(f'"{name}":{{{where}}}')
        data += raw
    header = f"{{{','.join(entries)}}}".encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return str(path)


@pytest.mark.parametrize("senders", [1, 2])
def test_a_file_that_is_cut_short_or_corrupt_is_named_and_nobody_is_touched(tmp_path: Path, senders: int) -> None:
    good = Path(safetensors(tmp_path / "v1.safetensors")).read_bytes()
    wrong = tmp_path / "wrong.safetensors"
    with Team(tmp_path, senders=senders) as team:
        for data in (good[:-1], good[: len(good) // 2], good[:20], good[:3], good + b"x", good[8:], b"\xff" * 64, b""):
            wrong.write_bytes(data)
            for told in team.senders.push("v2", team.addresses, str(wrong)).values():
                assert isinstance(told, str)
                assert str(wrong) in told
        assert [receiver.settled(0).version for receiver in team.receivers] == ["v1", "v1"]
        for told in team.senders.push("v1", team.addresses, str(tmp_path / "v1.safetensors")).values():
            assert told == dict.fromkeys(team.addresses, "delivered")
        team.repaired("v3", team.senders)


# An engine.


CONFIG = Config()
PROMPT = [5, 17, 3, 64]
NEW = checkpoint(CONFIG, 1)


class Once:
    """Sends a signal to a process when a tensor is about to be loaded, the first time."""

    def __init__(self) -> None:
        self.victim: Worker | None = None

    def __call__(self, name: str) -> bool | None:
        if name == "layers.1.router.weight" and self.victim is not None:
            os.kill(self.victim.pid, signal.SIGKILL)
            self.victim = None
        return None


def test_an_engine_whose_sender_dies_refuses_to_generate_until_the_next_push(folder: Path) -> None:
    address, kills = f"unix://{folder}/engine", Once()
    made = [Senders(1, bucket_bytes=None)]
    try:
        with Engine(address, before_load=kills) as engine:
            assert engine.generate(PROMPT, 8).tokens == reference(CONFIG, checkpoint(CONFIG, 0), PROMPT, 8)
            kills.victim = made[0].ranks[0]
            made[0].begin("new", [address], NEW)
            Team.fall_of(made[0].ranks[0])
            until(lambda: engine.receiver.status.state == "dirty", BOUND)
            with pytest.raises(Unavailable, match=r"dirty: the sender (has closed the connection|is gone)"):
                engine.generate(PROMPT, 8)
            made.append(Senders(1, bucket_bytes=None))
            assert made[1].push("new", [address], NEW) == {0: {address: "delivered"}}
            assert engine.generate(PROMPT, 8).tokens == reference(CONFIG, NEW, PROMPT, 8)
    finally:
        for senders in made:
            senders.end()


def test_an_engine_next_to_a_receiver_that_dies_is_repaired_by_the_same_sender(folder: Path) -> None:
    address = f"unix://{folder}/engine"
    with Engine(address) as engine, Sender(device="cpu") as sender:
        victim = Worker(_engine, f"unix://{folder}/victim")
        try:
            assert victim.recv() == "ready"
            sender.register("new", NEW)
            with pytest.raises(StrettoError, match=f"unix://{folder}/victim (is gone|has closed)"):
                sender.push("new", [address, f"unix://{folder}/victim"])
        finally:
            victim.end()
        with pytest.raises(Unavailable, match=f"dirty: .*unix://{folder}/victim"):
            engine.generate(PROMPT, 8)
        sender.push("new", [address])
        made = engine.generate(PROMPT, 8)
        assert (made.tokens, made.versions) == (reference(CONFIG, NEW, PROMPT, 8), ["new"])


def _engine(pipe: object, address: str) -> None:
    """An engine that dies while it loads."""
    kills = Once()
    kills.victim = type("Self", (), {"pid": os.getpid()})()
    with Engine(address, before_load=kills):
        pipe.send("ready")  # type: ignore[attr-defined]
        threading.Event().wait()


@pytest.mark.parametrize("flushes", [True, False])
def test_what_an_engine_has_kept_of_old_weights_goes_when_it_flushes(folder: Path, flushes: bool) -> None:
    address = f"unix://{folder}/engine"
    with Engine(address, flushes=flushes) as engine, Sender(device="cpu") as sender:
        old = engine.generate(PROMPT, 8).tokens
        sender.register("new", NEW)
        sender.push("new", [address])
        made = engine.generate(PROMPT, 8)
        assert made.versions == ["new"]
        assert made.tokens == (reference(CONFIG, NEW, PROMPT, 8) if flushes else old)
