import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stretto
from pictures import DrawnFigure, svg_texts
from strategies import SCHEDULES
from stretto import Costs, Timeline
from stretto.costs import Link, PhaseTimes
from stretto.draw.memory import curves_of, paint_curves
from stretto.layers import MOE
from stretto.schedules import Pair, dualpipev, gpipe


@pytest.fixture(scope="module")
def dualpipe() -> stretto.Timeline:
    return stretto.simulate(stretto.schedules.dualpipe(devices=8, microbatches=20))


def test_dualpipe_has_every_label_of_the_papers_figure(dualpipe: stretto.Timeline, tmp_path: Path) -> None:
    stretto.draw.draw_figure(dualpipe, tmp_path / "figure.svg")
    texts = Counter(svg_texts(tmp_path / "figure.svg"))
    assert {f"Device {device}" for device in range(8)} <= set(texts)
    assert {
        "Time →",
        "Forward",
        "Backward",
        "Backward for input",
        "Backward for weights",
        "Overlapped forward & Backward",
    } <= set(texts)
    # Down-flow passes are numbered 0–9 on every device, F and B or I and W each; up-flow ones are not.
    cells = Counter(
        str(microbatch)
        for row in stretto.schedules.dualpipe(devices=8, microbatches=20).rows
        for cell in row
        for microbatch in (
            [cell.forward.microbatch, cell.backward.microbatch] if isinstance(cell, Pair) else [cell.microbatch]
        )
        if microbatch < 10
    )
    assert {text: count for text, count in texts.items() if re.fullmatch(r"\d+", text)} == cells


def test_the_up_flow_can_be_numbered_too(dualpipe: stretto.Timeline, tmp_path: Path) -> None:
    stretto.draw.draw_figure(dualpipe, tmp_path / "figure.svg", number_up_flow=True)
    assert {str(k) for k in range(20)} <= set(svg_texts(tmp_path / "figure.svg"))


def test_cells_are_as_wide_as_their_tasks(tmp_path: Path) -> None:
    timeline = stretto.simulate(gpipe(devices=1, microbatches=1), stretto.Costs(F=1, B=3))
    stretto.draw.draw_figure(timeline, tmp_path / "figure.svg")
    widths: dict[str, float] = {}
    text = (tmp_path / "figure.svg").read_text()
    shapes = dict(re.findall(r'<path id="(\w+)" d="([^"]+)"', text))
    for shape, fill in re.findall(r'<use xlink:href="#(\w+)"[^>]*fill: (#\w+)', text):
        across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", shapes[shape])]
        widths[fill] = max(across) - min(across)
    assert widths["#2e8b57"] == pytest.approx(3 * widths["#f5a742"], rel=1e-3)


def test_a_large_plan_shows_colours_without_numbers(tmp_path: Path) -> None:
    stretto.draw.draw_figure(stretto.simulate(gpipe(devices=4, microbatches=400)), tmp_path / "figure.svg")
    assert not [text for text in svg_texts(tmp_path / "figure.svg") if text.isdigit()]


