"""What ranks tell each other when a step begins: what they will sum, and whether it begins like an earlier one."""

import struct
from collections.abc import Iterable, Mapping
from itertools import permutations

from stretto.execute.side_channel import SideChannel, side_channels
from stretto.execute.team import Team
from stretto.ir.errors import told

Ranks = tuple[int, ...]


class Agreement:
    """A number for each of some sets of ranks, told to all ranks of the set when a step begins. It is heard when it is
    asked for, and has mostly come by then.
    """

    def __init__(self, team: Team, sets: Iterable[Ranks]) -> None:
        """All ranks make theirs together, of the same sets."""
        self._supervisor, rank = team.supervisor, team.rank
        every = sorted(sets)
        pairs = sorted({pair for ranks in every for pair in permutations(ranks, 2)})
        to, of = ({}, {}) if team.rendezvous is None or not pairs else side_channels(team.rendezvous, pairs)
        self._to: dict[int, SideChannel] = to
        self._of: dict[int, SideChannel] = of
        self._common = {peer: [ranks for ranks in every if rank in ranks and peer in ranks] for peer in to}
        self._heard: dict[int, dict[Ranks, int]] = {}

    def send(self, numbers: Mapping[Ranks, int]) -> None:
        """This rank's number for each of its sets."""
        self._heard = {}
        with self._supervisor.explaining(lambda: "what it told to be heard"):
            for peer, wire in self._to.items():
                said = [numbers[ranks] for ranks in self._common[peer]]
                wire.send(struct.pack(f"<{1 + len(said)}Q", self._supervisor.mark, *said), self._supervisor.check)

    def others(self, ranks: Ranks) -> dict[int, int]:
        """The numbers of the other ranks of a set."""
        return {peer: self._hear(peer)[ranks] for peer in ranks if peer in self._of}

    def _hear(self, peer: int) -> dict[Ranks, int]:
        if peer not in self._heard:
            wire, sets = self._of[peer], self._common[peer]
            form = struct.Struct(f"<{1 + len(sets)}Q")
            what = f"rank {peer} to begin {self._supervisor.label}"
            self._supervisor.wait(wire, lambda: what)
            with self._supervisor.explaining(lambda: what):
                mark, *said = form.unpack(wire.receive(form.size, self._supervisor.check))
            if mark != self._supervisor.mark:
                raise told(
                    f"rank {peer} is not in {self._supervisor.label}; all ranks must call step() and eval_step() in "
                    "the same order, with the same record and accumulate"
                )
            self._heard[peer] = dict(zip(sets, said, strict=True))
        return self._heard[peer]

    def close(self) -> None:
        for wire in (*self._to.values(), *self._of.values()):
            wire.close()
