"""Numbers that ranks exchange at the start of a step or the like: what they will sum, and how it begins."""

import struct
from collections.abc import Iterable, Mapping
from itertools import permutations

from stretto.execute.side_channel import SideChannel, side_channels
from stretto.execute.team import Team
from stretto.ir.errors import peer_failure

Ranks = tuple[int, ...]

_CALLS = "step(), eval_step(), dry_run(), clip_grad_norm_() and sum_by_layer()"
IN_ORDER = f"all ranks must call {_CALLS} in the same order, with the same options"


class Agreement:
    """Exchanges one number per set of ranks at the start of each step.

    `send` does not wait for the other ranks; `others` reads their numbers, which have usually arrived by then.
    """

    def __init__(self, team: Team, sets: Iterable[Ranks]) -> None:
        """Open the connections. All ranks call this together, with the same sets."""
        self._supervisor, rank = team.supervisor, team.rank
        every = sorted(sets)
        pairs = sorted({pair for ranks in every for pair in permutations(ranks, 2)})
        outgoing, incoming = ({}, {}) if team.rendezvous is None or not pairs else side_channels(team.rendezvous, pairs)
        self._outgoing: dict[int, SideChannel] = outgoing
        self._incoming: dict[int, SideChannel] = incoming
        self._common = {peer: [ranks for ranks in every if rank in ranks and peer in ranks] for peer in outgoing}
        self._received: dict[int, dict[Ranks, int]] = {}

    def send(self, numbers: Mapping[Ranks, int]) -> None:
        """Send this rank's number for each of its sets."""
        self._received = {}
        with self._supervisor.explaining(lambda: "its start of the step to be received"):
            for peer, channel in self._outgoing.items():
                values = [numbers[ranks] for ranks in self._common[peer]]
                channel.send(
                    struct.pack(f"<{1 + len(values)}Q", self._supervisor.mark, *values), self._supervisor.check
                )

    def others(self, ranks: Ranks) -> dict[int, int]:
        """Return the numbers of the other ranks of a set, waiting for those that have not arrived."""
        return {peer: self._receive(peer)[ranks] for peer in ranks if peer in self._incoming}

    def exchange(self, ranks: Ranks, number: int) -> list[int]:
        """Send this rank's number of its only set, and return those of all ranks of the set, this rank's first."""
        self.send({ranks: number})
        return [number, *self.others(ranks).values()]

    def _receive(self, peer: int) -> dict[Ranks, int]:
        if peer not in self._received:
            channel, sets = self._incoming[peer], self._common[peer]
            form = struct.Struct(f"<{1 + len(sets)}Q")
            what = f"rank {peer} to begin {self._supervisor.label}"
            self._supervisor.wait(channel, lambda: what)
            with self._supervisor.explaining(lambda: what):
                mark, *values = form.unpack(channel.receive(form.size, self._supervisor.check))
            if mark != self._supervisor.mark:
                raise peer_failure(f"rank {peer} is not in {self._supervisor.label}; {IN_ORDER}")
            self._received[peer] = dict(zip(sets, values, strict=True))
        return self._received[peer]

    def close(self) -> None:
        for channel in (*self._outgoing.values(), *self._incoming.values()):
            channel.close()
