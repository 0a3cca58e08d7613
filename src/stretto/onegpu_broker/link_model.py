"""How long a link takes: a model of the links that a cluster would have, in place of this GPU's own memory."""

import msgspec

from stretto.ir.errors import StrettoError

PRESETS = {"nvlink": (400.0, 3.0), "network": (50.0, 10.0)}
"""GB/s and µs: NVLink within a node, and a 400 Gbit/s network between nodes."""


class SimulatedLink(msgspec.Struct, frozen=True):
    """A message takes at least its latency and its bytes over the bandwidth, counted from when both sides are ready.

    The broker's clock keeps the time, and streams wait for it: neither SMs nor bandwidth are taken. Links do not share
    anything, and a message is never faster than this GPU copies it.
    """

    gigabytes_per_second: float
    microseconds: float = 0.0

    @staticmethod
    def parse(text: str) -> "SimulatedLink":
        """From a preset's name, or numbers such as 400:3.

        >>> SimulatedLink.parse("nvlink").seconds(4 * 10**9)
        0.010003
        """
        if text in PRESETS:
            return SimulatedLink(*PRESETS[text])
        try:
            speed, _, latency = text.partition(":")
            found = SimulatedLink(float(speed), float(latency or 0))
        except ValueError:
            found = SimulatedLink(0)
        if not found.is_possible:
            raise StrettoError(f"a link is {', '.join(PRESETS)} or GB/s:µs such as 400:3 (got {text!r:.40})")
        return found

    @property
    def is_possible(self) -> bool:
        return 0 < self.gigabytes_per_second < float("inf") and 0 <= self.microseconds < float("inf")

    def seconds(self, count: int) -> float:
        return count / (self.gigabytes_per_second * 1e9) + self.microseconds * 1e-6
