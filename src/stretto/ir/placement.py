"""Which device runs which stage for which microbatch."""

from dataclasses import dataclass

from stretto.ir.errors import PlanError
from stretto.ir.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class Placement:
    """Routes through the devices; each route takes an equal run of consecutive microbatches.

    `routes[r][stage]` is a device. One route is the ordinary pipeline. DualPipe has two: the first
    half of the microbatches flows down, the second half up, so each stage sits on two devices.
    On a mesh (`on_mesh`), every replica has routes and microbatches of its own.

    >>> Placement(routes=((0, 1), (1, 0)), microbatches=4).device(stage=0, microbatch=3)
    1
    """

    routes: tuple[tuple[int, ...], ...]
    microbatches: int
    mesh: MeshShape | None = None
    """The mesh that the devices form, if it has more than a pipeline."""

    def __post_init__(self) -> None:
        if type(self.microbatches) is not int:
            raise PlanError(f"microbatches are a whole number (got {self.microbatches!r:.40})")
        if not self.routes or len({len(route) for route in self.routes}) != 1 or not self.routes[0]:
            raise PlanError(f"every route must visit the same stages, at least one (got {self.routes})")
        if self.microbatches < 1 or self.microbatches % len(self.routes):
            raise PlanError(
                f"{self.microbatches} microbatches cannot be shared equally among {len(self.routes)} routes"
            )
        if self.mesh is not None and not self._fits(self.mesh):
            raise PlanError(
                f"the routes are not those of the pipelines of a mesh {self.mesh} (got {self.routes!r:.60})"
            )

    @property
    def stages(self) -> int:
        return len(self.routes[0])

    @property
    def devices(self) -> int:
        return 1 + max(max(route) for route in self.routes)

    @property
    def homes(self) -> set[tuple[int, int]]:
        """All pairs (device, stage) where the device holds the stage."""
        return {(device, stage) for route in self.routes for stage, device in enumerate(route)}

    @property
    def replicas(self) -> int:
        """The number of pipelines, each of which runs an equal run of microbatches."""
        return 1 if self.mesh is None else self.mesh.replicas

    def replica(self, device: int) -> int:
        """Return the replica that a device belongs to."""
        return 0 if self.mesh is None else self.mesh.place(device)[1]

    def on_mesh(self, mesh: MeshShape) -> "Placement":
        """Return the placement of a replica of this one for each pipeline of a mesh.

        Microbatch m of replica r, of M microbatches each, is number r × M + m.

        >>> looped(devices=2, stages_per_device=1, microbatches=3).on_mesh(MeshShape.of({"pp": 2, "dp": 2})).routes
        ((0, 2), (1, 3))
        """
        routes = tuple(
            tuple(mesh.device(pp=device, replica=replica) for device in route)
            for replica in range(mesh.replicas)
            for route in self.routes
        )
        return Placement(routes, self.microbatches * mesh.replicas, mesh)

    def device_name(self, device: int) -> str:
        """Return a device's number, with its place if there is a mesh of several pipelines.

        >>> placement = looped(devices=2, stages_per_device=1, microbatches=2)
        >>> placement.device_name(1), placement.on_mesh(MeshShape.of({"pp": 2, "ep": 2})).device_name(1)
        ('1', '1 (pp 0, ep 1)')
        """
        if self.mesh is None or self.mesh.replicas == 1 or not 0 <= device < self.mesh.devices:
            return str(device)
        return f"{device} ({self.mesh.place_text(device)})"

    def _fits(self, mesh: MeshShape) -> bool:
        """Return whether each replica of a mesh has equally many routes, all through its own devices."""
        ways, rest = divmod(len(self.routes), mesh.replicas)
        return not rest and all(
            0 <= device < mesh.devices and mesh.place(device)[1] == number // ways
            for number, route in enumerate(self.routes)
            for device in route
        )

    def route(self, microbatch: int) -> int:
        return microbatch * len(self.routes) // self.microbatches

    def device(self, stage: int, microbatch: int) -> int:
        return self.routes[self.route(microbatch)][stage]


def looped(*, devices: int, stages_per_device: int, microbatches: int) -> Placement:
    """Place stage s on device s mod devices."""
    return Placement((tuple(range(devices)) * stages_per_device,), microbatches)


def folded(*, devices: int, microbatches: int) -> Placement:
    """Place stages in a "V": down the devices and back up, two on each."""
    down = tuple(range(devices))
    return Placement((down + down[::-1],), microbatches)


def opposed(*, devices: int, microbatches: int) -> Placement:
    """Make two routes in opposite directions over the same devices, with one stage of each per device."""
    down = tuple(range(devices))
    return Placement((down, down[::-1]), microbatches)
