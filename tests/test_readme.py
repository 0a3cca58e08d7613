"""The figures and tables of the README and of docs/schedules.md are true, and the demo works."""

import re
import subprocess
import sys
from pathlib import Path

import stretto
from commands import run
from doc_pages import ROOT, blocks
from stretto.costs import parse_costs_toml
from stretto.layers import EMBEDDING, LOSS, MOE, cut_layers
from stretto.schedules import interleaved, one_f_one_b

README = (ROOT / "README.md").read_text()


def test_the_drawing_is_what_show_draws() -> None:
    (first, *_) = [block.code for block in blocks("README.md") if block.language == "text"]
    assert first == run("show", "dualpipe", "--width", "82").stdout


def test_the_table_holds_simulated_figures() -> None:
    rows = re.findall(r"^\| `(\w+)(\(overlap=True\))?` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|", README, re.MULTILINE)
    assert len(rows) == 11
    for name, overlap, *figures in rows:
        plan = getattr(stretto.schedules, name)(devices=8, microbatches=32, **({"overlap": True} if overlap else {}))
        per_device = plan.stages / plan.devices
        costs = stretto.Costs(F=1, I=1, W=1).for_stages(plan.stages, devices=8)
        woven = stretto.Costs(F=1, I=1, W=1, FB=2.7).for_stages(plan.stages, devices=8)
        summary = stretto.simulate(plan, costs).summary()
        memory = max(device.peak_activations for device in summary.devices) / per_device
        assert figures == [
            f"{summary.makespan:g}",
            f"{stretto.simulate(plan, woven).makespan:g}",
            f"{summary.bubble_ratio:.1%}",
            f"{memory:g}",
        ]


def test_the_tables_have_every_schedule() -> None:
    docs = (ROOT / "docs" / "schedules.md").read_text()
    for text in (README, docs):
        assert set(re.findall(r"^\| `(\w+)(?:\(.*?\))?` \|", text, re.MULTILINE)) >= set(stretto.schedules.SCHEDULES)


def test_the_woven_figures_are_simulated() -> None:
    costs = parse_costs_toml((ROOT / "examples" / "phases.toml").read_text())
    said = re.search(r"1F1B leaves (\S+) of a step of (\S+)\s.*?woven order (\S+) of (\S+)\.\n", README, re.DOTALL)
    figures = []
    for plan in (
        one_f_one_b(devices=4, microbatches=16),
        interleaved(devices=4, microbatches=16, overlap=True),
    ):
        layers = cut_layers([EMBEDDING, *[MOE] * 14, LOSS], stages=plan.stages)
        program = stretto.lower(plan, layers=layers, costs=costs)
        summary = stretto.simulate(program, costs).summary()
        figures += [f"{max(device.exposed_comm for device in summary.devices):.6g}", f"{summary.makespan:.6g}"]
    assert said is not None
    assert list(said.groups()) == figures


def test_the_costs_of_the_docs_can_be_read() -> None:
    text = (ROOT / "docs" / "schedules.md").read_text()
    (table,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    costs = parse_costs_toml(table)
    assert set(costs.shared) == {"pcie", "cores"}


def test_the_demo_draws_trains_pushes_and_generates(tmp_path: Path) -> None:
    demo = ROOT / "examples" / "demo.py"
    done = subprocess.run([sys.executable, str(demo)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) <= 40
    losses = [float(found) for found in re.findall(r"^train .* loss (\S+)$", done.stdout, re.MULTILINE)]
    served = re.findall(r"^generate .* serves (\S+): +(\d+)% right", done.stdout, re.MULTILINE)
    assert losses[0] > losses[1]
    assert [version for version, _ in served] == ["seed-0"] * 2 + ["step-8"] * 2 + ["step-16"] * 2
    assert int(served[-1][1]) > int(served[0][1])
    assert done.stdout.count("running engines in ") == done.stdout.count(": delivered") == 2
    drawn = {f"out/{path.name}" for path in (tmp_path / "out").glob("*.png")}
    assert len(drawn) == 6
    assert drawn <= {line.split(" ")[0] for line in done.stdout.splitlines()}
