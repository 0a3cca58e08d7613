"""A rank that fails, dies, stops or stalls is named by every other within seconds, and nothing is left behind."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import failure_jobs
from processes import Script
from ranks import Ranks

TESTS = Path(__file__).parent.parent / "support"
PATHS = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}


@contextmanager
def ranks_of(folder: Path, count: int, victim: int, how: str, mesh: str = "") -> Iterator[list[Script]]:
    """The ranks of a pipeline, or of a mesh of pipelines, in which one fails."""
    script, meeting, mesh = TESTS / "failing.py", folder / "meeting", mesh or f"pp={count}"
    scripts = [
        Script(script, rank, count, meeting, victim, how, mesh, errors=folder / f"errors-{rank}")
        for rank in range(count)
    ]
    try:
        yield scripts
    finally:
        for script in scripts:
            script.kill()


def torchrun(how: str) -> str:
    """What four ranks have written, the third of which fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    script = [str(TESTS / "failing.py"), "2", how, "pp=4"]
    return subprocess.run([*command, *script], env=ENVIRONMENT, capture_output=True, text=True, timeout=300).stderr


WORDS = {
    "raises": "rank {} failed at {} of step 2: RuntimeError: out of luck",
    "leaves": "rank {} failed at {} of step 2: SystemExit: 3",
    "dies": "rank {} died; it was last seen at {} of step 2",
    "stops, found soon": "rank {} has not been heard of for",
    "stalls": "rank {} has been at {} of step 2 for",
}


@pytest.mark.parametrize("how", sorted(WORDS))
@pytest.mark.parametrize("victim", [0, 2])
def test_every_other_rank_names_it(tmp_path: Path, how: str, victim: int) -> None:
    validate_named(tmp_path, how, victim)


@pytest.mark.parametrize("how", ["dies", "raises", "stalls", "stops, found soon"])
@pytest.mark.parametrize(("mesh", "victim"), [("pp=2,ep=2", 1), ("pp=2,dp=2", 2), ("dp=2,ep=2", 3)])
def test_so_does_every_rank_of_another_pipeline(tmp_path: Path, how: str, mesh: str, victim: int) -> None:
    validate_named(tmp_path, how, victim, mesh)


def validate_named(tmp_path: Path, how: str, victim: int, mesh: str = "") -> None:
    with ranks_of(tmp_path, 4, victim, how, mesh) as scripts:
        said = {rank: script.said(60) for rank, script in enumerate(scripts) if rank != victim}
    task = r"(\d+[FB]\d+(\.wgrad)?|\d+(SEND|RECV)_[FB]\d+)"
    expected = re.escape(WORDS[how]).replace(r"\{\}", str(victim), 1).replace(r"\{\}", task)
    expected = expected.replace(r"step\ 2", r"step\ [12]") if mesh else expected
    for rank, text in said.items():
        line = next((line for line in text.splitlines() if line.startswith("PipelineError")), "")
        assert re.search(expected, line), (rank, text)
        if how not in ("raises", "leaves"):  # of those a rank may hear between two steps, waiting for nothing
            assert f"; rank {rank} was waiting for " in line


def test_whoever_catches_it_can_close_the_pipeline_and_end_in_peace(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 4, 2, "caught") as scripts:
        assert [script.wait(60) for script in scripts] == [0, 0, 0, 0], [script.said(0) for script in scripts]


def test_it_takes_less_than_ten_seconds(tmp_path: Path) -> None:
    """From the moment a rank is stopped, which of all ways is found last."""
    with ranks_of(tmp_path, 4, 1, "stops") as scripts:
        while _state(scripts[1].pid) != "T":
            time.sleep(0.05)
        stopped = time.monotonic()
        for rank in (0, 2, 3):
            assert scripts[rank].wait(10) == 7
        assert time.monotonic() - stopped < 10


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_under_torchrun(how: str) -> None:
    said = torchrun(how)
    assert said.count("PipelineError: rank 2") == 3, said


