import re
from collections import Counter
from pathlib import Path

import pytest

import stretto
from pictures import svg_texts


@pytest.fixture(scope="module")
def dualpipe() -> stretto.Timeline:
    return stretto.simulate(stretto.dualpipe(devices=8, microbatches=20))


def test_dualpipe_has_every_label_of_the_papers_figure(dualpipe: stretto.Timeline, tmp_path: Path) -> None:
    stretto.draw_figure(dualpipe, tmp_path / "figure.svg")
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
        for row in stretto.dualpipe(devices=8, microbatches=20).rows
        for slot in row
        for microbatch in (
            [slot.forward.microbatch, slot.backward.microbatch] if isinstance(slot, stretto.Pair) else [slot.microbatch]
        )
        if microbatch < 10
    )
    assert {text: count for text, count in texts.items() if re.fullmatch(r"\d+", text)} == cells


def test_the_up_flow_can_be_numbered_too(dualpipe: stretto.Timeline, tmp_path: Path) -> None:
    stretto.draw_figure(dualpipe, tmp_path / "figure.svg", number_up_flow=True)
    assert {str(k) for k in range(20)} <= set(svg_texts(tmp_path / "figure.svg"))


def test_cells_are_as_wide_as_their_tasks(tmp_path: Path) -> None:
    timeline = stretto.simulate(stretto.gpipe(devices=1, microbatches=1), stretto.Costs(F=1, B=3))
    stretto.draw_figure(timeline, tmp_path / "figure.svg")
    widths: dict[str, float] = {}
    text = (tmp_path / "figure.svg").read_text()
    shapes = dict(re.findall(r'<path id="(\w+)" d="([^"]+)"', text))
    for shape, fill in re.findall(r'<use xlink:href="#(\w+)"[^>]*fill: (#\w+)', text):
        across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", shapes[shape])]
        widths[fill] = max(across) - min(across)
    assert widths["#2e8b57"] == pytest.approx(3 * widths["#f5a742"], rel=1e-3)


def test_a_large_plan_shows_colours_without_numbers(tmp_path: Path) -> None:
    stretto.draw_figure(stretto.simulate(stretto.gpipe(devices=4, microbatches=400)), tmp_path / "figure.svg")
    assert not [text for text in svg_texts(tmp_path / "figure.svg") if text.isdigit()]


def test_png(dualpipe: stretto.Timeline, tmp_path: Path) -> None:
    stretto.draw_figure(dualpipe, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
