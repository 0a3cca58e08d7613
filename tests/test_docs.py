"""The code in README, CONTRIBUTING and docs runs, and prints what the pages show."""

import os
import pkgutil
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import stretto
from commands import run
from doc_jobs import run_fragment
from doc_names import problems
from doc_pages import ADDRESSES, PAGES, ROOT, Block, blocks, differences, parse_command, run_python
from ranks import Ranks
from stretto.weights import Receiver, Sender

SECONDS = 120.0
TUTORIAL = "docs/tutorial.md"


@dataclass(frozen=True, slots=True)
class How:
    """How a block of Python runs; without this, in this process, with the names of the page's earlier blocks."""

    ranks: int = 0
    given: str = ""
    """The names that it may use, from doc_jobs."""
    not_run: str = ""
    """Why it is only read."""
    readers: dict[str, type | None] = field(default_factory=dict)
    """The names that it uses and does not make, with their classes, if it is only read."""


SENDER = {"sender": Sender, "model": None}
HOW = {
    ("README.md", "pipe = stretto.Pipeline("): How(ranks=4, given="training"),
    ("README.md", "sender = stretto.weights.Sender("): How(ranks=1, given="pushing"),
    ("docs/training.md", "import torch, stretto"): How(ranks=4, given="training"),
    ("docs/training.md", "def accuracy("): How(ranks=4, given="evaluating"),
    ("docs/training.md", "stretto.cut(model)"): How(ranks=4, given="language_model"),
    ("docs/training.md", "dcp.save(state_of("): How(ranks=2, given="checkpointing"),
    ("docs/training.md", "save_pretrained(whole,"): How(ranks=2, given="trained_model"),
    ("docs/training.md", "model.save_pretrained("): How(ranks=2, given="trained_cut_model"),
    ("docs/training.md", "the norm before clipping"): How(ranks=4, given="training"),
    ("docs/training.md", "masters = "): How(ranks=4, given="training"),
    ("docs/training.md", "my_tokens"): How(ranks=4, given="data_parallel"),
    ("docs/training.md", '"mlp.swiglu"'): How(ranks=2, given="own_model"),
    ("docs/training.md", 'memory={"*": "recompute"})'): How(ranks=4, given="training"),
    ("docs/training.md", 'memory="auto")'): How(ranks=2, given="choosing"),
    ("docs/training.md", "timelines = []"): How(ranks=2, given="measured"),
    ("docs/training.md", "described = "): How(ranks=2, given="predicted"),
    ("docs/training.md", "timeline.host_late()"): How(ranks=1, given="recorded"),
    ("docs/training.md", "after-step-"): How(ranks=2, given="failing"),
    ("docs/weights.md", "into=model.state_dict()"): How(ranks=1, given="pushing_a_model"),
    ("docs/weights.md", "fully_shard(model)"): How(ranks=2, given="sharding"),
    ("docs/weights.md", "server.init()"): How(not_run="needs vLLM", readers=SENDER),
    ("docs/weights.md", "CheckpointEngineWorkers("): How(not_run="needs vLLM", readers=SENDER),
    ("docs/weights.md", "SglangServer("): How(not_run="needs SGLang", readers=SENDER),
    ("docs/onegpu.md", "import stretto.onegpu"): How(not_run="needs a GPU"),
}
MEASURED = {("docs/programs.md", "time.sleep(")}
"""Blocks whose output shows times."""
PARSED = {"stretto doctor": "takes two minutes", "stretto onegpu": "needs a GPU"}
"""Commands that are not run."""


def found(page: str, snippet: str) -> Block:
    (block,) = [block for block in blocks(page) if block.language == "python" and snippet in block.code]
    return block


def of_table(wanted: Callable[[How], bool]) -> list[Any]:
    return [pytest.param(key, how, id=f"{key[0]}: {key[1]}") for key, how in HOW.items() if wanted(how)]


def compare(block: Block, printed: str, *, measured: bool = False) -> None:
    if block.shown is not None:
        assert differences(block.shown, printed, measured=measured) == [], str(block)


