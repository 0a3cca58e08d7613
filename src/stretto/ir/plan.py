"""A plan: the compute order of every device, and nothing else."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from stretto.ir.action import Action, Pair
from stretto.ir.errors import PlanError
from stretto.ir.mesh import MeshShape
from stretto.ir.placement import Placement

Cell: TypeAlias = Action | Pair


@dataclass(frozen=True, slots=True)
class Plan:
    """One row of actions and pairs per device, and the placement they follow.

    A plan prints as PyTorch's compute-only CSV, which `parse_plan` reads back as the same plan if every device has
    actions, no mesh is given, and there is one route, or two that differ; the JSON of `save` holds any plan.
    """

    rows: tuple[tuple[Cell, ...], ...]
    placement: Placement

    def __post_init__(self) -> None:
        if not any(self.rows):
            raise PlanError("a plan needs at least one action")
        named = 1 + max(map(max, self.placement.routes))
        if named > len(self.rows) or min(map(min, self.placement.routes)) < 0:
            raise PlanError(f"the placement speaks of {named} devices, but there are {len(self.rows)} rows")

    @property
    def devices(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def microbatches(self) -> int:
        return self.placement.microbatches

    def on_mesh(self, mesh: Mapping[str, int] | MeshShape) -> "Plan":
        """Return the plan of a whole mesh, in which each pipeline runs this plan on microbatches of its own.

        `mesh` has the sizes of the dimensions "pp", "ep" and "dp", outermost first, as `init_device_mesh` takes them.

        >>> from stretto.ir.text import parse_plan
        >>> print(parse_plan("0F0,0B0").on_mesh({"dp": 2, "pp": 1}))
        0F0,0B0
        0F1,0B1
        """
        shape = MeshShape.of(mesh)
        if self.placement.mesh is not None:
            raise PlanError(f"this plan is on a mesh already, {self.placement.mesh}")
        if shape.pp != self.devices:
            raise PlanError(f"the plan is for {self.devices} devices, but the mesh has pp={shape.pp}")
        rows = []
        for device in range(shape.devices):
            pp, replica = shape.place(device)
            rows.append(tuple(_shifted(cell, replica * self.microbatches) for cell in self.rows[pp]))
        return Plan(tuple(rows), self.placement.on_mesh(shape))

    def save(self, path: str | Path) -> None:
        """Write PyTorch's CSV (.csv), or JSON with the placement (.json); `load_plan` reads both. CSV holds no mesh."""
        from stretto.ir.text import save_plan  # here, because it imports this module

        save_plan(self, path)

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, row)) for row in self.rows)


def _shifted(cell: Cell, by: int) -> Cell:
    """Return a cell for microbatches whose numbers are higher by so many."""
    if isinstance(cell, Pair):
        return Pair(*(replace(action, microbatch=action.microbatch + by) for action in actions_of(cell)))
    return replace(cell, microbatch=cell.microbatch + by)


def actions_of(cell: Cell) -> tuple[Action, ...]:
    return (cell.forward, cell.backward) if isinstance(cell, Pair) else (cell,)


def infer_placement(rows: Sequence[Sequence[Cell]]) -> Placement:
    """Return the placement that most actions follow: one route, or one for each half of the microbatches.

    A few actions in a wrong row do not change it, so `check` can name them.
    """
    placed = list(_placed(rows))
    if not placed:
        raise PlanError("a plan needs at least one action")
    stages = 1 + max(action.stage for _, action in placed)
    microbatches = 1 + max(action.microbatch for _, action in placed)
    if stages * microbatches > 4 * len(placed) + 64:  # keeps tables small for absurd indexes
        raise PlanError(
            f"{stages} stages × {microbatches} microbatches need at least {stages * microbatches} actions, "
            f"but there are only {len(placed)}; is an index mistyped?"
        )
    votes: Counter[tuple[int, int, int]] = Counter()
    for device, action in placed:
        votes[action.microbatch * 2 >= microbatches, action.stage, device] += 1
    homes: list[list[int | None]] = [[None] * stages, [None] * stages]
    for (half, stage, device), _ in sorted(votes.items(), key=lambda vote: vote[1]):
        homes[half][stage] = device
    lower, upper = homes
    routes = []
    for first, second in ((lower, upper), (upper, lower)):
        route = tuple(b if a is None else a for a, b in zip(first, second, strict=True))
        if None in route:
            raise PlanError(f"stage {route.index(None)} never appears, but stage {stages - 1} does")
        routes.append(tuple(device for device in route if device is not None))
    if microbatches % 2 or routes[0] == routes[1]:
        return Placement((routes[0],), microbatches)
    return Placement((routes[0], routes[1]), microbatches)


def _placed(rows: Sequence[Sequence[Cell]]) -> Iterator[tuple[int, Action]]:
    for device, row in enumerate(rows):
        for cell in row:
            for action in actions_of(cell):
                yield device, action
