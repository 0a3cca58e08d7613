"""The engine that tests of the weight push rely on: it generates what its checkpoint says, and its traps are real."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from operator import ne
from pathlib import Path
from select import select
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch
from torch import Tensor

from mini_engine import Aborted, Config, Engine, Server, Shard, Unavailable, addresses, checkpoint, entries, reference
from pushes import begun, total_of
from stretto.ir.errors import WeightsError
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.layout import lay_out, least_bucket
from stretto.weights.manifest import Manifest
from stretto.weights.messages import InFlight
from stretto.weights.send.endpoint import Offer, Remote

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = Config()
PROMPT = [5, 17, 3, 64]
OLD, NEW = checkpoint(CONFIG, 0), checkpoint(CONFIG, 1)
SECONDS = 60.0
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def loaded(shard: Shard, weights: Mapping[str, Tensor]) -> Shard:
    shard.begin()
    assert shard.load(list(weights.items())) == list(weights)
    shard.finish()
    return shard


def generated(shard: Shard, tokens: list[int], count: int) -> list[int]:
    made = list(tokens)
    for _ in range(count):
        made.append(shard.following(made))
    return made[len(tokens) :]


class Meeting:
    """Adds up the tensors of threads."""

    def __init__(self, count: int) -> None:
        self._barrier, self._parts = threading.Barrier(count, timeout=SECONDS), [torch.empty(0)] * count

    def add(self, rank: int) -> Callable[[Tensor], Tensor]:
        def summed(tensor: Tensor) -> Tensor:
            self._parts[rank] = tensor
            self._barrier.wait()
            total = torch.stack(self._parts).sum(0)
            self._barrier.wait()
            return total

        return summed


def push(
    where: list[str], weights: Mapping[str, Tensor], version: str = "new", *, in_flight: InFlight = "wait"
) -> list[bool]:
    """What a sender does, for one bucket after the other."""
    entry = {entry.name: entry for entry in entries(CONFIG)}
    manifest = Manifest(version, tuple(entry[name] for name in weights))
    size = least_bucket(manifest)
    buckets = lay_out(manifest, size)
    shared = SharedBuffers(size, torch.device("cpu"))
    remotes = [Remote(address) for address in where]
    try:
        for remote in remotes:
            remote.open(Offer(manifest, buckets, size, False, shared, ""), seconds=SECONDS)
        for remote in remotes:
            begun(remote, in_flight, seconds=SECONDS)
        for number, bucket in enumerate(buckets):
            buffer = shared.tensors[number % 2]
            for piece in bucket.pieces:
                tensor = weights[manifest.entries[piece.entry].name]
                buffer[piece.offset : piece.offset + piece.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
            for remote in remotes:
                remote.load(number, number % 2, total_of(bucket, buffer), seconds=SECONDS)
        for remote in remotes:
            remote.end(seconds=SECONDS)
        return [remote.commit(seconds=SECONDS) for remote in remotes]
    finally:
        for remote in remotes:
            remote.close()
        shared.close()


def asked(url: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    try:
        with urlopen(url, None if body is None else json.dumps(body).encode(), timeout=SECONDS) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"unix://{tmp_path}/engine"


# The shard, without a receiver.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3))
def test_one_rank_generates_what_the_checkpoint_says(seed: int, device: str) -> None:
    weights = checkpoint(CONFIG, seed)
    shard = loaded(Shard(CONFIG, device=device), weights)
    assert generated(shard, PROMPT, 20) == reference(CONFIG, weights, PROMPT, 20)


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_together_generate_the_same(device: str) -> None:
    meeting = Meeting(2)
    shards = [loaded(Shard(CONFIG, rank=rank, ranks=2, device=device, add=meeting.add(rank)), NEW) for rank in range(2)]
    shards[1].flush()
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            made = list(threads.map(lambda shard: generated(shard, PROMPT, 12), shards))
            assert made == [reference(CONFIG, NEW, PROMPT, 12)] * 2
            shards[1].flush()  # what only one rank has kept is used by neither


def test_different_checkpoints_generate_different_tokens() -> None:
    assert reference(CONFIG, OLD, PROMPT, 8) != reference(CONFIG, NEW, PROMPT, 8)


def test_tensors_may_come_in_any_order_and_addresses_stay() -> None:
    shard = loaded(Shard(CONFIG), OLD)
    before = [tensor.data_ptr() for tensor in shard.parameters()]
    loaded(shard, dict(reversed(NEW.items())))
    assert [tensor.data_ptr() for tensor in shard.parameters()] == before
    assert generated(shard, PROMPT, 8) == reference(CONFIG, NEW, PROMPT, 8)


def test_the_cache_is_stale_until_it_is_flushed() -> None:
    shard = loaded(Shard(CONFIG), OLD)
    generated(shard, PROMPT, 8)
    loaded(shard, NEW)
    assert generated(shard, PROMPT, 8) == reference(CONFIG, OLD, PROMPT, 8)
    shard.flush()
    assert generated(shard, PROMPT, 8) == reference(CONFIG, NEW, PROMPT, 8)


@pytest.mark.parametrize("copies", [True, False])
def test_a_buffer_that_is_used_again_spoils_what_was_kept_unless_it_was_copied(copies: bool) -> None:
    shard = Shard(CONFIG)
    buffer = torch.empty(max(tensor.numel() for tensor in NEW.values()), dtype=torch.bfloat16)
    for name, tensor in NEW.items():
        view = buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        assert shard.load([(name, view.clone() if copies else view)]) == [name]
    shard.finish()
    assert (generated(shard, PROMPT, 8) == reference(CONFIG, NEW, PROMPT, 8)) is copies


def test_only_the_processed_forms_are_computed_with() -> None:
    shard = loaded(Shard(CONFIG), OLD)
    shard.begin()
    shard.load(list(NEW.items()))
    for name in ("lm_head", "loaded_gate_up", "loaded_down"):
        for owner in (shard, *shard.layers):
            if hasattr(owner, name):
                getattr(owner, name).zero_()
    fresh = loaded(Shard(CONFIG), NEW)
    for layer, other in zip(shard.layers, fresh.layers, strict=True):
        for name in ("gate_up", "gate_up_scale", "down", "down_scale"):
            getattr(layer, name).copy_(getattr(other, name))
    shard.lm_head_DV.copy_(fresh.lm_head_DV)
    assert generated(shard, PROMPT, 8) == reference(CONFIG, NEW, PROMPT, 8)


def test_begin_forgets_an_update_that_was_not_ended() -> None:
    shard = loaded(Shard(CONFIG), OLD)
    shard.begin()
    shard.load(list(NEW.items())[:9])
    with pytest.raises(WeightsError, match="was not loaded"):
        shard.finish()
    loaded(shard, OLD)
    assert generated(shard, PROMPT, 8) == reference(CONFIG, OLD, PROMPT, 8)


def test_what_does_not_belong_is_not_accounted_for_or_refused() -> None:
    shard = Shard(CONFIG)
    assert shard.load([("layers.0.bias.weight", torch.zeros(3))]) == []
    with pytest.raises(WeightsError, match=r"norm.weight has shape \(1,\)"):
        shard.load([("norm.weight", torch.zeros(1))])
    with pytest.raises(WeightsError, match="3 ranks"):
        Shard(CONFIG, ranks=3)


# The engine, with a receiver.


def test_a_push_changes_what_is_generated(address: str) -> None:
    with Engine(address) as engine, Server(engine) as server:
        ask = {"tokens": PROMPT, "count": 8}
        first = {"tokens": reference(CONFIG, OLD, PROMPT, 8), "version": "seed-0", "versions": ["seed-0"]}
        assert asked(f"{server.url}/generate", ask) == (200, first)
        assert push([address], NEW) == ["delivered"]
        second = {"tokens": reference(CONFIG, NEW, PROMPT, 8), "version": "new", "versions": ["new"]}
        assert asked(f"{server.url}/generate", ask) == (200, second)
        code, status = asked(f"{server.url}/status")
        assert (code, status["state"], status["version"], status["assurance"]) == (200, "serving", "new", "delivered")


def test_an_engine_that_does_not_flush_is_stale(address: str) -> None:
    with Engine(address, flushes=False) as engine:
        engine.generate(PROMPT, 8)
        push([address], NEW)
        stale = engine.generate(PROMPT, 8)
        assert (stale.tokens, stale.versions) == (reference(CONFIG, OLD, PROMPT, 8), ["new"])


def raises_once() -> Callable[[str], bool | None]:
    left = ["layers.1.router.weight"]

    def before_load(name: str) -> bool | None:
        if name in left:
            left.remove(name)
            raise RuntimeError("no room")
        return None

    return before_load


def drops_once() -> Callable[[str], bool | None]:
    left = ["layers.1.self_attn.k_proj.weight"]

    def before_load(name: str) -> bool | None:
        if name in left:
            left.remove(name)
            return False
        return None

    return before_load


@pytest.mark.parametrize(
    ("before_load", "why"),
    [(raises_once, "RuntimeError: no room"), (drops_once, r"account for layers.1.self_attn.k_proj.weight")],
)
def test_a_failed_update_refuses_to_serve_until_the_next(
    address: str, before_load: Callable[[], Callable[[str], bool | None]], why: str
) -> None:
    with Engine(address, before_load=before_load()) as engine, Server(engine) as server:
        with pytest.raises(WeightsError, match=why):
            push([address], NEW)
        with pytest.raises(Unavailable, match=why):
            engine.generate(PROMPT, 8)
        code, answer = asked(f"{server.url}/generate", {"tokens": PROMPT})
        assert (code, answer["state"]) == (503, "dirty")
        push([address], NEW)
        assert engine.generate(PROMPT, 8).tokens == reference(CONFIG, NEW, PROMPT, 8)


def test_a_request_during_an_update_waits_within_limits(address: str) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def before_load(_: str) -> bool | None:
        loading.set()
        assert go_on.wait(SECONDS)
        return None

    with Engine(address, before_load=before_load, patience=0.2) as engine, Server(engine) as server:
        with ThreadPoolExecutor(1) as threads:
            pushed = threads.submit(push, [address], NEW)
            try:
                assert loading.wait(SECONDS)
                code, answer = asked(f"{server.url}/generate", {"tokens": PROMPT})
            finally:
                go_on.set()
            assert (code, answer["state"], answer["error"]) == (503, "loading", "not serving: loading")
            assert pushed.result(SECONDS) == ["delivered"]
        assert engine.generate(PROMPT, 8).tokens == reference(CONFIG, NEW, PROMPT, 8)


class Midway:
    """Begins a push when a generation has made three tokens, which goes on once the engine was told to pause."""

    def __init__(self, address: str, in_flight: InFlight) -> None:
        self._address, self._in_flight = address, in_flight
        self._threads = ThreadPoolExecutor(1)
        self.pushed: Future[list[bool]] | None = None
        self.engine = Engine(address, before_token=self._before_token)

    def _before_token(self, count: int) -> None:
        if count == 3 and self.pushed is None:
            self.pushed = self._threads.submit(push, [self._address], NEW, in_flight=self._in_flight)
            gate = self.engine.gate
            with gate.changed:
                assert gate.changed.wait_for(lambda: gate.paused, SECONDS)

    def __enter__(self) -> "Midway":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self._threads.shutdown()


def test_what_is_under_way_can_be_waited_for(address: str) -> None:
    with Midway(address, "wait") as midway:
        made = midway.engine.generate(PROMPT, 10)
        assert (made.tokens, made.versions) == (reference(CONFIG, OLD, PROMPT, 10), ["seed-0"])
        assert midway.pushed
        assert midway.pushed.result(SECONDS) == ["delivered"]
        assert midway.engine.generate(PROMPT, 10).tokens == reference(CONFIG, NEW, PROMPT, 10)


def test_what_is_under_way_can_be_aborted(address: str) -> None:
    with Midway(address, "abort") as midway:
        with pytest.raises(Aborted):
            midway.engine.generate(PROMPT, 10)
        assert midway.pushed
        assert midway.pushed.result(SECONDS) == ["delivered"]
        assert midway.engine.generate(PROMPT, 10).tokens == reference(CONFIG, NEW, PROMPT, 10)


def test_what_is_under_way_can_be_kept_and_goes_on_with_the_new_weights(address: str) -> None:
    with Midway(address, "keep") as midway:
        made = midway.engine.generate(PROMPT, 10)
        before = reference(CONFIG, OLD, PROMPT, 3)
        assert made.tokens == before + reference(CONFIG, NEW, PROMPT + before, 7)
        assert made.versions == ["seed-0", "new"]
        assert midway.pushed
        assert midway.pushed.result(SECONDS) == ["delivered"]


def test_nonsense_is_refused(address: str) -> None:
    with Engine(address) as engine, Server(engine) as server:
        for body in ({}, {"tokens": []}, {"tokens": [96]}, {"tokens": ["a"]}, {"tokens": [1], "count": 256}):
            assert asked(f"{server.url}/generate", body)[0] == 400
        assert asked(f"{server.url}/other")[0] == 404


# Two ranks, in processes of their own.


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "mini_engine"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    late = threading.Timer(2 * SECONDS, process.kill)
    late.start()
    try:
        assert process.stdout
        assert process.stderr
        line = process.stdout.readline()
        assert line.startswith("serving http://127.0.0.1:"), process.stderr.read()
        yield process, line.removeprefix("serving ").strip()
    finally:
        late.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def rank_1_of(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text())


def test_two_processes_take_a_push_together(address: str) -> None:
    ask = {"tokens": PROMPT, "count": 6}
    both = addresses(address, 2)
    with running("--address", address, "--tp", "2") as (_, url):
        assert asked(f"{url}/generate", ask)[1]["tokens"] == reference(CONFIG, OLD, PROMPT, 6)
        assert push(both, NEW, in_flight="keep") == ["delivered"] * 2
        code, answer = asked(f"{url}/generate", ask)
        assert (code, answer["version"]) == (200, "new")
        assert answer["tokens"] == reference(CONFIG, NEW, PROMPT, 6)
        broken = dict(NEW)
        del broken["norm.weight"]
        with pytest.raises(WeightsError, match=r"norm.weight is not in what is pushed"):
            push(both[::-1], broken)
        status = asked(f"{url}/status")[1]
        assert [rank["version"] for rank in status["ranks"]] == ["new", "new"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_takes_the_other_with_it(address: str, victim: int) -> None:
    with running("--address", address, "--tp", "2") as (process, _):
        ranks = process.pid, rank_1_of(process)
        other = os.pidfd_open(ranks[1 - victim])
        try:
            os.kill(ranks[victim], signal.SIGKILL)
            assert select([other], [], [], SECONDS)[0] == [other]
        finally:
            os.close(other)
        if victim == 1:
            assert process.wait(SECONDS) == 1
            assert process.stderr
            assert "rank 1 has ended" in process.stderr.read()


def test_a_request_to_all_processes_to_end_ends_in_peace(address: str) -> None:
    with running("--address", address, "--tp", "2") as (process, _):
        os.killpg(process.pid, signal.SIGTERM)
        out, error = process.communicate(timeout=SECONDS)
        assert (process.returncode, out, error) == (0, "", "")
    assert list(Path(address.removeprefix("unix://")).parent.iterdir()) == []


def test_ranks_with_different_versions_do_not_generate(address: str) -> None:
    first, second = addresses(address, 2)
    with Engine(address, tp=2, patience=0.2) as engine:
        push([second], NEW)
        with pytest.raises(Unavailable, match="rank 0 serves seed-0, and rank 1 new"):
            engine.generate(PROMPT, 4)
        push([first], NEW)
        assert engine.generate(PROMPT, 4).tokens == reference(CONFIG, NEW, PROMPT, 4)


def test_a_rank_that_failed_keeps_the_other_from_generating(address: str) -> None:
    drops = partial(ne, "norm.weight")
    with Engine(address, tp=2, before_load=drops) as engine:
        with pytest.raises(WeightsError, match=r"account for norm.weight"):
            push(addresses(address, 2)[1:], NEW)
        with pytest.raises(Unavailable, match=r"rank 1 is not serving: dirty: .*norm.weight"):
            engine.generate(PROMPT, 4)


def test_an_address_that_is_taken_is_named(address: str) -> None:
    with Engine(address), pytest.raises(WeightsError, match="another process listens"):
        Engine(address)