# Code that is complete runs in this process, page by page.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a page's code runs: it has what readers have."""
    schedules = dict(stretto.schedules.SCHEDULES)
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    stretto.schedules.zb_h1(devices=2, microbatches=4).save(tmp_path / "plan.csv")
    (tmp_path / "checkpoint").mkdir()
    save_file({"w": torch.ones(512, 8)}, tmp_path / "checkpoint" / "model.safetensors")
    yield tmp_path
    for name in set(stretto.schedules.SCHEDULES) - set(schedules):
        del stretto.schedules.SCHEDULES[name]


def own_schedule(_: Path) -> None:
    plan = stretto.schedules.SCHEDULES["last_first"].make(devices=3, microbatches=4)
    assert stretto.check(plan) == []


def own_figure(folder: Path) -> None:
    assert (folder / "own.svg").read_text().startswith("<?xml")


AFTERWARDS = {"CONTRIBUTING.md": own_schedule, "docs/programs.md": own_figure}


@pytest.mark.parametrize("page", [page for page in PAGES if page != TUTORIAL])
def test_the_code_of_a_page_runs_and_prints_what_is_shown(page: str, folder: Path) -> None:
    names: dict[str, Any] = {}
    live = {"w": torch.zeros(512, 8, device="cuda" if torch.cuda.is_available() else "cpu")}
    with Receiver(f"unix://{folder}/engine-0/door", into=live) as receiver:
        receiver.start()
        for block in blocks(page):
            if block.language == "python" and not any(key[0] == page and key[1] in block.code for key in HOW):
                measured = any(key[0] == page and key[1] in block.code for key in MEASURED)
                compare(block, run_python(block, names), measured=measured)
            elif block.language == "sh":
                compare(block, "".join(run_line(line, folder) for line in block.lines()))
    AFTERWARDS.get(page, lambda _: None)(folder)


def run_line(line: str, folder: Path) -> str:
    """Run a line of shell, if it is one of ours; return what it prints."""
    if "-m stretto " in line:  # under torchrun
        parse_command(line[line.index("stretto ") :])
    elif any(line.startswith(command) for command in PARSED):
        parse_command(line)
    elif line.startswith("stretto "):
        done = run(*shlex.split(line.replace(ADDRESSES, f"unix://{folder}"), comments=True)[1:])
        assert done.returncode == 0 or (done.returncode == 1 and line.startswith("stretto check")), (line, done.stderr)
        return done.stdout + done.stderr
    return ""


# Fragments run on ranks, with names that are prepared for them; what needs hardware or engines is only read.


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):  # fragments train and push on CPUs
        several = Ranks(4)
    yield several
    several.stop()


@pytest.mark.parametrize(("key", "how"), of_table(lambda how: how.ranks > 0))
def test_fragments_run_on_ranks(key: tuple[str, str], how: How, ranks: Ranks, tmp_path: Path) -> None:
    block = found(*key)
    tmp_path.chmod(0o700)
    code = block.code.replace(ADDRESSES, f"unix://{tmp_path}")
    printed, *_ = ranks.run(run_fragment, how.ranks, code, how.given, str(tmp_path))
    compare(block, printed)


@pytest.mark.parametrize(("key", "how"), of_table(lambda how: bool(how.not_run)))
def test_what_is_not_run_uses_only_what_exists(key: tuple[str, str], how: How) -> None:
    assert problems(found(*key).code, how.readers) == []


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import stretto\nstretto.Pipelines", "stretto has no Pipelines"),
        ("from stretto.weights import Sender\nSender(keep=2)", "Sender: got an unexpected keyword argument 'keep'"),
        ("from stretto.weights import Sender\nSender().pull()", "a Sender has no pull"),
        ("import stretto\nstretto.simulate()", "stretto.simulate: missing a required argument: 'program'"),
        ("sender.push('a', [], record=1, when=2)", "sender.push: got an unexpected keyword argument 'when'"),
        ("print(queue)", "nothing is called queue"),
    ],
)
def test_reading_finds_what_does_not_exist(code: str, says: str) -> None:
    assert problems(code, {"sender": Sender}) == [says]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_names_in_sentences_exist(page: str) -> None:
    sentences = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(r"`(stretto [a-z][^`…]*)`", sentences):
        parse_command(line, whole=False)
    for name in re.findall(r"`(stretto(?:\.\w+)+)", sentences):
        pkgutil.resolve_name(name)  # raises if it is not there


