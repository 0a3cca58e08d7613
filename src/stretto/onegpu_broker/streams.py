"""The broker's CUDA streams: some may wait for ranks, the others only copy."""

from stretto import cuda
from stretto.onegpu_broker.channels import Channel
from stretto.onegpu_broker.flags import Flags

_WAITING = 24  # streams that may wait; the device has 32 queues for a process that asks for them
_COPYING = 4  # streams that never wait


class Streams:
    """Lends streams to channels.

    A waiting stream can block other streams once there are more streams than hardware queues. So only a few channels at
    a time have a stream that waits.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._idle: list[int] = []  # streams that may wait, and have no channel
        self._copying: list[int] = []
        self.armed: dict[int, Channel] = {}
        """Channels with a stream of their own that may wait, by block."""

    @property
    def exist(self) -> bool:
        return bool(self._copying)

    def create(self, device: int) -> None:
        """Create all streams, unless they exist."""
        if not self._copying:
            streams = cuda.make_streams(device, _WAITING + _COPYING)
            self._idle, self._copying = streams[_COPYING:], streams[:_COPYING]

    def copying(self, block: int) -> int:
        """Return the stream that never waits for the channel with this block."""
        return self._copying[block % _COPYING]

    def arm(self, channel: Channel) -> bool:
        """Give a channel a stream that may wait; return whether it has one.

        A channel gets none while another stream still counts its messages.
        """
        if channel.block in self.armed:
            return True
        if not self._is_done(channel):
            return False
        if not self._idle:
            for block, other in list(self.armed.items()):
                if self._is_done(other):
                    del self.armed[block]
                    self._idle.append(other.stream)
                    other.stream = 0
        if not self._idle:
            return False
        channel.stream = self._idle.pop()
        self.armed[channel.block] = channel
        return True

    def release(self, block: int) -> None:
        """Take back the stream of the channel with this block, if it has one."""
        if block in self.armed:
            self._idle.append(self.armed.pop(block).stream)

    def is_waiting(self) -> bool:
        """Return whether a stream may be waiting for a rank."""
        return any(self._flags.arrived(block) < channel.waited for block, channel in self.armed.items())

    def _is_done(self, channel: Channel) -> bool:
        """Return whether all queued messages were copied and have arrived."""
        return not channel.link and self._flags.arrived(channel.block) >= channel.queued
