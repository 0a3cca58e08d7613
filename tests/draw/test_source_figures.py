"""The figures that `make figures` draws, the three sources' and a measured one: every label, and what they say."""

import gzip
import importlib.util
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import stretto
from cells import extent, first_pipeline, spans_of
from insets import draw_insets
from pictures import DrawnFigure, svg_texts
from stretto import Costs, Plan, Timeline
from stretto.costs import Link, PhaseTimes
from stretto.layers import EXPERT_PARALLEL_MOE, MOE
from stretto.program.task import Kind
from stretto.schedules import Pair, dualpipe, interleaved, one_f_one_b
from stretto.timeline.trace import parse_trace

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


def test_kimi_k2_measured(figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.figure.Figure", DrawnFigure)
    found = texts(figures, "overlap_measured", tmp_path)
    assert DrawnFigure.cut_off == []
    # Each of three cells is shown twice, as measured and as simulated.
    assert (found["Computation"], found["Communication"]) == (2, 2)
    assert found["Offload"] >= 2 + 4  # two of them are labels of rows
    assert found["Onload"] >= 2
    assert min(found[name] for name in ("Attn", "MLP", "EP-D", "EP-C", "WGrad")) >= 3
    assert found["PP"] >= 2
    assert {"Device 0", "Device 1", "VPP + 1 warmup", "Time →"} <= set(found)
    titles = [text for text in found.elements() if re.fullmatch(r"(measured|simulated) \d.*", text)]
    errors = [title for title in titles if re.fullmatch(r"simulated \S+ ms \([+−]\d+\.\d%\)", title)]
    assert (len(titles), len(errors)) == (6, 3)
    (step,) = (text for text in found if text.startswith("Step"))
    assert re.fullmatch(r"Step: measured \S+ m?s, simulated \S+ m?s \([+−]\d+\.\d%\)", step)


def test_the_recorded_step_ran_the_plan_that_is_drawn(figures: ModuleType) -> None:
    timeline = parse_trace(gzip.decompress(figures.RECORDING.read_bytes()).decode())
    rows = first_pipeline(figures.recorded_plan(timeline))
    spans = spans_of(timeline, [cell for row in rows for cell in row])
    compute = {cell: [span for span in own if span.task.lane.name == "compute"] for cell, own in spans.items()}
    for row in rows:
        starts, ends = zip(*(extent(compute[cell]) for cell in row), strict=True)
        assert all(end <= start + 1e-5 for end, start in zip(ends, starts[1:], strict=False))
    changes = [
        sum((a.task.kind is Kind.F) != (b.task.kind is Kind.F) for a, b in pairwise(own))
        for cell, own in compute.items()
        if isinstance(cell, Pair)
    ]
    assert min(changes) >= 2  # one pass after the other would change once


def test_weight_update(figures: ModuleType, tmp_path: Path) -> None:
    found = texts(figures, "weight_update", tmp_path)
    legend = {"H2D Buffer", "IPC Buffer", "H2D", "Reload weights", "Broadcast (src)", "Broadcast (dst)"}
    assert legend | {f"Device {k}" for k in range(4)} <= set(found)
    # Two rounds of four buckets: one copy each, and on four devices a broadcast and a reload.
    assert {k: found[str(k)] for k in range(9)} == {**dict.fromkeys(range(8), 9), 8: 0}


def test_the_committed_figures_are_those(figures: ModuleType, tmp_path: Path) -> None:
    for name in ("dualpipe", "overlap", "overlap_measured", "weight_update"):
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
    woven, plain = interleaved(devices=2, microbatches=6, overlap=True), one_f_one_b(devices=2, microbatches=4)
    timeline = stretto.simulate(woven)
    with pytest.raises(stretto.StrettoError, match="needs a warm-up forward, a pair and a cool-down backward"):
        draw_insets(plain, stretto.simulate(plain), {"": stretto.simulate(plain)}, tmp_path / "x.svg")
    with pytest.raises(stretto.StrettoError, match="needs a timeline in phases"):
        draw_insets(woven, timeline, {"": timeline}, tmp_path / "x.svg")
    with pytest.raises(stretto.StrettoError, match="not one of the plan: nothing computes 2F0"):
        draw_insets(woven, stretto.simulate(plain), {"": timeline}, tmp_path / "x.svg")


def woven_on_mesh() -> tuple[Plan, Timeline]:
    """A forward takes 5 ms: 1 each for attention, counts, dispatch, MLP and combine."""
    time = PhaseTimes(F=0.001, I=0.001, W=0.001)
    costs = Costs(
        phases={"attn": time, "mlp": time} | dict.fromkeys(("counts", "dispatch", "combine"), time),
        link=Link(latency=0.0001),
        unit="s",
    )
    plan = interleaved(devices=2, microbatches=6, overlap=True).on_mesh({"pp": 2, "ep": 2})
    program = stretto.lower(plan, layers=[[EXPERT_PARALLEL_MOE]] * 4, experts=range(4), costs=costs)
    return plan, stretto.simulate(program, costs)


def test_insets_name_times_and_errors(tmp_path: Path) -> None:
    plan, timeline = woven_on_mesh()
    faster = Timeline(timeline.program, 0.9 * timeline.start, 0.9 * timeline.end)
    draw_insets(plan, timeline, {"measured": timeline, "simulated": faster}, tmp_path / "x.svg")
    found = svg_texts(tmp_path / "x.svg")
    assert {"measured 5 ms", "simulated 4.5 ms (−10.0%)", "EP-N", "0 ms", "2 ms"} <= set(found)
    assert sum("(−10.0%)" in text for text in found) == 4  # three cells and the step
    assert {text for text in found if text.startswith("Device")} == {"Device 0", "Device 1"}
    assert found.count("6") == 8  # two stages on each of two devices, forward and backward
    assert "7" not in found  # the second pipeline's first microbatch


def test_waiting_for_the_other_end_is_not_shown() -> None:
    plan, timeline = woven_on_mesh()
    cell = plan.rows[0][0]
    send = next(k for k, span in enumerate(timeline.spans()) if str(span.task) == "0SEND_F0")
    dispatch = next(k for k, span in enumerate(timeline.spans()) if str(span.task) == "0F0.dispatch0")
    waited = timeline.start.copy()
    waited[[send, dispatch]] -= 0.0005
    times = [
        [(span.start, span.end) for span in spans_of(shown, [cell])[cell]]
        for shown in (timeline, Timeline(timeline.program, waited, timeline.end))
    ]
    assert times[0] == times[1]


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