def test_an_error_that_was_told_prints_as_one_line_under_torchrun() -> None:
    said = torchrun("uncaught")
    lines = [line for line in said.splitlines() if line.startswith("[rank")]
    others = [line for line in lines if not line.startswith("[rank2]")]
    assert len(others) == 3, said
    assert all("PipelineError: rank 2 failed at " in line for line in others)
    assert any(line.startswith("[rank2]: Traceback") for line in lines)
    assert any("out of luck" in line for line in lines if line.startswith("[rank2]"))


def test_a_rank_whose_program_ends_between_steps_is_named(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 4, 2, "ends") as scripts:
        said = [script.said(60) for script in scripts]
    for rank in (0, 1, 3):
        assert "PipelineError: rank 2 left after step 1, before step 2" in said[rank], said


def test_a_rank_that_dies_while_others_wait_to_clip_gradients_is_named(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 4, 2, "dies before clipping") as scripts:
        said = [script.said(60) for rank, script in enumerate(scripts) if rank != 2]
    for text in said:
        assert "PipelineError: rank 2 died; it was last seen " in text, said
        assert " was waiting for rank 2 to begin clipping 1 (max_norm=1.0, norm_type=2.0)" in text, said


def test_ranks_that_do_different_things_are_told_and_end_in_peace(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2, 1, "evaluates") as scripts:
        ended = [script.wait(60) for script in scripts]
        said = [script.said(0) for script in scripts]
    assert ended == [0, 0], said
    seen = (  # by who watches, or by who first hears of the other's begin
        "runs evaluation 1 while rank 0 runs step 2",
        "runs step 2 while rank 1 runs evaluation 1",
        "rank 0 is not in evaluation 1; all ranks must call step(), eval_step() and",
        "rank 1 is not in step 2; all ranks must call step(), eval_step() and",
    )
    for text in said:
        assert any(it in text for it in seen), text


