"""The results of `stretto doctor`."""

from typing import Literal

import msgspec

Setting = Literal["gloo", "nccl", "onegpu"]
State = Literal["ok", "failed", "skipped"]


class Check(msgspec.Struct, frozen=True):
    """The result of one test."""

    what: str
    """The schedule, the two ranks, or the push that was tested."""
    state: State
    said: str
    """The measured value, why the test was skipped, or what went wrong."""
    value: float | None = None
    """The worst relative error for training; gigabytes per second for a link or a push."""


class Report(msgspec.Struct, frozen=True):
    versions: dict[str, str]
    setting: Setting
    ranks: int
    training: list[Check]
    links: list[Check]
    push: list[Check]
    untested: list[str]
    seconds: float

    @property
    def checks(self) -> list[Check]:
        return [*self.training, *self.links, *self.push]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.state == "failed"]


class Note(msgspec.Struct, frozen=True):
    """One rank's result of one test, as written to its file."""

    part: Literal["training", "links", "push"]
    check: Check


def merged(notes: list[list[Note]], part: str) -> list[Check]:
    """Merge all ranks' results into one check per test: a failure on any rank wins, then the largest value."""
    by_test: dict[str, list[Check]] = {}
    for note in (note for rank_notes in notes for note in rank_notes if note.part == part):
        by_test.setdefault(note.check.what, []).append(note.check)
    return [_worst(checks) for checks in by_test.values()]


def _worst(checks: list[Check]) -> Check:
    failed = [check for check in checks if check.state == "failed"]
    # Prefer the failing rank's own error to messages that only say which rank failed.
    failed.sort(key=lambda check: "rank" in check.said)
    if not failed and len({check.state for check in checks}) > 1:
        return Check(checks[0].what, "failed", "some ranks skipped it, others did not")
    return failed[0] if failed else max(checks, key=lambda check: check.value or 0.0)
