import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stretto

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "matplotlib", "zmq", "safetensors"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import stretto, stretto.cli.main
timeline = stretto.simulate(stretto.schedules.dualpipe(devices=4, microbatches=8))
assert stretto.check(timeline.program) == []
print(timeline.makespan)
"""


def test_the_package_works_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "26.0\n", "")


MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import stretto; stretto.Pipeline", "stretto.Pipeline needs torch: pip install 'stretto[train]'"),
        ("from stretto import cut", "stretto.cut needs torch: pip install 'stretto[train]'"),
        ("import stretto; stretto.weights.Sender", "stretto.weights needs torch: pip install 'stretto[train]'"),
        ("from stretto.weights import Sender", "stretto.weights.Sender needs torch: pip install 'stretto[train]'"),
        ("main('push', 'x', '--dry-run')", "stretto: stretto push needs torch: pip install 'stretto[train]'"),
        ("main('onegpu', 'run', 'x.py')", "stretto: stretto onegpu needs torch: pip install 'stretto[train]'"),
        ("main('show', 'gpipe', '-o', 'x.svg')", "stretto: a figure needs matplotlib: pip install 'stretto[draw]'"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(code: str, says: str, tmp_path: Path) -> None:
    command = "def main(*a):\n    from stretto.cli.main import main\n    sys.argv[1:] = a\n    main()\n"
    done = subprocess.run(
        [sys.executable, "-c", MISSING + command + code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode != 0
    line = done.stderr.splitlines()[-1].removeprefix("stretto.ir.errors.MissingPackageError: ")
    assert line == says
    assert code.startswith("main") == (len(done.stderr.splitlines()) == 1)


def test_what_needs_torch_can_be_tried_for() -> None:
    code = MISSING + "try:\n    from stretto import Pipeline\nexcept ImportError:\n    print('without')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("without\n", "")


def test_all_names_exist_once_and_are_documented() -> None:
    assert len(set(stretto.__all__)) == len(stretto.__all__)
    for name in stretto.__all__:
        assert getattr(stretto, name).__doc__, f"{name} has no docstring"


def test_what_is_not_there_is_said_so() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Pipelines'"):
        _ = stretto.Pipelines


def test_nothing_else_is_public() -> None:
    tree = ast.parse(Path(stretto.__file__).read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stretto")
        for alias in node.names
    }
    assert {name for name in imported if not name.startswith("_")} == set(stretto.__all__)


def test_every_file_begins_with_what_it_is() -> None:
    for path in Path(stretto.__file__).parent.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
