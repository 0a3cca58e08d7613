"""All groups of the broker: ranks join and leave them, a group fails as a whole, and blocks of flags are reused."""

from stretto.onegpu_broker.clients import Client
from stretto.onegpu_broker.copies import Copies
from stretto.onegpu_broker.flags import BLOCKS
from stretto.onegpu_broker.groups import GroupState
from stretto.onegpu_broker.wire import Failed, Join, Joined
from stretto.wire.frames import MalformedMessage


class GroupRegistry:
    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.by_name: dict[str, GroupState] = {}
        self.abandoned: dict[str, GroupState] = {}
        """Groups that every rank that joined has left, while other ranks may still join."""
        self._used = bytearray(BLOCKS)  # by block of flags: 0 if it is free

    def join(self, client: Client, message: Join) -> None:
        """Add a client to a group, which its first rank creates; raise MalformedMessage if it cannot be that rank."""
        rank, size = message.rank, message.size
        if rank >= size:
            raise MalformedMessage(f"a Join as rank {rank} of {size}")
        group = self.by_name.get(message.group)
        if group is None:
            first = self._find_blocks(size)
            if first is None:
                client.send(Failed(message.group, "too many groups: the broker has no room for more"))
                return
            self.by_name[message.group] = group = GroupState(message.group, size, first)
            self._used[first : first + size**2] = b"x" * size**2
        if size != group.size:
            raise MalformedMessage(f"a Join as rank {rank} of {size} to a group of {group.size}")
        if rank in group.members or client in group.members.values():
            raise MalformedMessage(f"a Join as rank {rank} to a group that has this rank or process already")
        client.has_joined = True
        if group.failed:
            client.send(Failed(group.name, group.failed))
            return
        group.members[rank] = client
        self.abandoned.pop(group.name, None)
        client.send(Joined(group.name, group.first))

    def leave(self, group: GroupState, rank: int) -> None:
        """Remove a rank; the group fails if another rank needs it for a message."""
        group.left.add(rank)
        if any(channel.is_broken_by(rank) for ends, channel in group.channels.items() if rank in ends):
            self.fail(group, f"rank {rank} has left")
        if len(group.left) == group.size:
            self._end(group)
        elif group.is_abandoned:
            self.abandoned[group.name] = group

    def remove(self, client: Client, why: str) -> None:
        """Remove a client from all its groups, which fail if there is a reason `why`."""
        ranks = [(group, rank) for group in self.by_name.values() if (rank := group.rank_of(client)) is not None]
        if why:
            self._fail({group.name: f"rank {rank} {why}" for group, rank in ranks})
        for group, rank in ranks:
            self.leave(group, rank)

    def share_fate(self, group: GroupState, fate: str) -> None:
        """Let all groups of this fate fail as soon as one does, or now if one has."""
        group.fate = fate
        if why := next((other.failed for other in self.by_name.values() if other.fate == fate and other.failed), ""):
            self._fail({group.name: why})

    def fail(self, group: GroupState, why: str) -> None:
        """Tell all members why the group failed, and release every stream that waits for one of its messages."""
        if not group.failed:
            self._fail({group.name: why})

    def _fail(self, reasons: dict[str, str]) -> None:
        """Fail groups for these reasons, and those that share their fate.

        A stream that is released goes on without its data, and may send what it makes of that through other groups. So
        all that fail are marked before any stream is released: who finds no mark afterwards has what was meant for it.
        """
        fates = {fate: why for name, why in reasons.items() if (fate := self.by_name[name].fate)}
        failing = []
        for name, group in self.by_name.items():
            why = reasons.get(name) or fates.get(group.fate, "")
            if why and not group.failed:
                group.failed = why
                self._copies.mark(group)
                failing.append(group)
        for group in failing:
            for rank, client in group.members.items():
                if rank not in group.left:
                    client.send(Failed(group.name, group.failed))
        for group in failing:
            self._copies.stop(group)
        for group in failing:
            self._copies.unblock(group)

    def _find_blocks(self, size: int) -> int | None:
        """Return the first of enough free blocks in a row, ending abandoned groups if that is needed."""
        if size**2 > BLOCKS:
            return None
        free = bytes(size**2)
        if free not in self._used:
            for group in list(self.abandoned.values()):
                self._end(group)
        first = self._used.find(free)
        return first if first >= 0 else None

    def _end(self, group: GroupState) -> None:
        """Forget a group that all its ranks have left."""
        self._copies.stop(group)
        self._copies.release(group)
        self._used[group.first : group.first + group.size**2] = bytes(group.size**2)
        del self.by_name[group.name]
        self.abandoned.pop(group.name, None)
