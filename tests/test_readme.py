"""What the README shows is what happens."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import stretto
from stretto.costs import parse_costs_toml
from stretto.layers import EMBEDDING, LOSS, MOE, cut_layers
from stretto.schedules import dualpipe, interleaved, one_f_one_b

README = (Path(__file__).parent.parent / "README.md").read_text()


def block(language: str, index: int) -> str:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)[index]


def test_the_drawing_is_what_show_draws() -> None:
    timeline = stretto.simulate(dualpipe(devices=4, microbatches=8))
    assert block("text", 0) == stretto.draw_text(timeline, width=82) + "\n"


def test_the_example_prints_what_it_says() -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(block("python", 0), {})
    assert output.getvalue() == block("text", 1)


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
    docs = (Path(__file__).parent.parent / "docs" / "schedules.md").read_text()
    for text in (README, docs):
        assert set(re.findall(r"^\| `(\w+)(?:\(.*?\))?` \|", text, re.MULTILINE)) >= set(stretto.schedules.SCHEDULES)


def test_the_schedule_of_the_contributors_guide_is_sound() -> None:
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    try:
        exec(code, {})
        plan = stretto.schedules.SCHEDULES["last_first"].make(devices=3, microbatches=4)
    finally:
        stretto.schedules.SCHEDULES.pop("last_first", None)
    assert stretto.check(plan) == []


def test_the_woven_figures_are_simulated() -> None:
    costs = parse_costs_toml((Path(__file__).parent.parent / "examples" / "phases.toml").read_text())
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


def test_the_examples_of_the_docs_print_what_they_say() -> None:
    text = (Path(__file__).parent.parent / "docs" / "schedules.md").read_text()
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    for code, printed in examples:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, {})
        assert output.getvalue() == printed


def test_the_costs_of_the_docs_can_be_read() -> None:
    text = (Path(__file__).parent.parent / "docs" / "schedules.md").read_text()
    (table,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    costs = parse_costs_toml(table)
    assert set(costs.shared) == {"pcie", "cores"}


def test_the_demo_draws_trains_pushes_and_generates(tmp_path: Path) -> None:
    demo = Path(__file__).parent.parent / "examples" / "demo.py"
    done = subprocess.run([sys.executable, str(demo)], cwd=tmp_path, capture_output=True, text=True, timeout=240)
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


def test_every_linked_file_exists() -> None:
    root = Path(__file__).parent.parent
    documents = [
        root / "README.md",
        root / "CONTRIBUTING.md",
        *root.glob("docs/*.md"),
        *root.glob("benchmarks/*/README.md"),
    ]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
