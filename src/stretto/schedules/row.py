"""Writes one device's row op by op, keeping count of microbatches."""

from stretto.ir.action import Action, Op, Pair
from stretto.ir.plan import Cell


class Row:
    """Each call appends the next microbatch of that op on that stage.

    `first` gives the microbatch a stage starts with, where that is not 0. A weight part comes after
    its input part, oldest first.
    """

    def __init__(self, first: dict[int, int] | None = None) -> None:
        self.cells: list[Cell] = []
        self._first = first or {}
        self._next: dict[tuple[int, Op], int] = {}
        self._weights: list[Action] = []

    def forward(self, stage: int) -> None:
        self.cells.append(self._take(stage, Op.F))

    def backward(self, stage: int) -> None:
        self.cells.append(self._take(stage, Op.B))

    def input(self, stage: int) -> None:
        action = self._take(stage, Op.I)
        self.cells.append(action)
        self._weights.append(Action(stage, Op.W, action.microbatch))

    def weight(self, stage: int | None = None) -> None:
        """Append the oldest weight part still to come, of this stage if one is given."""
        at = next(k for k, action in enumerate(self._weights) if stage in (None, action.stage))
        self.cells.append(self._weights.pop(at))

    def pair(self, *, forward: int, backward: int) -> None:
        self.cells.append(Pair(self._take(forward, Op.F), self._take(backward, Op.B)))

    @property
    def pending(self) -> int:
        """How many weight parts are still to come."""
        return len(self._weights)

    def _take(self, stage: int, op: Op) -> Action:
        key = (stage, Op.F if op is Op.F else Op.B)  # B and I count together
        microbatch = self._next.get(key, self._first.get(stage, 0))
        self._next[key] = microbatch + 1
        return Action(stage, op, microbatch)
