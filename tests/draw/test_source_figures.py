"""The three source figures, as `make figures` draws them: every label, and what the pictures say."""

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import stretto
from insets import draw_insets
from pictures import svg_texts
from stretto import Costs
from stretto.costs import Link, PhaseTimes
from stretto.layers import MOE
from stretto.schedules import dualpipe, interleaved, one_f_one_b

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "examples" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(figures: ModuleType, name: str, folder: Path) -> Counter[str]:
    getattr(figures, name)(folder / "figure.svg")
    return Counter(svg_texts(folder / "figure.svg"))


def test_dualpipe(figures: ModuleType, tmp_path: Path) -> None:
    found = texts(figures, "dualpipe", tmp_path)
    labels = {"Time →", "Forward", "Backward", "Backward for input", "Backward for weights"}
    assert labels | {"Overlapped forward & Backward"} | {f"Device {k}" for k in range(8)} <= set(found)
    assert {str(k) for k in range(10)} <= set(found)
    assert "10" not in found


def test_kimi_k2(figures: ModuleType, tmp_path: Path) -> None:
    found = texts(figures, "overlap", tmp_path)
    assert {"Computation", "Communication", "VPP + 1 warmup", "Time →"} <= set(found)
    assert {"Forward pass", "Backward pass", "PP communication", "EP dispatch and combine"} <= set(found)
    # A warm-up forward, a pair and a cool-down backward: attention and MLP of two forwards and two backwards.
    assert (found["Attn"], found["MLP"], found["WGrad"]) == (4, 4, 2)
    assert (found["EP-D"], found["EP-C"], found["PP"]) == (4, 4, 3)
    assert found["Offload"] > 2  # the row's own label is one
    assert found["Onload"] >= 2
    # Microbatches 1 to 8: each of two stages' passes on four devices, forward and backward.
    assert {k: found[str(k)] for k in range(10)} == {0: 0, **dict.fromkeys(range(1, 9), 16), 9: 0}


def test_weight_update(figures: ModuleType, tmp_path: Path) -> None:
    found = texts(figures, "weight_update", tmp_path)
    legend = {"H2D Buffer", "IPC Buffer", "H2D", "Reload weights", "Broadcast (src)", "Broadcast (dst)"}
    assert legend | {f"Device {k}" for k in range(4)} <= set(found)
    # Two rounds of four buckets: one copy each, and on four devices a broadcast and a reload.
    assert {k: found[str(k)] for k in range(9)} == {**dict.fromkeys(range(8), 9), 8: 0}


def test_the_committed_figures_are_those(figures: ModuleType, tmp_path: Path) -> None:
    for name in ("dualpipe", "overlap", "weight_update"):
        committed = Counter(svg_texts(ROOT / "docs" / "figures" / f"{name}.svg"))
        assert texts(figures, name, tmp_path) == committed
        assert (ROOT / "docs" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_figure_is_the_same_file_every_time(figures: ModuleType, tmp_path: Path, ending: str) -> None:
    first, second = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    figures.weight_update(first)
    figures.weight_update(second)
    assert first.read_bytes() == second.read_bytes()


def test_three_stages_have_a_second_h2d_buffer(tmp_path: Path) -> None:
    for mode in ("overlap_reload", "overlap_all"):
        timeline = stretto.simulate(stretto.weight_update(devices=2, buckets=4, mode=mode))
        stretto.draw.draw_figure(timeline, tmp_path / f"{mode}.svg")
    sizes = [
        float((tmp_path / f"{mode}.svg").read_text().split('height="')[1].split("pt")[0])
        for mode in ("overlap_reload", "overlap_all")
    ]
    assert sizes[1] > sizes[0]


def test_one_device_has_no_h2d_buffer(tmp_path: Path) -> None:
    stretto.draw.draw_figure(stretto.simulate(stretto.weight_update(devices=1, buckets=4)), tmp_path / "figure.svg")
    assert "Device 0" in svg_texts(tmp_path / "figure.svg")


def test_insets_need_a_woven_plan_and_phases(tmp_path: Path) -> None:
    woven = interleaved(devices=2, microbatches=6, overlap=True)
    plain = stretto.simulate(one_f_one_b(devices=2, microbatches=4))
    with pytest.raises(stretto.StrettoError, match="needs a warm-up forward, a pair and a cool-down backward"):
        draw_insets(plain, plain, tmp_path / "x.svg")
    with pytest.raises(stretto.StrettoError, match="needs a timeline in phases"):
        draw_insets(stretto.simulate(woven), stretto.simulate(woven), tmp_path / "x.svg")


def test_lanes_are_rows(tmp_path: Path) -> None:
    costs = Costs(
        phases={name: PhaseTimes(1, 1, 1) for name in ("attn", "mlp", "dispatch", "combine")},
        activation_bytes=1,
        host=Link(bandwidth=1),
        link=Link(latency=0.5),
    )
    plan = interleaved(devices=2, microbatches=6, overlap=True)
    program = stretto.lower(plan, layers=[[MOE]] * 4, costs=costs, offload=1, recompute=True)
    timeline = stretto.simulate(program, costs)
    stretto.draw.draw_figure(timeline, tmp_path / "figure.svg", lanes=True)
    found = Counter(svg_texts(tmp_path / "figure.svg"))
    assert (found["Device 0 Computation"], found["Device 1 Computation"], found["Communication"]) == (1, 1, 2)
    assert {"Recompute", "Expert dispatch and combine", "Pipeline transfer", "Offload", "Onload"} <= set(found)
    lines = stretto.draw_text(timeline, width=150, lanes=True).split("\n")
    assert [line[:15].strip() for line in lines] == [
        f"{device} {row}" for device in (0, 1) for row in ("Computation", "Communication", "Offload")
    ]
    assert len(set(map(len, lines))) == 1
    assert {"O", "L"} <= set(lines[2])
    assert {"D", "C"} <= set(lines[1])


def test_a_comparison_names_and_ranks(tmp_path: Path) -> None:
    timelines = {
        "1f1b": stretto.simulate(one_f_one_b(devices=4, microbatches=8)),
        "dualpipe": stretto.simulate(dualpipe(devices=4, microbatches=8)),
    }
    stretto.draw_comparison(timelines, tmp_path / "figure.svg")
    found = svg_texts(tmp_path / "figure.svg")
    assert {"1f1b: 33, 27.3% idle", "dualpipe: 26, 7.7% idle", "Forward", "Time →"} <= set(found)
