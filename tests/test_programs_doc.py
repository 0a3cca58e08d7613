"""What docs/programs.md shows is the example, and what it prints."""

import queue
import re
import subprocess
import sys
from pathlib import Path

import stretto

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "own_program.py"
DOCS = (ROOT / "docs" / "programs.md").read_text()


def test_the_page_shows_the_example() -> None:
    shown, _ = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert EXAMPLE.read_text().endswith(shown)
    assert len(shown.splitlines()) < 30


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (shown,) = re.findall(r"```text\n(.*?)```", DOCS, re.DOTALL)
    said, expected = done.stdout.splitlines(), shown.splitlines()
    assert said[0] == expected[0] == "[]"
    rows = [[re.findall("[a-z]+", line)[0] for line in lines[1:6]] for lines in (said, expected)]
    assert rows[0] == rows[1]
    assert [re.search(r"\{'load': .*'use': ", lines[-1]) is not None for lines in (said, expected)] == [True, True]
    assert (tmp_path / "own.svg").read_text().startswith("<?xml")


def test_what_is_shown_of_passing_data_runs() -> None:
    _, shown = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    values = {"work0": 3}
    program = stretto.program_of([stretto.Call("hand0", 0, "link"), stretto.Call("hand0", 1, "link")])
    exec(shown.replace("values = {}\n", ""), {"queue": queue, "stretto": stretto, "program": program, "values": values})
    assert values == {"work0": 3, "hand0": 3}
