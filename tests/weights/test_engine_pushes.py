"""Real senders, several of them, push into an engine of two ranks: what it generates, and what if a rank dies."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mini_engine import Config, Engine, Unavailable, addresses, checkpoint, reference
from pushes import Sharded, until
from weights_victims import Senders

CONFIG = Config()
PROMPT = [5, 17, 3, 64]
BUCKET = 6144  # bytes of the largest tensor, so that there are many
BOUND = 15.0  # seconds in which all others have ended: one silence of 8 s, and not a second one


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"unix://{tmp_path}/engine"


@pytest.fixture
def senders() -> Iterator[Senders]:
    made = Senders(2, bucket_bytes=BUCKET)
    yield made
    made.end()


def push(senders: Senders, version: str, weights: Mapping[str, Tensor], where: list[str]) -> dict[int, Any]:
    """Each sender holds a part of the weights, as in training; what each says in the end, within the bound."""
    for number, rank in enumerate(senders.ranks):
        rank.send("push", (version, Sharded(dict(weights), number, len(senders.ranks)), where))
    return senders.heard(time.monotonic() + BOUND)


def test_an_engine_of_two_ranks_generates_what_two_senders_push_time_and_again(address: str, senders: Senders) -> None:
    both = addresses(address, 2)
    with Engine(address, tp=2) as engine:
        assert engine.generate(PROMPT, 8).tokens == reference(CONFIG, checkpoint(CONFIG, 0), PROMPT, 8)
        for seed in (1, 2):
            weights = checkpoint(CONFIG, seed)
            for told in push(senders, f"seed-{seed}", weights, both).values():
                assert told == dict.fromkeys(both, "delivered")
            for _ in range(2):  # the second time, from what is kept of the first
                made = engine.generate(PROMPT, 8)
                assert (made.tokens, made.versions) == (reference(CONFIG, weights, PROMPT, 8), [f"seed-{seed}"])


@dataclass(frozen=True)
class DiesElsewhere:
    """Kills the process that is about to load a tensor, unless it is this one."""

    here: int

    def __call__(self, name: str) -> bool | None:
        if name == "layers.1.router.weight" and os.getpid() != self.here:
            os.kill(os.getpid(), signal.SIGKILL)
        return None


def test_an_engines_rank_that_dies_is_named_and_the_other_does_not_generate(address: str, senders: Senders) -> None:
    both, new = addresses(address, 2), checkpoint(CONFIG, 1)
    with Engine(address, tp=2, before_load=DiesElsewhere(os.getpid())) as engine:
        for told in push(senders, "new", new, both).values():
            assert f"{both[1]} " in told
            assert both[0] not in told
        until(lambda: engine.receiver.status.state == "dirty", BOUND)
        with pytest.raises(Unavailable, match=f"dirty: .*{both[1]} "):
            engine.generate(PROMPT, 8)
    with Engine(address, tp=2) as engine:  # one that is started again is served by the same senders
        for told in push(senders, "new", new, both).values():
            assert told == dict.fromkeys(both, "delivered")
        assert engine.generate(PROMPT, 8).tokens == reference(CONFIG, new, PROMPT, 8)
    assert list(Path(address.removeprefix("unix://")).parent.iterdir()) == []
