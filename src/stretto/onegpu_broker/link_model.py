"""A model of a cluster's links: how long a message would take on them."""

import msgspec

from stretto.ir.errors import StrettoError

PRESETS = {"nvlink": (400.0, 3.0), "network": (50.0, 10.0)}
"""GB/s and µs: NVLink within a node, and a 400 Gbit/s network between nodes."""


class SimulatedLink(msgspec.Struct, frozen=True):
    """A link with a bandwidth and a latency.

    A message takes at least the latency plus its bytes over the bandwidth, from when both sides are ready. The broker
    keeps the time, and streams wait for it, which uses neither SMs nor bandwidth. Links share nothing, and a message is
    never faster than this GPU copies it.
    """

    gigabytes_per_second: float
    microseconds: float = 0.0

    @staticmethod
    def parse(text: str) -> "SimulatedLink":
        """Parse a preset's name, or GB/s:µs such as 400:3.

        >>> SimulatedLink.parse("nvlink").seconds(4 * 10**9)
        0.010003
        """
        if text in PRESETS:
            return SimulatedLink(*PRESETS[text])
        try:
            speed, _, latency = text.partition(":")
            link = SimulatedLink(float(speed), float(latency or 0))
        except ValueError:
            link = SimulatedLink(0)
        if not link.is_possible:
            raise StrettoError(f"a link is {', '.join(PRESETS)} or GB/s:µs such as 400:3 (got {text!r:.40})")
        return link

    @property
    def is_possible(self) -> bool:
        return 0 < self.gigabytes_per_second < float("inf") and 0 <= self.microseconds < float("inf")

    def seconds(self, count: int) -> float:
        """Return the seconds that a message of `count` bytes takes."""
        return count / (self.gigabytes_per_second * 1e9) + self.microseconds * 1e-6
