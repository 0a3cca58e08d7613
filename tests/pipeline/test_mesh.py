"""A mesh of pipelines trains what one process would: losses, gradients, norms, loads, states, under every schedule."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devices import DEVICE, device_ranks
from mesh_jobs import (
    beside,
    cut_models,
    evaluated,
    kept_alive,
    losses_of_steps,
    mixed,
    refused,
    repeated,
    saved_and_loaded,
    trained,
    uneven,
    waits,
)
from ranks import Ranks
from stretto import Memory

MESHES = [
    {"pp": 2, "ep": 2, "dp": 1},
    {"pp": 2, "ep": 1, "dp": 2},
    {"pp": 1, "ep": 2, "dp": 2},
    {"pp": 4, "ep": 1, "dp": 1},
]
SCHEDULES = ["dualpipe", "dualpipev", "interleaved", "zb_v"]


MIXED = Memory(sites={"*norm": "recompute", "*.experts": "recompute", "*": "offload"}, min_bytes=0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = device_ranks(8)
    yield started
    started.stop()


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes.values())))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_one_backward_over_the_batches_of_all(ranks: Ranks, schedule: str, sizes: dict[str, int]) -> None:
    if schedule == "dualpipe" and sizes["pp"] == 1:
        schedule = "one_f_one_b"  # DualPipe needs two devices
    assert ranks.run(trained, 4, sizes, schedule, {"mtp": True, "balance": True}, {}) == [[]] * 4


def test_so_it_is_on_eight_ranks(ranks: Ranks) -> None:
    sizes = {"dp": 2, "pp": 2, "ep": 2}
    assert ranks.run(trained, 8, sizes, "dualpipe", {"balance": True}, {}) == [[]] * 8


@pytest.mark.parametrize("more", [{"checkpoint": True}, {"recompute": ["*norm", "*experts"]}, {"dynamic_shapes": True}])
def test_recomputation_and_changing_shapes_change_nothing(ranks: Ranks, more: dict[str, object]) -> None:
    assert ranks.run(trained, 4, {"ep": 2, "pp": 2}, "interleaved", {}, more) == [[]] * 4


@pytest.mark.parametrize(
    "how", ["one expert", "one rank", "one token", "constant", "a replica", "unused", "unused gradients"]
)
@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2}, {"ep": 4}], ids=str)
def test_uneven_loads_are_exact(ranks: Ranks, sizes: dict[str, int], how: str) -> None:
    assert ranks.run(uneven, 4, sizes, how, {}) == [[]] * 4


@pytest.mark.parametrize(
    ("kind", "schedule"), [("deepseek_v3", "dualpipev"), ("mixtral", "zb_v"), ("qwen3_moe", "dualpipe")]
)
@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_cut_models_share_out_their_experts_too(ranks: Ranks, kind: str, schedule: str, sizes: dict[str, int]) -> None:
    assert ranks.run(cut_models, 4, sizes, schedule, kind) == [[]] * 4


@pytest.mark.parametrize(
    ("first", "second", "schedules"),
    [
        ({"pp": 2, "ep": 2}, {"pp": 1, "ep": 4}, ("interleaved", "gpipe")),
        ({"ep": 2, "dp": 2}, {"pp": 4}, ("gpipe", "zb_h1")),
        ({"pp": 2, "dp": 2}, {"dp": 1, "ep": 2, "pp": 2}, ("dualpipe", "dualpipev")),
    ],
    ids=str,
)
def test_checkpoints_go_from_any_mesh_and_plan_to_any_other(
    ranks: Ranks, tmp_path: Path, first: dict[str, int], second: dict[str, int], schedules: tuple[str, str]
) -> None:
    results = ranks.run(saved_and_loaded, 4, str(tmp_path / "saved"), first, second, schedules)
    assert [wrong for wrong, _ in results] == [[]] * 4
    assert any(compared for _, compared in results)


@pytest.mark.parametrize(
    ("what", "sizes", "says"),
    [
        ("dense", {"pp": 1, "ep": 2}, "the mesh has ep=2, but no layer has experts (stretto.moe.Experts) to share out"),
        ("plan", {"pp": 1, "dp": 2}, "the plan is for 2 devices, but the mesh has pp=1 (pp=1,dp=2)"),
        ("another mesh", {"pp": 1, "dp": 2}, "the plan is for a mesh of pp=1,dp=5, but the mesh is pp=1,dp=2"),
        ("program of a pipeline", {"dp": 2}, "the program is for 1 devices, but the mesh has pp=1 (dp=2)"),
        ("names", {"dp": 2}, "mesh has 2 dimensions (tp, pp); a pipeline takes"),
        ("experts", {"ep": 2}, "9 experts cannot be divided among 2 ranks"),
        ("exchange", {"ep": 2}, "exchange is a function that makes an exchange for experts"),
        ("mean", {"dp": 2}, "were given targets of 8 and of 16 rows, and the loss is a mean"),
        ("frozen", {"ep": 2}, "hold the same parameters, but not the same of them are trained"),
        ("calls", {"ep": 2}, "all ranks must call "),
        ("shared experts", {"pp": 2}, "nothing"),
        ("shared experts", {"ep": 2}, "share experts, which cannot be divided among expert-parallel ranks"),
        ("shared parameters", {"ep": 2}, "share experts, which cannot be divided among expert-parallel ranks"),
        ("tied experts", {"ep": 2}, "are tied experts, which cannot be divided among expert-parallel ranks"),
        ("another exchange", {"ep": 2}, "rank 1 was given another exchange than rank 0"),
        ("no exchange", {"ep": 2}, "count"),
        ("other mesh", {"ep": 2}, "already, and cannot become share"),
        ("other experts", {"ep": 2}, "which is not how they are shared out here"),
        ("moments", {"ep": 2}, "the optimizer's state 'flat' of "),
        ("shape", {"ep": 2}, "but there are 8 experts; give those of all ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_a_mesh_cannot_do_is_refused_on_all_ranks(
    ranks: Ranks, what: str, sizes: dict[str, int], says: str
) -> None:
    told = ranks.run(refused, 2, sizes, what)
    assert all(says in text or "rank" in text for text in told), told
    assert any(says in text for text in told), told


@pytest.mark.skipif(DEVICE.type != "cuda", reason="hosts wait for devices only")
@pytest.mark.parametrize("policy", ["none", MIXED], ids=["kept", "mixed"])
@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev", "zb_v"])
def test_hosts_wait_for_the_sizes_of_exchanges_and_for_nothing_else(ranks: Ranks, schedule: str, policy: Any) -> None:
    results = ranks.run(waits, 4, {"pp": 2, "ep": 2}, schedule, policy)
    assert any(counted for _, counted in results)  # on a rank that has no experts there are none
    for waited, counted in results:
        assert waited == ["the numbers of rows that other ranks send"] * counted


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev"])
def test_the_same_step_has_the_same_loss(ranks: Ranks, schedule: str) -> None:
    """On a GPU, a lane must not get memory that another lane still reads."""
    losses = [loss for found in ranks.run(losses_of_steps, 4, {"pp": 2, "ep": 2}, schedule, 10) for loss in found]
    assert len(set(losses)) == 1, losses


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a device, what was used is let go in the step")
def test_what_forwards_read_and_make_is_kept(ranks: Ranks) -> None:
    ((kept, used),) = ranks.run(kept_alive, 1)
    assert kept == used


@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_steps_are_recorded_and_programs_run_again(ranks: Ranks, sizes: dict[str, int]) -> None:
    assert ranks.run(repeated, 4, sizes) == [[]] * 4


def test_meshes_train_beside_each_other(ranks: Ranks) -> None:
    losses = [loss for loss, _ in ranks.run(beside, 4)]
    assert len(set(losses)) == 1


def test_ranks_that_run_different_experts_are_told(ranks: Ranks) -> None:
    for text in ranks.run(mixed, 4, {"pp": 2, "ep": 2}):
        assert "other experts" in text, text


def test_experts_of_two_stages_are_not_divided(ranks: Ranks) -> None:
    for text in ranks.run(refused, 4, {"pp": 2, "ep": 2}, "shared experts"):
        assert "share experts, which cannot be divided among expert-parallel ranks" in text


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_pipelines_evaluate_batches_of_different_sizes_by_counts(ranks: Ranks, sizes: dict[str, int]) -> None:
    assert ranks.run(evaluated, 4, sizes, True) == [""] * 4
    for text in ranks.run(evaluated, 4, sizes, False):
        assert "given batches of different sizes" in text
