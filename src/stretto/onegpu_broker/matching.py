"""Matches the two sides of each message, and starts it once both are posted."""

from stretto import cuda
from stretto.onegpu_broker.channels import Channel
from stretto.onegpu_broker.copies import Copies
from stretto.onegpu_broker.groups import GroupState
from stretto.onegpu_broker.registry import GroupRegistry
from stretto.onegpu_broker.wire import Here, Place, Taken, close


class Matcher:
    def __init__(self, groups: GroupRegistry, copies: Copies) -> None:
        self._groups, self._copies = groups, copies

    def post(self, group: GroupState, rank: int, place: Place, file: int) -> None:
        """Add one side of a message, and start the messages of its channel that now have both."""
        if place.peer in group.left:
            self._groups.fail(group, f"rank {place.peer} has left")
            return
        channel = group.channel(rank, place.peer) if place.sends else group.channel(place.peer, rank)
        channel.add(place, file, arrived=self._copies.arrived(channel.block))
        while channel.sends and channel.receives and not group.failed:
            self._match(group, channel)

    def mark_read(self, group: GroupState, rank: int, message: Taken) -> None:
        """Tell the sender of a message on the host that the receiver has read it."""
        group.channel(message.peer, rank).mark_read(message)
        if message.peer not in group.left:
            group.members[message.peer].send(Taken(group.name, rank, message.number))

    def _match(self, group: GroupState, channel: Channel) -> None:
        """Start a channel's next message; the group fails if its two sides disagree."""
        (send, file), receive = channel.sends.popleft(), channel.receives.popleft()
        try:
            if send.count != receive.count or (send.device < 0) != (receive.device < 0):
                where = ["the device" if place.device >= 0 else "the host" for place in (send, receive)]
                self._groups.fail(
                    group,
                    f"rank {channel.source} sent {send.count} bytes on {where[0]} as message {send.number} "
                    f"to rank {channel.target}, which expected {receive.count} on {where[1]}",
                )
            elif send.turn != receive.turn:
                self._groups.fail(
                    group,
                    f"rank {channel.source} is at collective {send.turn} and rank {channel.target} at {receive.turn}: "
                    f"one of them has left out or was refused a collective that the other has begun",
                )
            elif send.device >= 0:
                channel.matched.append((send, receive))
                self._copies.begin(group, channel)
            else:
                channel.unread.append(send.number)
                group.members[channel.target].send(Here(group.name, channel.source, send.number), file)
        except cuda.DriverError as error:
            self._groups.fail(group, f"the broker could not move a message from rank {channel.source}: {error}")
        finally:
            close(file)
