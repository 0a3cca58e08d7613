"""A rendezvous: ranks find each other through the store they share, before they have a connection or a group."""

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.execute.members import Members
from stretto.ir.errors import PeerError, StrettoError

_SHORTEST, _LONGEST = 0.002, 0.2  # seconds between two polls of the store
_Entry = tuple[str, list[str], int]
"""What a rank writes to the store: its token, all ranks' tokens that it has seen, and its count of polls."""


class Rendezvous:
    """The ranks of a team; each may have come before to a rendezvous that did not take place."""

    def __init__(self, members: Members, *, timeout: float, failure: Callable[[str], StrettoError] = PeerError) -> None:
        """Wait for all ranks; `failure` makes the error, from its text, that is raised if they do not come."""
        self.failure = failure
        self.rank, self.size, self._timeout = members.rank, len(members.ranks), timeout
        self._gathers = 0
        self.check: Callable[[], None] = lambda: None
        """Raises if there is no more reason to wait."""
        ranks = " ".join(map(str, members.ranks))
        digest = hashlib.blake2b(ranks.encode(), digest_size=8).hexdigest()
        self._store = PrefixStore(f"stretto/{digest}", _client())
        self._name = self._agree_on_name()

    def store(self) -> Store:
        """Return a store that only these ranks use, and only this time."""
        return PrefixStore(f"stretto/groups/{self._name}", _client())

    def _agree_on_name(self) -> str:
        """Return a name for this rendezvous that no other has had.

        Each rank writes a random token, the tokens it has seen, and its count of polls. Once all have seen the same
        tokens of all, the name is their hash; and once all have confirmed it, no rank is left at an earlier rendezvous.
        """
        token, deadline = secrets.token_hex(8), time.monotonic() + self._timeout
        keys = [str(rank) for rank in range(self.size)]
        confirmed, seen, pause = set[str](), list[str](), _SHORTEST
        for polls in count():
            for name in confirmed:
                if self._store.check([f"{name}/{key}" for key in keys]):
                    return name
            self._store.set(keys[self.rank], msgspec.json.encode((token, seen, polls)).decode())
            if self._store.check(keys):
                entries = [msgspec.json.decode(self._store.get(key), type=_Entry) for key in keys]
                if seen != (seen := [entry_token for entry_token, *_ in entries]):
                    continue
                if all(other == seen for _, other, _ in entries):
                    name = hashlib.blake2b(" ".join(seen).encode(), digest_size=8).hexdigest()
                    self._store.set(f"{name}/{self.rank}", "here")
                    confirmed.add(name)
            if time.monotonic() > deadline:
                missing = " and rank ".join(self._missing(keys)) or "another"
                raise self.failure(
                    f"rank {self.rank} has waited {self._timeout:g} s (timeout) for rank {missing} to come"
                )
            pause = _slept(pause)
        raise AssertionError("there is always another poll")

    def _missing(self, keys: list[str]) -> list[str]:
        """Return the ranks whose entries are missing, or no longer change."""
        others = [key for key in keys if key != keys[self.rank]]
        before = {key: self._store.get(key) for key in others if self._store.check([key])}
        time.sleep(3 * _LONGEST)
        return [key for key in others if key not in before or self._store.get(key) == before[key]]

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, in the order of ranks."""
        self._gathers += 1
        self._store.set(f"{self._name}/{self._gathers}/{self.rank}", text)
        keys = [f"{self._name}/{self._gathers}/{rank}" for rank in range(self.size)]
        deadline, pause = time.monotonic() + self._timeout, _SHORTEST
        while not self._store.check(keys):
            self.check()
            if time.monotonic() > deadline:
                missing = next(rank for rank, key in enumerate(keys) if not self._store.check([key]))
                raise self.failure(f"rank {missing} came, but was not heard of for {self._timeout:g} s (timeout)")
            pause = _slept(pause)
        return [self._store.get(key).decode() for key in keys]

    def raise_on_all(self, error: StrettoError | None) -> None:
        """Raise on all ranks if any rank has an error."""
        raise_first_error(error, self.gather("" if error is None else str(error)), self.failure)


def _client() -> Store:
    """Return a new client of the world's store: while one thread waits in a client, no other thread can use it."""
    store: Any = dist.distributed_c10d._get_default_store()
    client: Store = store.clone()
    return client


def raise_first_error(error: Exception | None, texts: Sequence[str], failure: Callable[[str], StrettoError]) -> None:
    """Raise this rank's error, or else one for the first rank whose text is not empty."""
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise failure(f"rank {rank}: {text}")


def _slept(seconds: float) -> float:
    """Sleep, and return how long to sleep next time."""
    time.sleep(seconds)
    return min(_LONGEST, 1.5 * seconds)
