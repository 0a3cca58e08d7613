"""What was found out about a machine."""

from typing import Literal

import msgspec

Setting = Literal["gloo", "nccl", "onegpu"]
State = Literal["ok", "failed", "skipped"]


class Check(msgspec.Struct, frozen=True):
    """One thing that was tried."""

    what: str
    """A schedule, two ranks, or a push."""
    state: State
    said: str
    """The figure that was found, why it was skipped, or what went wrong."""
    value: float | None = None
    """Of training the worst relative error, of a link or a push gigabytes per second."""


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
    """What one rank has found out, as it writes it down."""

    part: Literal["training", "links", "push"]
    check: Check


def merged(notes: list[list[Note]], part: str) -> list[Check]:
    """One check for each thing that ranks have tried: what failed on any has failed, of figures the worst counts."""
    found: dict[str, list[Check]] = {}
    for note in (note for own in notes for note in own if note.part == part):
        found.setdefault(note.check.what, []).append(note.check)
    return [_worst(checks) for checks in found.values()]


def _worst(checks: list[Check]) -> Check:
    failed = [check for check in checks if check.state == "failed"]
    # A rank that says what is wrong knows more than those that only say which rank that was.
    failed.sort(key=lambda check: "rank" in check.said)
    if not failed and len({check.state for check in checks}) > 1:
        return Check(checks[0].what, "failed", "some ranks skipped it, others did not")
    return failed[0] if failed else max(checks, key=lambda check: check.value or 0.0)
