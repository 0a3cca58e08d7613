"""The engine: generates while all ranks serve the same version, and stops for an update."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from mini_engine.gate import Gate, Unavailable
from mini_engine.model import Config
from mini_engine.ranks import Options, Other, receiver_of, shard_of, status_of
from mini_engine.shard import BeforeLoad, alone, take_all
from stretto.ir.errors import WeightsError


@dataclass(frozen=True, slots=True)
class Generated:
    tokens: list[int]
    versions: list[str]
    """That made them, in order: more than one if the generation was kept during an update."""


class Engine:
    """Rank 0 is here, rank 1 a process of its own. Generates while all ranks serve the same version."""

    def __init__(
        self,
        address: str,
        config: Config = Config(),  # noqa: B008 (frozen)
        *,
        tp: int = 1,
        seed: int = 0,
        device: str = "cpu",
        patience: float = 30.0,
        flushes: bool = True,
        before_load: BeforeLoad = take_all,
        before_token: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`patience` is how long a request waits for an update, and an update for requests. For tests: `flushes`
        False leaves old prefixes in the cache; `before_load` is called on every rank (so it must pickle if there are
        two) and says False to drop a tensor; `before_token` is called with the number of tokens made so far."""
        if tp not in (1, 2):
            raise WeightsError(f"there are engines of 1 and of 2 ranks (got {tp})")
        self.ended = threading.Event()
        """Set when a rank has died."""
        self.config, self._before_token, self._turn = config, before_token, threading.Lock()
        self.gate = Gate(self.ensure_serving, self._dirty, patience=patience)
        options = Options(address, config, tp, seed, device, before_load, flushes)
        with ExitStack() as made, TemporaryDirectory(ignore_cleanup_errors=True) as meeting:
            self._other = None if tp == 1 else Other(options, self.gate, self.ended, meeting)
            if self._other:
                made.callback(self._other.close)
            self.shard = shard_of(options, 0, self._other.add if self._other else alone)
            self.receiver = made.enter_context(receiver_of(options, 0, self.shard, self.gate.pause, self.gate.resume))
            if self._other:
                self._other.await_ready()
            self._made = made.pop_all()
        self.receiver.start()

    def generate(self, tokens: Sequence[int], count: int) -> Generated:
        if not tokens or not all(0 <= token < self.config.vocabulary for token in tokens):
            raise ValueError(f"tokens are one or more numbers from 0 to {self.config.vocabulary - 1}")
        if count < 0 or len(tokens) + count > self.config.context:
            raise ValueError(f"tokens and count together are at most {self.config.context}")
        made: list[int] = []
        versions: list[str] = []
        version = self.gate.enter()
        try:
            for n in range(count):
                self._before_token(n)
                version = self.gate.before_token(version)
                try:
                    made.append(self._following([*tokens, *made]))
                finally:
                    self.gate.after_token()
                if version not in versions:
                    versions.append(version)
        finally:
            self.gate.leave()
        return Generated(made, versions or [version])

    def _following(self, tokens: list[int]) -> int:
        with self._turn:
            if self._other is None:
                return self.shard.following(tokens)
            try:
                with self._other.asked({"tokens": tokens}):
                    return self.shard.following(tokens)
            except (OSError, EOFError, RuntimeError) as error:
                self.ended.set()
                raise Unavailable(f"rank 1 has ended ({error})") from None

    def ranks(self) -> list[dict[str, Any]]:
        """The status of every rank's receiver."""
        mine = status_of(self.receiver)
        if self._other is None:
            return [mine]
        if self.ended.is_set():
            raise Unavailable("rank 1 has ended")
        with self._turn:
            try:
                with self._other.asked({}) as answer:
                    pass
            except (OSError, EOFError) as error:
                raise Unavailable(f"rank 1 has ended ({error})") from None
        return [mine, answer]

    def ensure_serving(self) -> str:
        """The version that all ranks serve; raises while there is none."""
        version = self.receiver.ensure_serving()
        for rank, status in enumerate(self.ranks()):
            if status["state"] != "serving":
                raise Unavailable(f"rank {rank} is not serving: {status['state']}: {status['error']}")
            if status["version"] != version:
                raise Unavailable(f"rank 0 serves {version}, and rank {rank} {status['version']}; push to both")
        return version

    def _dirty(self) -> bool:
        return self.ended.is_set() or any(status["state"] == "dirty" for status in self.ranks())

    def close(self) -> None:
        self._made.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
