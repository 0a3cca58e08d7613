"""Queues the device copies of messages after both sides were posted."""

import contextlib

from stretto import cuda
from stretto.onegpu_broker.channels import Channel
from stretto.onegpu_broker.flags import EVER, RING, Flags
from stretto.onegpu_broker.groups import GroupState
from stretto.onegpu_broker.mappings import Mappings
from stretto.onegpu_broker.streams import Streams
from stretto.onegpu_broker.wire import Place

_SHORT = 8  # memory is short if less than 1/8 of it is free


class Copies:
    """If the channel has a stream that may wait, queues the copy at once, behind waits for both sides' flags.

    For all other channels, the broker polls the flags, and queues the copy when both are up.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags, self.streams = flags, Streams(flags)
        self.mappings = Mappings(lambda block, number: flags.arrived(block) <= number, self.streams.is_waiting)
        self.watched: dict[int, tuple[GroupState, Channel]] = {}
        """Channels whose flags or link clock must be polled, by block."""

    def arrived(self, block: int) -> int:
        """Return how many messages of a channel were copied."""
        return self._flags.arrived(block)

    def begin(self, group: GroupState, channel: Channel) -> None:
        """Queue a matched message if its channel may wait on a stream; otherwise poll its flags."""
        self.streams.create(channel.matched[0][0].device)
        is_behind = len(channel.matched) > 1 or bool(channel.link)
        if group.model is None and not is_behind and not self.mappings.has_work and self.streams.arm(channel):
            self._move(group, channel, waits=True)
        else:
            self.watched[channel.block] = group, channel

    def poll(self) -> list[tuple[GroupState, str]]:
        """Queue the copies whose flags are up, deliver messages whose link delay is over, and return the failures."""
        failures = []
        for group, channel in list(self.watched.values()):
            try:
                self._poll_channel(group, channel)
            except cuda.DriverError as error:
                failures.append((group, f"the broker could not move a message from rank {channel.source}: {error}"))
        return failures

    def mark(self, group: GroupState) -> None:
        """Show ranks that a group has failed, by the flag of messages from rank 0 to itself: there are none."""
        self._flags.write(self._flags.done(group.first), EVER)

    def stop(self, group: GroupState) -> None:
        """Drop a group's messages that are not queued, and wait until the device has run the others."""
        for channel in group.channels.values():
            self.watched.pop(channel.block, None)
            channel.clear()
            if channel.block in self.streams.armed:  # its stream may wait for flags
                for number in range(RING):
                    self._flags.write(self._flags.ready(channel.block, number, sender=True), EVER)
                    self._flags.write(self._flags.ready(channel.block, number, sender=False), EVER)
        for channel in group.channels.values():  # only after all flags are up: one may be queued behind another
            if channel.stream:
                with contextlib.suppress(cuda.DriverError):
                    cuda.synchronize(channel.stream)

    def unblock(self, group: GroupState) -> None:
        """Release the ranks' streams that wait for a message of a stopped group."""
        for block in group.blocks:
            self._flags.write(self._flags.done(block), EVER)

    def release(self, group: GroupState) -> None:
        """Take back the blocks and streams of a stopped group."""
        self.mappings.ended(group.blocks)
        for block in group.blocks:
            self._flags.clear(block)
            self.streams.release(block)

    def tidy(self) -> None:
        """Close memory that is not needed."""
        if self.streams.exist:
            with contextlib.suppress(cuda.DriverError):
                free, total = cuda.memory()
                self.mappings.is_short = free < total // _SHORT
        self.mappings.trim()

    def _poll_channel(self, group: GroupState, channel: Channel) -> None:
        read, ready, block = self._flags.read, self._flags.ready, channel.block
        while channel.matched:
            number = channel.matched[0][0].number
            if read(ready(block, number, sender=True)) <= number or read(ready(block, number, sender=False)) <= number:
                break
            if block not in self.streams.armed:
                channel.stream = self.streams.copying(block)
            self._move(group, channel, waits=False)
        for number in channel.link.take_arrived():
            self._arrive(channel, number)
        if not channel.matched and not channel.link:
            del self.watched[block]

    def _move(self, group: GroupState, channel: Channel, *, waits: bool) -> None:
        """Queue the copy of a channel's first matched message; with `waits`, behind waits for both flags."""
        send, receive = channel.matched.popleft()
        flags, stream, number = self._flags, channel.stream, send.number
        if waits:
            for sender in (True, False):
                word = flags.ready(channel.block, number, sender=sender)
                if flags.read(word) <= number:
                    cuda.wait_value(stream, flags.address(word), number + 1)
                    channel.waited = number + 1
        if send.count:
            target = self._open(group, channel, channel.target, receive)
            source = self._open(group, channel, channel.source, send)
            cuda.copy(stream, target, source, send.count)
        if group.model is None:
            self._arrive(channel, number)
        else:
            channel.link.start(number, group.model.seconds(send.count))

    def _arrive(self, channel: Channel, number: int) -> None:
        """Queue the flag that says that a message was copied."""
        channel.queued = number + 1
        flags = self._flags
        cuda.write_value(channel.stream, flags.address(flags.done(channel.block)), number + 1)

    def _open(self, group: GroupState, channel: Channel, rank: int, place: Place) -> int:
        """Return the address of one side's bytes in this process."""
        owner = group.members[rank]
        start = self.mappings.open(owner, place.handle, place.size, block=channel.block, number=place.number)
        return start + place.offset
