"""Has the device copy messages whose two sides are known.

A stream that waits can hold up others, once there are more of them than the device has queues. So only a few channels
at a time have a stream to wait on; for all others the broker looks at the flags itself, and queues what is ready.
"""

import contextlib
import time

from stretto import cuda
from stretto.onegpu_broker.flags import EVER, RING, Flags
from stretto.onegpu_broker.groups import Channel, GroupState
from stretto.onegpu_broker.mappings import Mappings
from stretto.onegpu_broker.wire import Place

_WAITING = 24  # streams that may wait; the device has 32 queues for a process that asks for them
_COPYING = 4  # streams that never wait
_SHORT = 8  # memory is short if less than this part of it is free


class Copies:
    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self.mappings = Mappings(lambda block, number: self.arrived(block) <= number, self._is_waiting)
        self._idle: list[int] = []  # streams to wait on
        self._armed: dict[int, Channel] = {}  # channels that have one, by their block
        self._copying: list[int] = []
        self.watched: dict[int, tuple[GroupState, Channel]] = {}
        """Channels with flags or clocks to look at."""

    def arrived(self, block: int) -> int:
        """How many messages of a channel."""
        return self._flags.read(self._flags.done(block))

    def begin(self, group: GroupState, channel: Channel) -> None:
        """A message is known on both sides: queue it if its channel may wait on a stream, or else look at its flags."""
        if not self._copying:
            made = cuda.make_streams(channel.matched[0][0].device, _WAITING + _COPYING)
            self._idle, self._copying = made[_COPYING:], made[:_COPYING]
        behind = len(channel.matched) > 1 or bool(channel.flying)
        if group.model is None and not behind and not self.mappings.has_work and self._arm(channel):
            self._move(group, channel, waits=True)
        else:
            self.watched[channel.block] = group, channel

    def look(self) -> list[tuple[GroupState, str]]:
        """Copy what both sides are ready for, and let arrive what has had its link's time; what failed, and why."""
        failures = []
        for group, channel in list(self.watched.values()):
            try:
                self._look_at(group, channel)
            except cuda.DriverError as error:
                failures.append((group, f"the broker could not move a message from rank {channel.source}: {error}"))
        return failures

    def stop(self, group: GroupState) -> None:
        """Forget what a group was to move, and wait for what the device is at."""
        for channel in group.channels.values():
            self.watched.pop(channel.block, None)
            channel.clear()
            if channel.block in self._armed:  # let go of the stream
                for number in range(RING):
                    self._flags.write(self._flags.ready(channel.block, number, sender=True), EVER)
                    self._flags.write(self._flags.ready(channel.block, number, sender=False), EVER)
        for channel in group.channels.values():  # only now, since one may be queued behind another
            if channel.stream:
                with contextlib.suppress(cuda.DriverError):
                    cuda.synchronize(channel.stream)

    def let_go(self, group: GroupState) -> None:
        """Let all streams of ranks go on that wait for a message of a group that was stopped."""
        for block in group.blocks:
            self._flags.write(self._flags.done(block), EVER)

    def release(self, group: GroupState) -> None:
        """Give back the blocks and streams of a group that was stopped."""
        self.mappings.ended(group.blocks)
        for block in group.blocks:
            self._flags.clear(block)
            if block in self._armed:
                self._idle.append(self._armed.pop(block).stream)

    def _arm(self, channel: Channel) -> bool:
        """Whether a channel has a stream to wait on. One whose messages another stream still counts gets none."""
        if channel.block in self._armed:
            return True
        if not self._is_done(channel):
            return False
        if not self._idle:
            for block, other in list(self._armed.items()):
                if self._is_done(other):
                    del self._armed[block]
                    self._idle.append(other.stream)
                    other.stream = 0
        if not self._idle:
            return False
        channel.stream = self._idle.pop()
        self._armed[channel.block] = channel
        return True

    def _is_waiting(self) -> bool:
        """Whether a stream may be waiting for a rank."""
        return any(self.arrived(block) < channel.waited for block, channel in self._armed.items())

    def tidy(self) -> None:
        """Close memory that is not needed."""
        if self._copying:
            with contextlib.suppress(cuda.DriverError):
                free, total = cuda.memory()
                self.mappings.is_short = free < total // _SHORT
        self.mappings.trim()

    def _is_done(self, channel: Channel) -> bool:
        """Whether all that was queued has been copied, and has arrived."""
        return not channel.flying and self.arrived(channel.block) >= channel.queued

    def _look_at(self, group: GroupState, channel: Channel) -> None:
        read, ready, block = self._flags.read, self._flags.ready, channel.block
        while channel.matched:
            number = channel.matched[0][0].number
            if read(ready(block, number, sender=True)) <= number or read(ready(block, number, sender=False)) <= number:
                break
            if block not in self._armed:
                channel.stream = self._copying[block % _COPYING]
            self._move(group, channel, waits=False)
        while channel.flying and time.perf_counter() >= channel.flying[0][1]:
            self._arrive(channel, channel.flying.popleft()[0])
        if not channel.matched and not channel.flying:
            del self.watched[block]

    def _move(self, group: GroupState, channel: Channel, *, waits: bool) -> None:
        """Queue the first message that is known on both sides."""
        sent, wanted = channel.matched.popleft()
        flags, stream, number = self._flags, channel.stream, sent.number
        if waits:
            for sender in (True, False):
                word = flags.ready(channel.block, number, sender=sender)
                if flags.read(word) <= number:
                    cuda.wait_value(stream, flags.address(word), number + 1)
                    channel.waited = number + 1
        if sent.count:
            target = self._open(group, channel, channel.target, wanted)
            source = self._open(group, channel, channel.source, sent)
            cuda.copy(stream, target, source, sent.count)
        if group.model is None:
            self._arrive(channel, number)
        else:
            begin = max(time.perf_counter(), channel.flying[-1][1] if channel.flying else 0.0)
            channel.flying.append((number, begin + group.model.seconds(sent.count)))

    def _arrive(self, channel: Channel, number: int) -> None:
        channel.queued = number + 1
        flags = self._flags
        cuda.write_value(channel.stream, flags.address(flags.done(channel.block)), number + 1)

    def _open(self, group: GroupState, channel: Channel, rank: int, place: Place) -> int:
        owner = group.members[rank]
        start = self.mappings.open(owner, place.handle, place.size, block=channel.block, number=place.number)
        return start + place.offset