@pytest.mark.parametrize("backend", ["gloo", "onecpu"])
@pytest.mark.parametrize("how", ["raise", "kill", "stop"])
def test_a_failure_at_any_task_leaves_nothing_behind(tmp_path: Path, how: str, backend: str) -> None:
    command = [sys.executable, str(TESTS / "everywhere.py"), backend, how, str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["worlds"] >= 1
    assert told["wrong"] == {}, done.stderr


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.stop()


def test_a_pipeline_that_was_closed_says_so_at_once(ranks: Ranks) -> None:
    for said, seconds in ranks.run(failure_jobs.closed, 2):
        assert said == ["this pipeline was closed; make a new one"] * 2
        assert seconds < 1


def test_pipelines_that_are_let_go_of_leave_no_threads(ranks: Ranks) -> None:
    for sums, threads in ranks.run(failure_jobs.left_open, 2):
        assert sums > 0
        assert threads == []


def test_a_rank_that_does_not_come_is_named_and_may_come_later(ranks: Ranks) -> None:
    first, second = ranks.run(failure_jobs.late, 2)
    assert first == ("rank 0 has waited 1.5 s (timeout) for rank 1 to come", second[1])
    assert second[0] == ""


def test_what_one_rank_cannot_make_is_refused_by_all(ranks: Ranks) -> None:
    for rank, (said, world, loss) in enumerate(ranks.run(failure_jobs.unmade, 2)):
        told = r"rank 1(:| failed setting up:) FileNotFoundError: no such weights"
        assert re.match("no such weights" if rank else told, said)
        assert world == 2.0
        assert loss > 0


def test_numbers_that_have_not_arrived_are_not_used(ranks: Ranks) -> None:
    for said in ranks.run(failure_jobs.unarrived, 2):
        assert "a message was lost" in said


def test_a_rank_that_never_begins_a_step_is_named(ranks: Ranks) -> None:
    first, _ = ranks.run(failure_jobs.absent, 2)
    assert first.startswith("rank 1 has not begun step 2; it was last seen after step 1; rank 0 waited for "), first


def test_steps_side_by_side_leave_the_groups_of_others_alone(ranks: Ranks) -> None:
    """The user's own operation is under way on the world's group while a step fails."""
    assert ranks.run(failure_jobs.own_operation, 2) == [3.0, 3.0]


def test_a_missing_key_is_named_with_its_layer(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.run(failure_jobs.missing_key, 2)):
        assert f'Missing key(s) in state_dict: "{rank}.up.bias"' in said
        assert "Unexpected" not in said


def test_a_loss_can_be_asked_for_after_the_end(ranks: Ranks) -> None:
    for expected, found, said, seconds in ranks.run(failure_jobs.asked_late, 2):
        assert found == expected
        assert said == "" or "inputs have 3 rows, but the plan has 4 microbatches" in said
        assert seconds < 5


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_failure_between_two_groups_leaves_the_next_pipeline_alone(ranks: Ranks, at: int) -> None:
    first, second = ranks.run(failure_jobs.interrupted, 2, at)
    assert first[0].startswith("rank 1 failed setting up: KeyboardInterrupt"), first
    assert second[0] == ""
    assert first[1:] == second[1:]
    assert first[1] == 2.0


def test_a_pipeline_that_is_refused_does_not_concern_those_beside_it(ranks: Ranks) -> None:
    found = ranks.run(failure_jobs.side_by_side, 4)
    refused = "rank 1 was given another seed than rank 0 (1 and 0)"
    assert [said for said, _, _ in found] == [refused, "", refused, ""]
    assert len({loss for _, loss, _ in found}) == 1
    assert [number for _, _, number in found] == [0, 1, 0, 1]


@pytest.mark.parametrize("option", ["record", "accumulate"])
def test_what_one_rank_is_asked_for_all_must_be(ranks: Ranks, option: str) -> None:
    for said in ranks.run(failure_jobs.mismatched, 2, option):
        assert any(
            text in said for text in (f"step 2 ({option})", "rank 1 is not in step 2", "rank 0 is not in step 2")
        )


def test_requests_to_end_reach_the_users_handler_once_and_in_time(ranks: Ranks) -> None:
    for calls, took in ranks.run(failure_jobs.handlers, 2):
        assert calls == 2
        assert took < 1


def test_a_handler_that_raises_is_called_when_the_step_is_over(ranks: Ranks) -> None:
    told = ranks.run(failure_jobs.preempted, 2)
    assert [it[0] for it in told] == ["", "preempted"]
    assert [it[1] for it in told] == [2, 2]  # the step counts, and the next one can be made
    assert [it[3] for it in told] == [True, True]
    assert told[0][2] == told[1][2]


def test_another_device_by_default_changes_nothing(ranks: Ranks) -> None:
    for cpu, evaluated, other, evaluated_there in ranks.run(failure_jobs.elsewhere, 2):
        assert (cpu, evaluated) == (other, evaluated_there)


def test_a_collective_in_a_layer_that_ends_with_another_rank_names_it(ranks: Ranks) -> None:
    first, second = ranks.run(failure_jobs.lost_collective, 2)
    assert second == "KeyError: 'a bad key'"
    assert first.startswith("PipelineError: rank 1 failed at ")
    assert "KeyError: 'a bad key'" in first


def test_a_timeout_that_is_no_time_is_refused(ranks: Ranks) -> None:
    for said in ranks.run(failure_jobs.odd_timeout, 2):
        assert [line.partition(" (")[0] for line in said] == [
            "timeout is a number of seconds above 0, and at most 10⁹"
        ] * 4


def test_a_layers_own_error_in_load_state_dict_stays_what_it_is(ranks: Ranks) -> None:
    assert ranks.run(failure_jobs.own_error, 2) == ["Mine: not today"] * 2
