"""Ranks come together by the store they share, before they have a connection or a group of their own."""

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.ir.errors import PeerError, StrettoError

_SHORTEST, _LONGEST = 0.002, 0.2  # seconds between two looks
_Shown = tuple[str, list[str], int]


class Rendezvous:
    """The ranks of a group, each of which may have come before to a meeting that did not take place."""

    def __init__(
        self, group: dist.ProcessGroup, *, timeout: float, failure: Callable[[str], StrettoError] = PeerError
    ) -> None:
        """`failure` is the error, of its words, if they do not come together."""
        self.failure = failure
        self.rank, self.size, self._timeout = group.rank(), group.size(), timeout
        self._said = 0
        self.check: Callable[[], None] = lambda: None
        """Raises if there is no more reason to wait."""
        ranks = " ".join(map(str, dist.get_process_group_ranks(group)))
        place = hashlib.blake2b(ranks.encode(), digest_size=8).hexdigest()
        self._store = PrefixStore(f"stretto/{place}", _client())
        self._name = self._agreed()

    def store(self) -> Store:
        """One that only these ranks use, and only this time."""
        return PrefixStore(f"stretto/groups/{self._name}", _client())

    def _agreed(self) -> str:
        """A name for this meeting that no other has had.

        Each rank shows a token, whose tokens it has seen, and how often it has looked. When all show that they have
        seen the same of all, that is the name; and when all have confirmed it, nobody is left behind at an earlier one.
        """
        mine, deadline = secrets.token_hex(8), time.monotonic() + self._timeout
        places = [str(rank) for rank in range(self.size)]
        confirmed, seen, pause = set[str](), list[str](), _SHORTEST
        for look in count():
            for name in confirmed:
                if self._store.check([f"{name}/{place}" for place in places]):
                    return name
            self._store.set(places[self.rank], msgspec.json.encode((mine, seen, look)).decode())
            if self._store.check(places):
                shown = [msgspec.json.decode(self._store.get(place), type=_Shown) for place in places]
                if seen != (seen := [token for token, *_ in shown]):
                    continue
                if all(other == seen for _, other, _ in shown):
                    name = hashlib.blake2b(" ".join(seen).encode(), digest_size=8).hexdigest()
                    self._store.set(f"{name}/{self.rank}", "here")
                    confirmed.add(name)
            if time.monotonic() > deadline:
                who = " and rank ".join(self._away(places)) or "another"
                raise self.failure(f"rank {self.rank} has waited {self._timeout:g} s (timeout) for rank {who} to come")
            pause = _slept(pause)
        raise AssertionError("there is always another look")

    def _away(self, places: list[str]) -> list[str]:
        """Whose places show nothing, or what no longer changes."""
        others = [place for place in places if place != places[self.rank]]
        before = {place: self._store.get(place) for place in others if self._store.check([place])}
        time.sleep(3 * _LONGEST)
        return [place for place in others if place not in before or self._store.get(place) == before[place]]

    def gather(self, word: str) -> list[str]:
        """Everybody's word, in the order of ranks."""
        self._said += 1
        self._store.set(f"{self._name}/{self._said}/{self.rank}", word)
        keys = [f"{self._name}/{self._said}/{rank}" for rank in range(self.size)]
        deadline, pause = time.monotonic() + self._timeout, _SHORTEST
        while not self._store.check(keys):
            self.check()
            if time.monotonic() > deadline:
                missing = next(rank for rank, key in enumerate(keys) if not self._store.check([key]))
                raise self.failure(f"rank {missing} came, but was not heard of for {self._timeout:g} s (timeout)")
            pause = _slept(pause)
        return [self._store.get(key).decode() for key in keys]

    def demand_none(self, wrong: StrettoError | None) -> None:
        """Go on only if nothing is wrong on any rank."""
        demand_none(wrong, self.gather("" if wrong is None else str(wrong)), self.failure)


def _client() -> Store:
    """Of the world's store, and of our own: who waits in one for a key lets nobody else of the process use it."""
    store: Any = dist.distributed_c10d._get_default_store()
    client: Store = store.clone()
    return client


def demand_none(wrong: Exception | None, said: Sequence[str], failure: Callable[[str], StrettoError]) -> None:
    """Raise what is wrong here, or else what another rank has said to be wrong there."""
    if wrong is not None:
        raise wrong
    for rank, text in enumerate(said):
        if text:
            raise failure(f"rank {rank}: {text}")


def _slept(seconds: float) -> float:
    """Sleep; for how long to do so next."""
    time.sleep(seconds)
    return min(_LONGEST, 1.5 * seconds)
