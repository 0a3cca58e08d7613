"""The mesh of a pipeline: which of PyTorch's dimensions are stages, expert-parallel and data-parallel ranks."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from stretto.execute.groups import place_among
from stretto.ir.errors import PipelineError
from stretto.ir.mesh import NAMES, MeshShape


def shape_of(mesh: Any) -> MeshShape:
    """Return the shape of a mesh; one dimension of another name is "pp". Raise PipelineError for other meshes."""
    if not isinstance(mesh, DeviceMesh):
        raise PipelineError(f"mesh is a DeviceMesh, as init_device_mesh makes it (got {mesh!r:.60})")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and names not in (("ep",), ("dp",)):
        names = ("pp",)
    if not names or not {*names} <= {*NAMES}:
        given = ", ".join(mesh.mesh_dim_names or ()) or "no names"
        raise PipelineError(
            f'mesh has {mesh.ndim} dimensions ({given}); a pipeline takes "pp", "ep" and "dp", or one of any name, '
            'such as mesh["pp"]'
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise PipelineError(f"mesh lists its ranks as {mesh.mesh.tolist()}; give them in ascending order")
    return MeshShape(tuple(zip(names, mesh.mesh.shape, strict=True)))


def parallel_index(mesh: DeviceMesh) -> int:
    """Return a number that tells this mesh from others of the same world, which train beside it."""
    return place_among(mesh.mesh.tolist()) if mesh.ndim == 1 else int(mesh.mesh.min())
