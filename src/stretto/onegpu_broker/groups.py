"""One group of ranks, with a channel from every rank to every other."""

from dataclasses import dataclass, field

from stretto.onegpu_broker.channels import Channel
from stretto.onegpu_broker.clients import Client
from stretto.onegpu_broker.link_model import SimulatedLink


@dataclass(slots=True)
class GroupState:
    name: str
    size: int
    first: int
    """The first of its blocks of flags."""
    members: dict[int, Client] = field(default_factory=dict)
    """By rank, including ranks that have left."""
    left: set[int] = field(default_factory=set)
    channels: dict[tuple[int, int], Channel] = field(default_factory=dict)
    """By source and target."""
    model: SimulatedLink | None = None
    fate: str = ""
    """Groups of the same fate fail together; a group without one fails alone."""
    failed: str = ""
    """Why the group failed; empty if it has not."""

    @property
    def blocks(self) -> range:
        """Its blocks of flags, one for each channel."""
        return range(self.first, self.first + self.size**2)

    @property
    def is_abandoned(self) -> bool:
        """Whether every rank that joined has left."""
        return len(self.left) == len(self.members)

    def rank_of(self, client: Client) -> int | None:
        """Return the rank of a client, or None if it never joined or has left."""
        return next((rank for rank, member in self.members.items() if member is client and rank not in self.left), None)

    def channel(self, source: int, target: int) -> Channel:
        block = self.first + source * self.size + target
        return self.channels.setdefault((source, target), Channel(source, target, block))
