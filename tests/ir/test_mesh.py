"""Meshes of devices: numbered as PyTorch's DeviceMesh, read as they print."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.ir.errors import PlanError, TextError
from stretto.ir.mesh import NAMES, MeshShape
from stretto.ir.placement import Placement
from stretto.ir.text import load_plan, parse_plan_json, plan_to_json
from stretto.schedules import dualpipe, gpipe

shapes = st.permutations(NAMES).flatmap(
    lambda names: st.lists(st.integers(1, 4), min_size=3, max_size=3).map(
        lambda sizes: MeshShape.of(dict(zip(names, sizes, strict=True)))
    )
)


@given(shapes)
def test_devices_are_numbered_row_by_row(mesh: MeshShape) -> None:
    names = [name for name, _ in mesh.dimensions]
    devices = np.arange(mesh.devices).reshape([size for _, size in mesh.dimensions])
    replicas = np.moveaxis(devices, names.index("pp"), -1).reshape(-1, mesh.pp)  # row by row, too
    for replica, pipeline in enumerate(replicas.tolist()):
        assert [mesh.device(pp=pp, replica=replica) for pp in range(mesh.pp)] == pipeline
        for pp, device in enumerate(pipeline):
            assert mesh.place(device) == (pp, replica)
        peers = mesh.ep_replicas(replica)
        assert replica in peers
        assert [mesh.ep_rank(peer) for peer in peers] == list(range(mesh.ep))


@given(shapes)
def test_a_shape_reads_as_it_prints(mesh: MeshShape) -> None:
    assert MeshShape.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    "text", ["", "pp", "pp=", "pp=0", "pp=-1", "pp=2,pp=2", "tp=2", "pp=2;ep=2", "pp=²", "pp=99999999"]
)
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="a mesh"):
        MeshShape.parse(text)


@pytest.mark.parametrize("sizes", [{"pp": 2**11, "ep": 2**11}, {"pp": True}, {"tp": 2}, [2, 2]])
def test_sizes_that_make_no_mesh_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="a mesh has"):
        MeshShape.of(sizes)


def test_a_plan_on_a_mesh_keeps_it_in_json() -> None:
    plan = dualpipe(devices=2, microbatches=4).on_mesh({"dp": 2, "pp": 2, "ep": 2})
    assert parse_plan_json(plan_to_json(plan)) == plan


def test_a_plan_on_a_mesh_is_not_saved_as_csv(tmp_path: Path) -> None:
    """Its text reads back as another plan, without the mesh."""
    plan = gpipe(devices=2, microbatches=2).on_mesh({"pp": 2, "ep": 2})
    with pytest.raises(TextError, match=r"a \.csv holds no mesh, and this plan is for pp=2,ep=2; save it as \.json"):
        plan.save(tmp_path / "x.csv")
    assert not (tmp_path / "x.csv").exists()
    plan.save(tmp_path / "x.json")
    assert load_plan(tmp_path / "x.json") == plan


@pytest.mark.parametrize("routes", [((0, 1), (2, 3)), ((0, 2), (1, 4)), ((0, 2),)])
def test_routes_that_leave_their_replica_are_refused(routes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(PlanError, match="not those of the pipelines of a mesh pp=2,ep=2"):
        Placement(routes, 4, MeshShape.of({"pp": 2, "ep": 2}))


def test_a_file_with_another_mesh_is_refused() -> None:
    text = plan_to_json(gpipe(devices=2, microbatches=2).on_mesh({"pp": 2, "ep": 2}))
    with pytest.raises((PlanError, TextError), match="not those of the pipelines"):
        parse_plan_json(text.replace('"ep":2', '"ep":4'))
