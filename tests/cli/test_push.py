"""`stretto push`, as a user types it."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from commands import run
from stretto.cli.push_plan import PushPlan
from stretto.timeline.trace import parse_trace
from stretto.weights.receive.receiver import Receiver
from stretto.weights.send import staging

MODEL = {f"layers.{k}.weight": torch.arange(k, k + 5000.0) for k in range(9)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    save_file(MODEL, tmp_path / "step-7.safetensors")
    return tmp_path / "step-7.safetensors"


def stretto(*arguments: str, senders: int = 1) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={senders}"] if senders > 1 else []
    command = [sys.executable, *torchrun, "-m", "stretto", "push", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env={"COLUMNS": "100", "PATH": ""})


@pytest.mark.parametrize("senders", [1, 2])
def test_a_checkpoint_is_pushed_and_told_of(checkpoint: Path, senders: int) -> None:
    folder = checkpoint.parent
    live = [{name: torch.zeros_like(it) for name, it in MODEL.items()} for _ in range(2)]
    receivers = [Receiver(f"unix://{folder}/{k}", into=into).start() for k, into in enumerate(live)]
    try:
        trace = folder / "push.trace.json"
        addresses = ",".join(str(it.address) for it in receivers)
        done = stretto(str(checkpoint), "--to", addresses, "-o", str(trace), "--device", "cpu", senders=senders)
        assert done.returncode == 0, done.stderr
        assert "step-7.safetensors (" in done.stdout
        for receiver in receivers:
            assert f"{receiver.address} serves it, verified" in done.stdout
            assert receiver.ensure_serving() == "step-7.safetensors"
        assert all(torch.equal(into[name], it) for into in live for name, it in MODEL.items())
        assert done.stdout.count("serves it") == 2  # one rank speaks
        assert parse_trace(trace.read_text()).program.is_update
    finally:
        for receiver in receivers:
            receiver.close()


def test_the_report_as_json(checkpoint: Path) -> None:
    live = {name: torch.zeros_like(it) for name, it in MODEL.items()}
    with Receiver(f"unix://{checkpoint.parent}/r", into=live) as receiver:
        receiver.start()
        done = stretto(str(checkpoint), "--to", str(receiver.address), "--version", "v", "--json", "--device", "cpu")
        told = msgspec.json.decode(done.stdout)
        assert (told["version"], told["bytes"]) == ("v", 9 * 20000)
        assert told["receivers"] == {str(receiver.address): "verified"}


def test_a_dry_run_touches_nobody_and_draws_the_plan(checkpoint: Path) -> None:
    done = run("push", str(checkpoint), "--dry-run", "--devices", "2", "--bucket", "0.04MiB")
    assert done.returncode == 0, done.stderr
    assert "9 tensors, 180,000 bytes" in done.stdout
    assert "5 buckets of 41.7 kB" in done.stdout
    assert "(chosen)" in done.stdout
    assert "1 Reload" in done.stdout


def test_a_dry_run_as_json(checkpoint: Path) -> None:
    done = run("push", str(checkpoint), "--dry-run", "--devices", "2", "--bucket", "0.04MiB", "--json")
    plan = msgspec.json.decode(done.stdout, type=PushPlan)
    assert (plan.tensors, plan.bytes, plan.buckets, plan.senders) == (9, 180_000, 5, 2)
    assert plan.chosen == min(plan.modes, key=lambda row: row.seconds).mode
    assert {row.mode: row.buffer_bytes // plan.bucket_bytes for row in plan.modes} == {
        "serial": 3,
        "overlap_reload": 3,
        "overlap_all": 4,
    }


def test_a_dry_run_of_many_draws_the_first_buckets_or_says_how(checkpoint: Path) -> None:
    done = run("push", str(checkpoint), "--dry-run", "--devices", "8", "--bucket", "0.02MiB", "--device", "cpu")
    assert "the first 9 buckets; all of them with -o push.svg:" not in done.stdout
    assert "7 Reload" in done.stdout  # nine buckets just fit
    done = run("push", str(checkpoint), "--dry-run", "--devices", "16", "--bucket", "0.02MiB", "--device", "cpu")
    assert "the first 4 buckets; all of them with -o push.svg:" in done.stdout
    assert "15 Reload" in done.stdout
    done = run("push", str(checkpoint), "--dry-run", "--devices", "200", "--bucket", "0.02MiB", "--device", "cpu")
    assert "tasks do not fit a terminal; draw them with -o push.svg" in done.stdout


def test_a_dry_run_leaves_modes_out_that_do_not_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "free_bytes", lambda _: 7 << 19)  # three buffers of 1 MiB, and not four
    arguments = [str(checkpoint), "--dry-run", "--devices", "2", "--bucket", "1MiB", "--device", "cpu"]
    told = run("push", *arguments).stdout
    assert "serial" in told
    assert "overlap_reload" in told
    assert "overlap_all" not in told


def test_a_dry_run_under_torchrun_is_of_all_its_senders_and_told_once(checkpoint: Path) -> None:
    done = stretto(str(checkpoint), "--dry-run", "--device", "cpu", senders=2)
    assert done.stdout.count("from 2 senders") == 1
    done = stretto(str(checkpoint) + "!", "--dry-run", senders=2)
    assert done.stderr.count("stretto: there is no file") == 1


def test_a_folder_names_the_version_however_it_is_spelled(checkpoint: Path) -> None:
    folder = checkpoint.parent
    done = run("push", str(folder / "."), "--dry-run", "--device", "cpu")
    assert done.stdout.startswith(f"{folder.name}: ")
    (folder / "below").mkdir()
    done = run("push", str(folder / "below" / ".."), "--dry-run", "--device", "cpu")
    assert done.stdout.startswith(f"{folder.name}: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say where to push to: --to unix:///path (or --dry-run)"),
        (["--to", "nowhere"], "'nowhere' is no address; there are unix:///path and tcp://host:port"),
        (["--to", "unix:///nowhere/r"], "unix:///nowhere/r cannot be reached: No such file or directory"),
        (
            ["--to", "tcp://127.0.0.1:1"],
            "tcp://127.0.0.1:1 needs a secret: both sides read one (secret_file=, --secret-file)",
        ),
        (["--in-flight", "drop"], "--in-flight is one of wait, abort, keep (got 'drop')"),
        (["--mode", "four"], "--mode is one of serial, overlap_reload, overlap_all (got 'four')"),
        (["--bucket", "0B"], "--bucket is a size from 1KiB to 1TiB (got '0B')"),
        (["--bucket", "512"], "--bucket needs a unit, e.g. 512MiB (got '512')"),
        (["--dry-run", "--devices", "0"], "--devices is a number of senders from 1 to 4096 (got 0)"),
        (["--to", "unix:///x", "-o", "a.foo"], "-o draws .svg, .png or .trace.json (got a.foo)"),
        (["--to", "unix:///x", "-o", "/no/a.svg"], "cannot write /no/a.svg: no directory to write into"),
        (
            ["--to", "unix:///x", "-d", "2"],
            "--devices is for --dry-run; torchrun --nproc-per-node starts as many senders as you like",
        ),
        (["--to", "unix:///x", "--device", "tpu"], "--device is cpu or cuda (got 'tpu')"),
    ],
)
def test_bad_input_is_one_line(checkpoint: Path, arguments: list[str], said: str) -> None:
    done = run("push", str(checkpoint), *arguments)
    assert done.returncode == 2
    assert done.stderr == f"stretto: {said}\n"
    assert done.stdout == ""


def test_a_push_that_fails_is_no_bad_input(checkpoint: Path, tmp_path: Path) -> None:
    def load(_: object) -> None:
        raise ValueError("no room")

    (tmp_path / "door").mkdir(mode=0o700)
    with Receiver(f"unix://{tmp_path}/door/r", load, device="cpu") as receiver:
        receiver.start()
        done = stretto(str(checkpoint), "--to", str(receiver.address), "--device", "cpu", "--json")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "ValueError: no room" in done.stderr
    told = msgspec.json.decode(done.stdout)
    assert "no room" in told["error"]
    assert told["serving"] == {}


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no header")
    done = run("push", str(tmp_path / "x.safetensors"), "--dry-run")
    assert done.returncode == 2
    assert done.stderr.startswith(f"stretto: {tmp_path}/x.safetensors")
    assert done.stderr.count("\n") == 1
