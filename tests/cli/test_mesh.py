"""Meshes on the command line."""

import json
from pathlib import Path

import pytest

from commands import run

MESH = ("--mesh", "pp=2,ep=2", "-m", "2", "--layers", "moe*4")


def test_simulate_names_the_place_of_each_device() -> None:
    done = run("simulate", "1f1b", *MESH)
    rows = [line for line in done.stdout.splitlines() if "(pp" in line]
    assert [row[:14] for row in rows] == ["0 (pp 0, ep 0)", "1 (pp 0, ep 1)", "2 (pp 1, ep 0)", "3 (pp 1, ep 1)"]


def test_a_mesh_takes_as_long_as_one_of_its_pipelines() -> None:
    mesh, alone = (
        json.loads(run("simulate", "1f1b", *size, "-m", "4", "--layers", "moe*4", "--json").stdout)
        for size in (("--mesh", "dp=2,pp=2,ep=2"), ("--devices", "2"))
    )
    assert mesh["makespan"] == alone["makespan"]
    assert (len(mesh["devices"]), len(alone["devices"])) == (8, 2)


def test_without_layers_whole_passes_are_exchanges(tmp_path: Path) -> None:
    """So a slow device holds up all ranks that share experts with it, in a schedule as in a plan from a file."""
    (tmp_path / "costs.toml").write_text("F = 1\nI = 1\nW = 1\nslowdown = [1, 1, 1, 3]\n")
    mesh = ("1f1b", "--mesh", "pp=2,ep=2", "-m", "2")
    assert run("show", *mesh, "-o", "x.json", cwd=tmp_path).returncode == 0
    for target in (mesh, ("x.json",)):
        done = run("simulate", *target, "--costs", "costs.toml", "--json", cwd=tmp_path)
        busy = [device["busy"] for device in json.loads(done.stdout)["devices"]]
        assert busy == [6, 6, 18, 18]


@pytest.mark.parametrize("file", ["x.csv", "x.json"])
@pytest.mark.parametrize(
    ("options", "sign"),
    [
        (("--layers", "moe*8"), "0F0.combine1"),
        (("--offload", "1"), "0OFFLOAD0"),
        (("--recompute",), "0RECOMPUTE0"),
        (("--wgrad-microbatches", "2"), '"wgrad_microbatches":2'),
    ],
)
def test_the_plan_in_a_file_is_lowered_as_the_schedule_it_is_of(
    tmp_path: Path, file: str, options: tuple[str, ...], sign: str
) -> None:
    mesh = ("--mesh", "pp=2,ep=2") if file == "x.json" else ("-d", "2")
    schedule = ("interleaved", "--overlap", *mesh, "-m", "4")
    assert run("show", *schedule, "-o", file, cwd=tmp_path).returncode == 0
    made, read = (
        run("show", *target, *options, "--costs", "activation_bytes=2,recompute_bytes=1", "--json", cwd=tmp_path).stdout
        for target in (schedule, (file,))
    )
    assert json.loads(made) == json.loads(read)
    assert sign in read


def test_show_draws_a_line_for_each_place() -> None:
    done = run("show", "gpipe", "--mesh", "dp=2,pp=1", "-m", "1")
    assert done.stdout.splitlines()[:2] == ["0 (dp 0) F0──B0──────", "1 (dp 1) F1──B1──────"]


def test_waits_of_the_host_have_a_row_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text(
        "[phases]\nattn = {F = 1, I = 1, W = 1}\nmlp = {F = 1, I = 1, W = 1}\ndispatch = {F = 1, I = 1}\n"
        "combine = {F = 1, I = 1}\ncounts = {F = 1}\nsizes = {F = 1}\n"
    )
    mesh = ("--mesh", "pp=1,ep=2", "-m", "1", "--layers", "moe", "--costs", "costs.toml")
    done = run("show", "gpipe", *mesh, "--lanes", cwd=tmp_path)
    assert done.stdout.splitlines()[:3] == [
        "0 (ep 0) Computation   F0──············F0──········B0──····B0──W0──W0──",
        "0 (ep 0) Communication ····N0──····D0──····C0──C0──····D0──············",
        "0 (ep 0) Host          ········H0──····································",
    ]
    for name in ("x.svg", "x.trace.json"):
        assert run("show", "gpipe", *mesh, "-o", name, cwd=tmp_path).returncode == 0
    assert run("check", "x.trace.json", cwd=tmp_path).stdout.startswith("sound: 2 devices, 1 stages on 2 routes")


def test_a_plan_on_a_mesh_is_written_as_json_only(tmp_path: Path) -> None:
    assert run("show", "1f1b", "--mesh", "pp=2,dp=2", "-o", "x.json", cwd=tmp_path).returncode == 0
    assert json.loads((tmp_path / "x.json").read_text())["mesh"] == {"pp": 2, "dp": 2}
    assert run("check", "x.json", cwd=tmp_path).returncode == 0
    done = run("show", "1f1b", "--mesh", "pp=2,dp=2", "-o", "x.csv", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "stretto: a .csv holds no mesh; write the order as .json (got x.csv)\n",
    )


def test_compare_takes_a_mesh() -> None:
    found = json.loads(run("compare", "1f1b", "zb_h1", *MESH, "--json").stdout)
    assert [row["devices"] for row in found] == [4, 4]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--mesh", "pp=2,ep=2", "-d", "2"), "give --devices or --mesh, whose pp is the number of devices"),
        (("--mesh", "ep=2"), "--mesh has the number of pipeline devices as pp, e.g. pp=4,ep=2"),
        (("--mesh", "tp=2"), "a mesh is written as pp=4,ep=2,dp=2"),
        (("--mesh", "pp=4,dp=200000"), "is too large for the command line"),
        (("--mesh", "pp=4,dp=1000000"), "a mesh has at most 1,048,576 devices"),
    ],
)
def test_meshes_that_cannot_be_are_refused_in_one_line(words: tuple[str, ...], says: str) -> None:
    done = run("simulate", "1f1b", *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_mesh_goes_with_a_schedule(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("0F0,0B0")
    done = run("simulate", "x.csv", "--mesh", "pp=1", cwd=tmp_path)
    assert done.stderr == "stretto: x.csv has its own sizes; --devices, --mesh and the like go with a schedule's name\n"


def test_the_lines_for_meshes_in_the_example_may_be_uncommented(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "examples" / "phases.toml").read_text()
    for name in ("loads", "counts", "sizes"):
        assert f"\n# {name} = " in text
        text = text.replace(f"\n# {name} = ", f"\n{name} = ")
    (tmp_path / "costs.toml").write_text(text)
    done = run("simulate", "1f1b", *MESH, "--costs", "costs.toml", "--json", cwd=tmp_path)
    busy = [device["busy"] for device in json.loads(done.stdout)["devices"]]
    assert busy[0] > busy[1]
    assert busy[2] > busy[3]