@pytest.mark.parametrize("line", ["stretto update", "stretto simulate zb_v --cost F=1", "stretto onegpu ruin x.py"])
def test_parsing_finds_commands_that_do_not_exist(line: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(line)):
        parse_command(line)


def test_shown_output_is_compared() -> None:
    assert differences("a\n…\nb 1\n", "a\nx\ny\nb 1\n") == []
    assert differences("a\nb 1\n", "a\nb 2\n") != []
    assert differences("took 1.5 ms\n0 disk load0──···\n", "took 7 s\n0 disk ···load0──\n", measured=True) == []
    both = ["not printed: verified", "not shown: delivered"]
    assert differences("verified\n", "delivered\n", measured=True) == both


def test_the_page_about_own_programs_shows_the_example() -> None:
    shown = found("docs/programs.md", "stretto.execute(program, lambda task: lambda: time.sleep").code
    assert (ROOT / "examples" / "own_program.py").read_text().endswith(shown)
    assert len(shown.splitlines()) < 30


# The tutorial runs from start to end, with fewer steps of training.

STEPS = "5"


def started(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def trained(arguments: list[str]) -> str:
    """Run torchrun; return what its ranks print, whose gradients are right and whose loss falls."""
    process = started([sys.executable, "-m", "torch.distributed.run", *arguments])
    try:
        printed, errors = process.communicate(timeout=SECONDS)
    finally:
        process.terminate()  # then torchrun ends its ranks, if they have not ended
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    # torchrun's ranks write the end of a line by itself, so another rank's line may come before it.
    printed = re.sub(r"(?<=\d)(?=rank \d|step +\d)", "\n", printed)
    printed = re.sub(r"\n\n+", "\n", printed)
    losses = [float(found) for found in re.findall(r"loss (\S+)", printed)]
    assert losses[0] > losses[-1]
    assert all(float(error) < 1e-4 for error in re.findall(r"error at most (\S+)", printed))
    return printed


@contextmanager
def engine(arguments: list[str]) -> Iterator[Iterator[str]]:
    """The lines that a running process prints; it is ended afterwards, or if it runs for too long."""
    process = started([sys.executable, *arguments])
    deadline = threading.Timer(2 * SECONDS, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        yield iter(process.stdout)
    finally:
        deadline.cancel()
        process.kill()
        process.communicate()


def test_the_tutorial_runs_from_start_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "LICENSE").write_text((ROOT / "LICENSE").read_text())
    (tmp_path / "tutorial").mkdir()
    monkeypatch.chdir(tmp_path / "tutorial")
    page, names = blocks(TUTORIAL), dict[str, Any]()
    files = {block.file: block.code for block in page if block.file}
    assert list(files) == ["model.py", "train.py", "engine.py"]
    for name, code in files.items():
        Path(name).write_text(code)
        assert len(code.splitlines()) < 60
    with engine(["engine.py"]) as lines:  # earlier than on the page, so that it starts while others run
        before = ""
        for number, block in enumerate(page):
            printed = run_python(block, names) if block.language == "python" and not block.file else ""
            for line in block.lines() if block.language == "sh" else ():
                program, *arguments = line.replace("$PWD", str(Path.cwd())).replace(" 200", f" {STEPS}").split()
                if program == "torchrun":
                    printed += trained(arguments)
                elif line == "python engine.py":
                    before = next(lines)
                else:
                    printed += run_line(line, tmp_path)
            compare(block, printed, measured=any(earlier.file for earlier in page[:number]))
        after = next(line for line in lines if line.startswith("step-"))
    (generated,) = [block.code for block in page if block.code.startswith("initial: ")]
    assert differences(generated, before + after, measured=True) == []
    assert before.split(": ")[1] != after.split(": ")[1]
    assert Path("step.svg").read_text().startswith("<?xml")
