"""The times of a push, and the report that they become part of."""

import msgspec

from stretto.execute.team import Team
from stretto.timeline import Timeline
from stretto.weights.messages import Assurance
from stretto.weights.send.choose import Choice, busy
from stretto.weights.send.report import Report, Step
from stretto.weights.send.store import Version


class Times(msgspec.Struct, frozen=True):
    """How many seconds a sender took to move all buckets, and for each step."""

    moving: float
    seconds: dict[str, float]


def longest_times(own: Times, team: Team) -> Times:
    """Return the longest times among all senders."""
    senders = team.gather(own, Times)
    seconds = {name: max(times.seconds[name] for times in senders) for name in own.seconds}
    return Times(max(times.moving for times in senders), seconds)


def make_report(
    version: Version,
    choice: Choice,
    seconds: float,
    times: Times,
    serving: dict[str, Assurance],
    timeline: Timeline | None,
) -> Report:
    predicted = busy(choice.predicted)
    return Report(
        version=version.manifest.version,
        content=version.content.digest,
        nbytes=version.manifest.nbytes,
        buckets=len(version.buckets),
        bucket_bytes=version.bucket_bytes,
        mode=choice.mode,
        seconds=seconds,
        moving=Step(choice.predicted.makespan, times.moving),
        steps={name: Step(predicted[name], actual) for name, actual in times.seconds.items() if name in predicted},
        receivers=serving,
        timeline=timeline,
    )