def test_png(dualpipe: stretto.Timeline, tmp_path: Path) -> None:
    stretto.draw.draw_figure(dualpipe, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> type[DrawnFigure]:
    monkeypatch.setattr("matplotlib.figure.Figure", DrawnFigure)
    monkeypatch.delattr(DrawnFigure, "cut_off", raising=False)
    return DrawnFigure


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_nothing_is_cut_off(
    name: str, devices: int, microbatches: int, drawn: type[DrawnFigure], tmp_path: Path
) -> None:
    timeline = stretto.simulate(SCHEDULES[name].make(devices=devices, microbatches=microbatches))
    for ending in ("svg", "png") if devices == 2 else ("svg",):
        stretto.draw.draw_figure(timeline, tmp_path / f"figure.{ending}")
        assert drawn.cut_off == []


def in_lanes() -> Timeline:
    """All that a legend can have."""
    costs = Costs(
        phases={name: PhaseTimes(1, 1, 1) for name in ("attn", "mlp", "dispatch", "combine")},
        activation_bytes=1,
        host=Link(bandwidth=1),
        link=Link(latency=0.5),
    )
    plan = dualpipev(devices=1, microbatches=4)
    return stretto.simulate(stretto.lower(plan, layers=[[MOE]] * 2, costs=costs, offload=1, recompute=True), costs)


def test_nothing_of_a_long_legend_is_cut_off(drawn: type[DrawnFigure], tmp_path: Path) -> None:
    stretto.draw.draw_figure(in_lanes(), tmp_path / "lanes.svg", lanes=True)
    assert drawn.cut_off == []
    stretto.draw_comparison({"lanes": in_lanes()}, tmp_path / "comparison.svg")
    assert drawn.cut_off == []
    stretto.draw.draw_figure(stretto.simulate(stretto.weight_update(devices=2, buckets=2)), tmp_path / "update.svg")
    assert drawn.cut_off == []


SIZES = Costs(F=1, I=1, W=1, activation_bytes=2e9, parameter_bytes=[4e9, 1e9])


def with_memory(*, counted: bool) -> Timeline:
    timeline = stretto.simulate(gpipe(devices=2, microbatches=3), SIZES)
    sizes = 5e9 + 1e9 * timeline.program.device - 1e8 * timeline.program.work.microbatch
    return replace(timeline, allocated=sizes) if counted else timeline


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize(
    ("counted", "costs", "peaks"),
    [
        (True, SIZES, ["Peak 5 GB allocated, 10 GB held", "Peak 6 GB allocated, 7 GB held"]),
        (True, None, ["Peak 5 GB allocated", "Peak 6 GB allocated"]),
        (False, SIZES, ["Peak 10 GB held", "Peak 7 GB held"]),
    ],
)
def test_memory_has_a_row_under_those_of_each_device(
    counted: bool, costs: Costs | None, peaks: list[str], lanes: bool, drawn: type[DrawnFigure], tmp_path: Path
) -> None:
    timeline = with_memory(counted=counted)
    timeline.save(tmp_path / "figure.svg", costs=costs, lanes=lanes, memory=True)
    assert drawn.cut_off == []
    texts = svg_texts(tmp_path / "figure.svg")
    rows = [text for text in texts if text.startswith(("Device", "Peak"))]
    computes = "Device 0 Computation" if lanes else "Device 0"
    assert rows == [computes, peaks[0], computes.replace("0", "1"), peaks[1]]
    assert ("Bytes allocated" in texts) == counted
    assert ("Bytes held, by the costs" in texts) == (costs is not None)


def test_curves_of_all_devices_are_on_one_scale() -> None:
    from matplotlib.figure import Figure

    curves = curves_of(with_memory(counted=True), SIZES)
    assert [(curve.device, curve.word) for curve in curves] == [
        (0, "allocated"),
        (1, "allocated"),
        (0, "held"),
        (1, "held"),
    ]
    axes = Figure().subplots()
    paint_curves(axes, curves, rows=2, length=15.0)
    for line, curve in zip(axes.lines, curves, strict=True):
        time, height = line.get_xdata(), line.get_ydata()
        bottom = 2 * (curve.device + 1) - 0.06
        assert np.allclose((bottom - height[:-1]) / 0.88, curve.bytes / 10e9)  # the most that any device has
        assert time[-1] == 15.0
        assert height[-1] == height[-2]
        assert np.array_equal(time[:-1], curve.time)
        assert line.get_linestyle() == ("-" if curve.word == "allocated" else "--")


def test_a_figure_without_memory_does_not_show_what_was_recorded(tmp_path: Path) -> None:
    for counted in (False, True):
        with_memory(counted=counted).save(tmp_path / f"{counted}.svg", costs=SIZES)
    assert (tmp_path / "True.svg").read_bytes() == (tmp_path / "False.svg").read_bytes()


def test_memory_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(stretto.StrettoError, match="no allocated bytes were recorded, and the costs name none"):
        with_memory(counted=False).save(tmp_path / "x.svg", memory=True)
    update = stretto.simulate(stretto.weight_update(devices=2, buckets=2))
    with pytest.raises(stretto.StrettoError, match="a figure of a weight update has no memory"):
        update.save(tmp_path / "x.svg", memory=True)


def test_a_legend_in_several_lines_takes_nothing_from_the_rows(tmp_path: Path) -> None:
    """Its own lines make the figure taller."""
    heights = []
    for plan in (
        gpipe(devices=4, microbatches=2),
        stretto.schedules.dualpipe(devices=4, microbatches=8),
    ):
        stretto.draw.draw_figure(stretto.simulate(plan), tmp_path / "figure.svg")
        heights.append(float((tmp_path / "figure.svg").read_text().split('height="')[1].split("pt")[0]))
    assert heights[1] > heights[0]


@pytest.mark.parametrize(
    ("costs", "unit"),
    [
        (Costs(), "units"),
        (Costs(unit="s", F=1, I=1, W=1), "s"),
        (Costs(unit="s", F=1e-3, I=1e-3, W=1e-3), "ms"),
        (Costs(unit="s", F=1e-6, I=1e-6, W=1e-6), "µs"),
    ],
)
def test_time_has_an_axis_with_its_unit(costs: Costs, unit: str, tmp_path: Path) -> None:
    timeline = stretto.simulate(gpipe(devices=2, microbatches=2), costs)
    for draw in (stretto.draw.draw_figure, lambda one, path: stretto.draw_comparison({"one": one}, path)):
        draw(timeline, tmp_path / "figure.svg")
        assert {"Time →", f"0 {unit}", f"4 {unit}", f"8 {unit}"} <= set(svg_texts(tmp_path / "figure.svg"))


def test_a_step_in_seconds_is_drawn_as_wide_as_one_without_a_unit(tmp_path: Path) -> None:
    sizes = []
    for costs in (Costs(F=1, B=2), Costs(F=0.001, B=0.002, unit="s")):
        stretto.draw.draw_figure(stretto.simulate(gpipe(devices=4, microbatches=24), costs), tmp_path / "x.svg")
        found = re.search(r'<svg[^>]* width="([\d.]+)pt"', (tmp_path / "x.svg").read_text())
        assert found is not None
        sizes.append(float(found[1]))
    assert 0.5 < sizes[1] / sizes[0] < 1.1  # the middle of what tasks take is at most a backward


def test_seconds_and_times_without_a_unit_have_no_common_scale(tmp_path: Path) -> None:
    plan = gpipe(devices=2, microbatches=2)
    timelines = {str(unit): stretto.simulate(plan, Costs(unit=unit, F=1, I=1, W=1)) for unit in ("s", None)}
    with pytest.raises(stretto.StrettoError, match="cannot be drawn on one scale"):
        stretto.draw_comparison(timelines, tmp_path / "figure.svg")


def test_paths_are_text_too_and_other_kinds_are_refused(dualpipe: stretto.Timeline, tmp_path: Path) -> None:
    stretto.draw.draw_figure(dualpipe, str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").exists()
    with pytest.raises(stretto.StrettoError, match=r"a figure is an .svg or a .png \(got .*a.pdf\)"):
        stretto.draw.draw_figure(dualpipe, str(tmp_path / "a.pdf"))


def test_a_weight_update_is_not_called_idle() -> None:
    timeline = stretto.simulate(stretto.weight_update(devices=2, buckets=4))
    with pytest.raises(stretto.StrettoError, match="a weight update computes nothing"):
        timeline.summary()
