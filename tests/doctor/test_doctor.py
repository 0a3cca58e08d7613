"""`stretto doctor` says what works, what does not, and leaves nothing behind."""

import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import stretto
from commands import run
from processes import running
from ranks import Ranks
from stretto.doctor import rank
from stretto.doctor.examine import examine, setting_of
from stretto.doctor.report import Check, Note, Report, merged
from stretto.schedules import dualpipe, zb_v
from stretto.schedules.registry import SCHEDULES


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.stop()


def test_all_is_well_here() -> None:
    command = [sys.executable, "-m", "stretto", "doctor", "--backend", "gloo", "-d", "2", "--json", "--seconds", "500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    report = msgspec.json.decode(done.stdout, type=Report)
    assert done.returncode == 0, report
    assert report.failed == []
    assert {check.what.split()[0] for check in report.training} == set(SCHEDULES)
    assert all(check.state == "ok" and check.value is not None and check.value <= 1e-12 for check in report.training)
    assert [check.what for check in report.links] == ["0 → 1", "1 → 0"]
    assert [check.said.split(", ")[-1] for check in report.push] == ["verified"]
    assert {"GPUs", "NCCL"} <= set(report.untested)
    assert report.versions["stretto"] == stretto.__version__


def test_what_takes_too_long_is_ended_and_told(mark: str) -> None:
    said: list[str] = []
    report = examine("gloo", 2, seconds=1, progress=said.append)
    (failed,) = report.failed
    assert failed.said.startswith("not done after 1 s: rank 0 "), failed
    assert ranks_with(mark) == set()


def test_a_request_to_end_ends_all(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "stretto", "doctor", "--backend", "gloo", "-d", "2"]
    doctor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60  # a rank that torchrun is about to start when it is ended would live on
        while len(list(tmp_path.glob("*/process-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        doctor.terminate()
        assert doctor.wait(30) == 143
    finally:
        doctor.kill()
    assert ranks_with(mark) == set()
    assert list(tmp_path.iterdir()) == []


def test_a_request_to_end_while_the_launcher_starts_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers: list[subprocess.Popen[bytes]] = []
    usual, ours = subprocess.Popen, signal.signal(signal.SIGTERM, lambda *_: None)

    def start(*arguments: Any, **options: Any) -> Any:
        launchers.append(usual(*arguments, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return launchers[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    try:
        with pytest.raises(SystemExit) as ended:
            examine("gloo", 2, seconds=5)
    finally:
        signal.signal(signal.SIGTERM, ours)
    assert ended.value.code == 143
    assert launchers[0].returncode is not None


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A mark that the processes of this test have in their environment."""
    monkeypatch.setenv("STRETTO_TEST", value := str(uuid.uuid4()))
    return value


def ranks_with(mark: str) -> set[int]:
    return running(str(Path(rank.__file__)), mark)


def wrong(mesh: Any, what: str) -> Check:
    """Training that cannot be right."""
    if what == "numbers":
        rank.BOUND = -1.0
    elif what == "error":
        rank.Block = None  # type: ignore[assignment, misc]
    notes = Notes()
    rank.train(notes, mesh, "zb_v", plan(what))
    return notes.found[0]


def plan(what: str) -> Any:
    if what == "skipped":
        return lambda: dualpipe(devices=2, microbatches=3)
    return lambda: zb_v(devices=2, microbatches=4)


class Notes(rank.Notes):
    """Kept, not written."""

    def __init__(self) -> None:
        self.found: list[Check] = []

    def add(self, part: Any, check: Check) -> None:  # noqa: ARG002
        self.found.append(check)


def test_wrong_numbers_are_found(ranks: Ranks) -> None:
    for check in ranks.run(wrong, 2, "numbers"):
        assert check.state == "failed"
        assert check.said.startswith("losses and gradients are ")


def test_no_number_is_no_small_error() -> None:
    nan, one, zero = (torch.tensor([value]) for value in (float("nan"), 1.0, 0.0))
    assert rank.relative_error(nan, one) == rank.relative_error(None, one) == rank.relative_error(one, zero) == math.inf
    assert rank.relative_error(one, one) == rank.relative_error(None, None) == 0


def test_errors_and_what_cannot_be(ranks: Ranks) -> None:
    assert {check.state for check in ranks.run(wrong, 2, "error")} == {"failed"}
    skipped = ranks.run(wrong, 2, "skipped")
    assert {check.state for check in skipped} == {"skipped"}
    assert "dualpipe" in skipped[0].said


def test_what_fails_on_one_rank_has_failed() -> None:
    notes = [
        [Note("training", Check("a", "ok", "1e-16", 1e-16)), Note("training", Check("b", "failed", "rank 1 failed"))],
        [Note("training", Check("a", "ok", "2e-16", 2e-16)), Note("training", Check("b", "failed", "ValueError: no"))],
    ]
    a, b = merged(notes, "training")
    assert (a.state, a.value) == ("ok", 2e-16)
    assert (b.state, b.said) == ("failed", "ValueError: no")


def test_bad_input_is_one_line() -> None:
    for options, said in (
        (["--backend", "tpu"], "--backend is one of gloo, nccl, onegpu (got tpu)"),
        (["-d", "0", "--backend", "gloo"], "runs at least 1 rank"),
    ):
        done = run("doctor", *options)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_as_many_gpus_decide_as_there_are() -> None:
    assert [setting_of(count) for count in (0, 1, 2, 8)] == ["gloo", "onegpu", "nccl", "nccl"]


def test_what_some_ranks_skip_has_failed() -> None:
    notes = [[Note("training", Check("a", "ok", "0", 0.0))], [Note("training", Check("a", "skipped", "no"))]]
    assert [check.state for check in merged(notes, "training")] == ["failed"]


def test_only_a_plan_that_cannot_be_made_is_skipped() -> None:
    def refused() -> Check:
        raise stretto.PlanError("in the middle of a step")

    notes = Notes()
    notes.attempt("training", "zb_v", refused)
    assert [check.state for check in notes.found] == ["failed"]
