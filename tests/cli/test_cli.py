"""The command line as a user meets it: its output and its exit code."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import stretto
from commands import run
from strategies import SCHEDULES
from stretto.cli.console import out
from stretto.schedules import dualpipe, gpipe, one_f_one_b, zb_v
from stretto.timeline.trace import trace_json


def test_bare_show_lists_every_schedule_with_its_formulas() -> None:
    done = run("show")
    assert done.returncode == 0
    for name in SCHEDULES:
        assert f"\n{name}  " in "\n" + done.stdout
    assert "(p−1)(F+I−W)" in done.stdout


def test_show_draws() -> None:
    done = run("show", "1f1b", "--devices", "2", "--microbatches", "2")
    assert done.stdout.splitlines() == [
        "0 F0──F1──········B0──────····B1──────",
        "1 ····F0──B0──────F1──B1──────········",
        "time 9 →",
    ]


def test_simulate_json_has_the_documented_fields() -> None:
    done = run("simulate", "dualpipe", "--devices", "8", "--microbatches", "20", "--json")
    found = json.loads(done.stdout)
    assert found["makespan"] == 66
    assert len(found["devices"]) == 8
    first = found["devices"][0]
    assert {"busy", "span", "bubble", "peak_activations", "peak_bytes"} <= set(first)
    assert (first["busy"], first["span"], first["bubble"], first["peak_activations"]) == (60, 66, 6, 9)
    assert first["peak_bytes"] is None


def test_simulate_takes_costs_from_the_command_line_or_toml(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text(
        "F = [1.0, 2.0]\nB = 4\nactivation_bytes = 8\nslowdown = [1, 1]\n"
        '[link]\nlatency = 0.5\n[links."1>0"]\nlatency = 1\n'
    )
    done = run("simulate", "gpipe", "-d", "2", "-m", "1", "--costs", "costs.toml", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["makespan"] == 1 + 0.5 + 2 + 4 + 1 + 4
    assert found["devices"][0]["peak_bytes"] == 8
    short = run("simulate", "gpipe", "-d", "2", "-m", "1", "--costs", "F=3,I=1,W=1,B=2,FB=3", "--json")
    assert json.loads(short.stdout)["makespan"] == 10


def test_seconds_are_said_to_be_seconds(tmp_path: Path) -> None:
    cost = ("--costs", "unit=s,F=0.001,I=0.001,W=0.001")
    assert "makespan 33 ms, bubble" in run("simulate", "1f1b", *cost).stdout
    run("show", "1f1b", *cost, "-o", "x.trace.json", cwd=tmp_path)
    assert run("show", "x.trace.json", cwd=tmp_path).stdout.splitlines()[-1] == "time 33 ms →"
    slices = [event for event in json.loads((tmp_path / "x.trace.json").read_text())["traceEvents"] if "dur" in event]
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(33_000)


def test_simulate_prints_a_table_and_the_critical_path() -> None:
    done = run("simulate", "interleaved", "--overlap", "-d", "4", "-m", "8", "--stages-per-device", "2")
    assert "makespan 57, bubble 15.8%" in done.stdout
    assert "critical path, 27 tasks: 0F0 " in done.stdout


def test_written_files_check_and_simulate(tmp_path: Path) -> None:
    for name in ("a.csv", "a.json", "b.csv"):
        extra = ["--transfers"] if name == "b.csv" else []
        done = run("show", "dualpipe", "-d", "4", "-m", "8", "-o", name, *extra, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"wrote {name}\n")
        checked = run("check", name, cwd=tmp_path)
        assert checked.returncode == 0
        assert checked.stdout.startswith("sound: 4 devices, 4 stages on 2 routes, 8 microbatches, ")
        simulated = run("simulate", name, "--json", cwd=tmp_path)
        assert json.loads(simulated.stdout)["makespan"] == 26
    assert stretto.parse_plan((tmp_path / "a.csv").read_text()) == dualpipe(devices=4, microbatches=8)


def test_check_prints_violations_and_exits_1(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1F0\n")
    done = run("check", "bad.csv", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == (
        "coverage: the backward of stage 1 for microbatch 0 never runs: neither 1B0 nor 1I0 is there\n"
    )
    refused = run("simulate", "bad.csv", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("stretto: bad.csv is not sound: coverage: the backward of stage 1")


def test_check_limits_memory(tmp_path: Path) -> None:
    (tmp_path / "plan.csv").write_text(str(gpipe(devices=2, microbatches=4)))
    done = run("check", "plan.csv", "--memory-limit", "3GB", "--costs", "activation_bytes=1e9", cwd=tmp_path)
    assert done.returncode == 1
    assert "device 0 holds 4 GB at 0F3" in done.stdout


def test_check_prints_json(tmp_path: Path) -> None:
    (tmp_path / "plan.csv").write_text("0F0,0B0\n1B0,1F0")
    done = run("check", "plan.csv", "--json", cwd=tmp_path)
    assert done.returncode == 1
    (found,) = json.loads(done.stdout)
    assert (found["rule"], found["message"]) == (
        "dependencies",
        "1B0 comes before 1F0 on device 1, but needs its result",
    )
    (tmp_path / "plan.csv").write_text(str(gpipe(devices=2, microbatches=4)))
    done = run("check", "plan.csv", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])


def test_costs_by_name_with_units_and_from_a_file(tmp_path: Path) -> None:
    stretto.Costs(F=1, I=1, W=1, activation_bytes=2e9).save(tmp_path / "costs.toml")
    ways = ("F=1,activation_bytes=2GB", "costs.toml")
    shown = [run("simulate", "gpipe", "--costs", way, cwd=tmp_path).stdout for way in ways]
    assert shown[0] == shown[1]
    assert "16 GB" in shown[0]


def test_compare_all_at_equal_work(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(str(one_f_one_b(devices=4, microbatches=8)))
    rows = {row["name"]: row for row in json.loads(run("compare", "--json").stdout)}
    assert set(rows) == {*SCHEDULES, "interleaved +overlap"}
    assert rows["one_f_one_b"]["makespan"] == 33
    assert rows["interleaved"]["makespan"] == 24 + 9 / 2
    assert rows["dualpipe"]["parameters"] == 2
    named = run("compare", "1f1b", "mine.csv", "zb_h1", cwd=tmp_path)
    lines = named.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["schedule", "zb_h1", "one_f_one_b", "mine.csv"]
    assert lines[2].split()[1:] == lines[3].split()[1:]


def test_compare_cuts_uneven_models_alike(tmp_path: Path) -> None:
    """A list of the model's slices is shared out among however many stages; a plan of just those stages keeps it."""
    (tmp_path / "uneven.toml").write_text("F = [1, 1, 1, 3]\nB = [2, 2, 2, 6]\n")
    done = run("compare", "--costs", "uneven.toml", "--json", cwd=tmp_path)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert (done.stderr, len(rows)) == ("", 11)
    assert rows["gpipe"]["makespan"] == 8 * 9 + 3 * 3
    (tmp_path / "eight.toml").write_text("\n".join(f"{op} = [1, 2, 3, 4, 5, 6, 7, 8]" for op in "FIW"))
    (tmp_path / "plan.csv").write_text(str(zb_v(devices=4, microbatches=8)))
    compared = run("compare", "plan.csv", "--costs", "eight.toml", "--json", cwd=tmp_path)
    simulated = run("simulate", "plan.csv", "--costs", "eight.toml", "--json", cwd=tmp_path)
    assert json.loads(compared.stdout)[0]["makespan"] == json.loads(simulated.stdout)["makespan"]


PHASES = str(Path(__file__).parent.parent.parent / "examples" / "phases.toml")


def test_layers_show_hidden_and_exposed_communication(tmp_path: Path) -> None:
    given = ["--layers", "embedding,dense,moe*13,loss", "--costs", PHASES, "-m", "16"]
    done = run("compare", "1f1b", "interleaved", "dualpipe", "--overlap", *given, "--json", cwd=tmp_path)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["interleaved +overlap"]["exposed_comm"] < rows["one_f_one_b"]["exposed_comm"]
    assert rows["dualpipe"]["exposed_comm"] < rows["one_f_one_b"]["exposed_comm"]
    table = run("compare", "1f1b", *given, cwd=tmp_path).stdout
    assert table.splitlines()[0].split()[-2:] == ["comm", "bytes"]
    simulated = json.loads(run("simulate", "interleaved", "--overlap", *given, "--json", cwd=tmp_path).stdout)
    assert simulated["makespan"] == rows["interleaved +overlap"]["makespan"]
    traced = run("show", "dualpipe", *given, "-o", "x.trace.json", cwd=tmp_path)
    assert traced.returncode == 0
    lanes = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "x.trace.json").read_text())["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert {"compute", "comm", "send→1"} <= lanes


def test_tables_keep_all_digits_when_piped(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text("activation_bytes = 123456789\nF = 1.23456\n[link]\nlatency = 0.123456\n")
    done = run("compare", "--costs", "costs.toml", cwd=tmp_path)
    assert "…" not in done.stdout
    assert done.stdout.splitlines()[0].split() == [
        *("schedule", "makespan", "bubble", "in", "span", "activations", "I", "to", "W", "params", "exposed", "bytes")
    ]


def test_odd_file_names_are_printed_as_they_are(tmp_path: Path) -> None:
    for name in ("[bold]y.csv", ":smile:.csv"):
        (tmp_path / name).write_text("0F0,0B0")
        assert run("compare", name, "--json", cwd=tmp_path).stdout.count(name) == 1
        assert run("compare", name, cwd=tmp_path).stdout.splitlines()[1].startswith(name)


def test_compare_names_what_cannot_be_made() -> None:
    done = run("compare", "-d", "3")
    assert done.returncode == 0
    assert done.stderr == (
        "left out: dualpipe needs an even number of devices (got 3); use 2 or 4, or dualpipev for 3\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [[], ["--help"], ["show", "--help"], ["simulate", "--help"], ["check", "--help"], ["compare", "--help"]],
)
def test_help_teaches(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert "Usage:" in done.stdout
    assert len(arguments) < 2 or "Examples:" in done.stdout


UPDATE = ["simulate", "weight_update"]
BAD = {
    "unknown schedule": (["show", "dualpip"], "unknown schedule 'dualpip'; did you mean dualpipe? known are gpipe,"),
    "unknown command": (["shwo"], "No such command 'shwo'"),
    "unknown option": (["show", "--foo"], "No such option: --foo"),
    "missing name": (["simulate"], "Missing argument"),
    "impossible size": (["show", "dualpipe", "-d", "3"], "dualpipe needs an even number of devices (got 3)"),
    "no number": (["show", "gpipe", "-d", "x"], "Invalid value for '--devices'"),
    "huge size": (["simulate", "gpipe", "-d", "100000", "-m", "100000"], "is too large"),
    "zero": (["simulate", "gpipe", "-d", "0"], "gpipe needs devices to be a whole number of at least 1 (got 0)"),
    "not interleaved": (["show", "gpipe", "--overlap"], "gpipe takes no --stages-per-device and no --overlap"),
    "zero virtual": (
        ["show", "interleaved", "--stages-per-device", "0"],
        "stages_per_device to be a whole number of at least 1 (got 0)",
    ),
    "negative cost": (["simulate", "gpipe", "--costs", "F=-1"], "F must be a number of at least 0 (got -1.0)"),
    "NaN cost": (["simulate", "gpipe", "--costs", "F=nan"], "F must be a number of at least 0 (got nan)"),
    "no cost": (["simulate", "gpipe", "--costs", "F=one"], "cost F must be a number (got 'one')"),
    "loads by name": (
        ["simulate", "gpipe", "--costs", "F=1,loads=[1.2,0.8]"],
        "cost loads is given in a TOML file (--costs costs.toml), as a list: loads = [1.2, 0.8]",
    ),
    "a table by name": (
        ["simulate", "gpipe", "--costs", "phases=1"],
        "cost phases is given in a TOML file (--costs costs.toml)",
    ),
    "unknown cost": (["simulate", "gpipe", "--costs", "X=1"], "unknown cost 'X'; known are F, B,"),
    "no unit": (["simulate", "gpipe", "--costs", "unit=h"], "unit is s if times are seconds, or left out (got 'h')"),
    "cost twice": (["simulate", "gpipe", "--costs", "F=1,F=2"], "cost F is given twice"),
    "cost of a file": (["check", "good.csv", "--costs", "F=1"], "costs matter to a check only with --memory-limit"),
    "cost of an order": (
        ["show", "gpipe", "-o", "x.csv", "--costs", "F=1"],
        "holds the order of a schedule's actions, and no costs, layers",
    ),
    "lanes of an order": (["show", "gpipe", "-o", "x.csv", "--lanes"], "--lanes goes with drawings"),
    "lanes of a trace": (["show", "gpipe", "--json", "--lanes"], "--lanes and --width are for drawings"),
    "no figure": (["compare", "gpipe", "-o", "x.pdf"], "-o draws .svg or .png (got x.pdf)"),
    "update as what": (["simulate", "weight_update", "-o", "x.csv"], "-o draws .svg, .png or .trace.json (got x.csv)"),
    "update of nothing": ([*UPDATE, "--size", "0"], "--size needs a unit, e.g. 0GB (got '0')"),
    "update in no mode": (
        [*UPDATE, "--mode", "four"],
        "--mode is one of serial, overlap_reload, overlap_all (got 'four')",
    ),
    "huge update": ([*UPDATE, "--size", "1e9GB", "--bucket", "1GB"], "stay between 1 device and 2,000,000 tasks"),
    "microbatches of an update": ([*UPDATE, "-m", "8"], "weight_update takes --devices and sizes of its own"),
    "layers of an update": ([*UPDATE, "--offload", "1"], "weight_update takes --devices and sizes of its own"),
    "times of an update": ([*UPDATE, "--costs", "F=1"], "takes only shared resources from --costs; leave F out"),
    "size of a schedule": (["simulate", "gpipe", "--size", "1GB"], "go with weight_update, not with gpipe"),
    "shown update": (["show", "weight_update"], "stretto simulate weight_update draws a weight update"),
    "costs of nothing": (["simulate", "gpipe", "--costs", ","], "times such as F=1,I=1, or a TOML file; ',' is"),
    "memory of an update": (
        ["check", "update.trace.json", "--memory-limit", "1GB", "--costs", "activation_bytes=1"],
        "a memory limit goes with a training step",
    ),
    "limit with senseless bytes": (
        ["check", "good.csv", "--memory-limit", "1GB", "--costs", "activation_bytes=1,offload_bytes=2"],
        "offload_bytes and recompute_bytes are parts of activation_bytes, but exceed them",
    ),
    "lists of two lengths": (
        ["compare", "gpipe", "--costs", "lengths.toml"],
        "F is given for 2 slices of the model, but I for 4",
    ),
    "speed without seconds": (
        ["simulate", "gpipe", "--costs", "speed.toml"],
        "bandwidth must be a number, or with unit = \"s\" a speed such as 50GB/s (got '50GB/s')",
    ),
    "a choice without bytes": (["simulate", "gpipe", "--offload", "auto"], "the costs have no activation_bytes"),
    "a choice of a drawing": (["show", "gpipe", "--offload", "auto"], "--offload auto goes with stretto simulate"),
    "a compared choice": (["compare", "gpipe", "--offload", "auto"], "--offload auto goes with stretto simulate"),
    "a choice of a trace": (["simulate", "plan.trace.json", "--offload", "auto"], "plan.trace.json is a timeline"),
    "a choice of a program": (["simulate", "moved.csv", "--offload", "auto"], "moved.csv: --offload auto goes with a"),
    "a limit of no choice": (["simulate", "gpipe", "--memory-limit", "1GB"], "--memory-limit goes with --offload auto"),
    "negative offload": (["simulate", "gpipe", "--offload", "-1"], "offload is a number of actions of at least 0"),
    "recompute of unknown size": (
        ["simulate", "gpipe", "--recompute", "--costs", "activation_bytes=1"],
        "say how much of activation_bytes that spares: recompute_bytes",
    ),
    "pair shorter than its backward": (
        ["simulate", "gpipe", "--costs", "F=1,B=3,FB=2.5"],
        "B is a part of FB, but exceeds it on stage 0 (3 > 2.5)",
    ),
    "pair shorter than its forward": (
        ["compare", "gpipe", "--costs", "F=3,I=1,W=1,FB=2.5"],
        "F is a part of FB, but exceeds it on stage 0 (3 > 2.5)",
    ),
    "too many parts": (
        ["simulate", "gpipe", "--costs", "activation_bytes=1,offload_bytes=2"],
        "offload_bytes and recompute_bytes are parts of activation_bytes, but exceed them on stage 0 (2 > 1)",
    ),
    "fit of nothing": (
        ["compare", "1f1b", "--fit"],
        "--fit goes with a .trace.json, and --cores and --together with --fit",
    ),
    "cores of nothing": (["compare", "plan.trace.json", "--cores", "2"], "--cores and --together with --fit"),
    "nothing together": (["compare", "plan.trace.json", "--together"], "--cores and --together with --fit"),
    "memory of a drawing": (["show", "gpipe", "--memory"], "--memory goes with -o FILE.svg or .png"),
    "memory of a trace": (["show", "gpipe", "--memory", "-o", "x.trace.json"], "a trace always has it, and an order"),
    "memory of an order": (["show", "gpipe", "--memory", "-o", "x.csv"], "a trace always has it, and an order never"),
    "memory of all": (["show", "--memory"], "name a schedule to draw or write"),
    "no memory": (["show", "gpipe", "--memory", "-o", "x.svg"], "no allocated bytes were recorded, and the costs name"),
    "no trace": (["show", "bad.trace.json"], "bad.trace.json: not a trace of Stretto's"),
    "missing trace": (["show", "none.trace.json"], "cannot read none.trace.json: No such file or directory"),
    "layers of a trace": (["show", "plan.trace.json", "--offload", "1"], "plan.trace.json is a timeline"),
    "times of a trace": (["simulate", "plan.trace.json", "--costs", "F=9"], "has its own times; leave F out"),
    "usual times of a trace": (["simulate", "plan.trace.json", "--costs", "F=1,I=1"], "its own times; leave F, I out"),
    "times of a shown trace": (["show", "plan.trace.json", "--costs", "long.toml"], "its own times; leave F out"),
    "times of compared traces": (["compare", "plan.trace.json", "--costs", "I=1"], "its own times; leave I out"),
    "layers of compared traces": (["compare", "plan.trace.json", "--offload", "1"], "plan.trace.json is a timeline"),
    "seconds and a schedule": (
        ["compare", "measured.trace.json", "1f1b"],
        "measured.trace.json is in seconds, but one_f_one_b is not said to be; give the costs in seconds, with unit=s",
    ),
    "seconds and other traces": (
        ["compare", "plan.trace.json", "measured.trace.json"],
        "measured.trace.json is in seconds, but plan.trace.json is not said to be; if it was measured, write",
    ),
    "empty update": ([*UPDATE, "--size", "0B"], "--size must be at least 1 byte and at most 1e21 (got '0B')"),
    "speed without a unit": ([*UPDATE, "--h2d", "50/s"], "--h2d needs a unit, e.g. 50GB/s (got '50/s')"),
    "no speed": ([*UPDATE, "--h2d", "50GB"], "--h2d is a speed, e.g. 50GB/s (got '50GB')"),
    "bits": ([*UPDATE, "--h2d", "50Gb/s"], "--h2d: a size is a number of bytes"),
    "tiny update": ([*UPDATE, "--size", "1e-300"], "--size: a size is a number of bytes such as 80GB"),
    "huge offload": (["simulate", "gpipe", "--offload", "x"], "Invalid value for '--offload'"),
    "transfers of nothing": (["show", "gpipe", "--transfers"], "--transfers goes with -o FILE.csv"),
    "bytes of nothing": (["simulate", "gpipe", "--costs", "offload_bytes=2"], "exceed them on stage 0 (2 > 0)"),
    "simulated update": (["simulate", "update.trace.json"], "update.trace.json shows a weight update; stretto show"),
    "size of a file": (["simulate", "good.csv", "-d", "2"], "good.csv has its own sizes"),
    "sizes of files": (["compare", "good.csv", "-d", "2"], "files have their own sizes"),
    "overlap of none": (["compare", "gpipe", "--overlap"], "--stages-per-device and --overlap go with interleaved"),
    "sizes of nothing": (["show", "-d", "2"], "name a schedule to draw or write"),
    "named and refused": (
        ["compare", "zb_v", "--costs", "wide.toml"],
        "zb_v: message_bytes has 4 entries, but the plan has 8 stages; give one number",
    ),
    "huge cost": (["simulate", "gpipe", "--costs", "F=1e308"], "longer than a number can say"),
    "long number": (["simulate", "gpipe", "--costs", "digits.toml"], "not valid TOML"),
    "markup in a name": (["check", "[/x].csv"], "cannot read [/x].csv: No such file or directory"),
    "endless file": (["check", "/dev/zero"], "/dev/zero is larger than 256 MiB"),
    "unknown layer": (["simulate", "gpipe", "--layers", "moe*2,foo"], "'foo' is no layer; write e.g. moe or moe*3, of"),
    "no layers": (["simulate", "gpipe", "--layers", "moe*0"], "'moe*0' is no layer"),
    "few layers": (["simulate", "gpipe", "--layers", "moe*3"], "3 layers on 4 stages need 4 shares of at least 1"),
    "layers of a program": (
        ["simulate", "moved.csv", "--layers", "moe*2"],
        "moved.csv: --layers, --offload, --recompute and --wgrad-microbatches go with a schedule or a plan",
    ),
    "too few layers for a file": (["simulate", "two.csv", "--layers", "moe"], "two.csv: 1 layers on 2 stages need 2"),
    "layers of an order": (
        ["show", "gpipe", "-o", "x.csv", "--layers", "moe*4"],
        "holds the order of a schedule's actions, and no costs, layers",
    ),
    "no file": (["check", "none.csv"], "cannot read none.csv: No such file or directory"),
    "a folder": (["check", "."], "cannot read .: Is a directory"),
    "not text": (["check", "binary.csv"], "binary.csv is not UTF-8 text"),
    "bad CSV": (["check", "bad.csv"], "bad.csv: line 1: 'nonsense' is not an action"),
    "bad JSON": (["check", "bad.json"], "bad.json: not a plan in JSON"),
    "deep JSON": (["check", "deep.json"], "deep.json: not a plan in JSON"),
    "bad TOML": (["simulate", "gpipe", "--costs", "bad.toml"], "not valid TOML"),
    "odd TOML": (["simulate", "gpipe", "--costs", "odd.toml"], "bad cost table: Object contains unknown field `G`"),
    "wrong lengths": (
        ["simulate", "gpipe", "--costs", "lengths.toml"],
        "F is given for 2 slices of the model, but I for 4",
    ),
    "wrong devices": (["show", "gpipe", "--costs", "slow.toml"], "slowdown has 3 entries, but the plan has 4 devices"),
    "other output": (
        ["show", "gpipe", "-o", "x.txt"],
        "-o writes .csv, with or without --transfers, .json, .svg, .png or .trace.json",
    ),
    "no folder for a figure": (
        ["show", "gpipe", "-o", "none/x.svg"],
        "cannot write none/x.svg: No such file or directory",
    ),
    "nothing to draw": (["show", "gpipe", "-o", "x.svg", "--costs", "F=0,I=0,W=0"], "nothing takes any time"),
    "no folder": (["show", "gpipe", "-o", "none/x.csv"], "cannot write none/x.csv: No such file or directory"),
    "narrow": (["show", "gpipe", "--width", "3"], "--width needs at least 20 columns (got 3)"),
    "nothing left to compare": (["compare", "-d", "0"], "none of the schedules can be compared; gpipe needs devices"),
    "costs of a list": (["show", "--costs", "F=1"], "name a schedule to draw or write"),
    "width of a file": (["show", "gpipe", "--width", "50", "-o", "x.csv"], "--width is for drawing on a terminal"),
    "transfers of a figure": (["show", "gpipe", "--transfers", "-o", "x.svg"], "--transfers goes with -o FILE.csv"),
    "empty size": ([*UPDATE, "--size", ""], "--size: a size is a number of bytes"),
    "empty list": (["compare", "gpipe", "--costs", "empty.toml"], "F is an empty list"),
    "too long to say": (["simulate", "gpipe", "--costs", "F=1e308,B=1e308"], "longer than a number can say"),
    "limit": (["check", "good.csv", "--memory-limit", "nan"], "--memory-limit: a size is a number of bytes"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    (path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    (path / "bad.csv").write_text("nonsense,0F0")
    (path / "good.csv").write_text("0F0,0B0")
    (path / "two.csv").write_text("0F0\n1F0")
    (path / "moved.csv").write_text("0F0,0SEND_F0\n1RECV_F0,1F0")
    (path / "bad.json").write_text('{"rows": 3}')
    (path / "deep.json").write_text("[" * 100_000)
    (path / "bad.toml").write_text("F = = 1")
    (path / "odd.toml").write_text("G = 1")
    (path / "long.toml").write_text("F = [1, 2, 3]")
    (path / "slow.toml").write_text("slowdown = [1, 2, 3]")
    (path / "wide.toml").write_text("message_bytes = [1, 2, 3, 4]")
    (path / "bad.trace.json").write_text('{"traceEvents": 3}')
    step, update = gpipe(devices=2, microbatches=2), stretto.weight_update(devices=2, buckets=2)
    (path / "plan.trace.json").write_text(trace_json(stretto.simulate(step)))
    measured = stretto.simulate(step, stretto.Costs(unit="s", F=1, I=1, W=1))
    (path / "measured.trace.json").write_text(trace_json(measured))
    (path / "update.trace.json").write_text(trace_json(stretto.simulate(update)))
    (path / "lengths.toml").write_text("F = [1, 2]\nI = [1, 2, 3, 4]\n")
    (path / "empty.toml").write_text("F = []")
    (path / "speed.toml").write_text('[link]\nbandwidth = "50GB/s"\n')
    (path / "digits.toml").write_text("F = " + "9" * 5000)
    return path


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_one_clear_line_and_exit_code_2(case: str, folder: Path) -> None:
    arguments, says = BAD[case]
    done = run(*arguments, cwd=folder)
    assert says in done.stderr
    assert done.stderr.startswith("stretto: ")
    assert done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (2, "")


def test_update_compares_the_modes_and_draws_one(tmp_path: Path) -> None:
    sizes = (
        "-d",
        "2",
        "--size",
        "8GB",
        "--bucket",
        "2GB",
        "--h2d",
        "1GB/s",
        "--broadcast",
        "2GB/s",
        "--reload",
        "2GB/s",
    )
    done = run(*UPDATE, *sizes)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["mode", "seconds", "GB/s", "h2d", "broadcast", "reload"]
    # Two rounds of two buckets; a copy takes 2, a broadcast and a reload 1 each.
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["serial", "12"],
        ["overlap_reload", "9"],
        ["overlap_all", "7"],
    ]
    assert lines[6].startswith("0 H2D       H0──────····")
    found = json.loads(run(*UPDATE, *sizes, "--json").stdout)
    assert [row["seconds"] for row in found] == [12, 9, 7]
    assert found[0]["busy"] == {"h2d": 4 / 12, "broadcast": 4 / 12, "reload": 4 / 12}
    done = run(*UPDATE, *sizes, "--mode", "overlap_all", "-o", "x.trace.json", cwd=tmp_path)
    assert "wrote x.trace.json" in done.stdout
    assert run("show", "x.trace.json", cwd=tmp_path).stdout.startswith("0 H2D")
    assert run("check", "x.trace.json", cwd=tmp_path).stdout == "sound: 2 devices, 4 buckets, 20 tasks\n"


def test_an_update_over_a_shared_link_takes_longer(tmp_path: Path) -> None:
    (tmp_path / "pcie.toml").write_text("[shared.pcie]\ncapacity = 1\nlanes = { h2d = 1, broadcast = 1 }\n")
    alone, shared = (
        json.loads(run(*UPDATE, "--size", "32GB", "--json", *more, cwd=tmp_path).stdout)
        for more in ((), ("--costs", "pcie.toml"))
    )
    assert alone[1]["seconds"] == pytest.approx(shared[1]["seconds"])  # two stages never copy beside a broadcast
    assert shared[2]["seconds"] > alone[2]["seconds"]


def test_offload_and_recompute_from_the_command_line() -> None:
    schedule = ("simulate", "interleaved", "--overlap", "-m", "16", "--json")
    cost = ("--costs", "R=0.2,activation_bytes=10,recompute_bytes=3")
    kept, moved, both = (
        json.loads(run(*schedule, *cost, *more).stdout)
        for more in ((), ("--offload", "1"), ("--offload", "1", "--recompute"))
    )
    assert kept["makespan"] == moved["makespan"] < both["makespan"]
    assert [found["devices"][0]["peak_bytes"] for found in (kept, moved, both)] == [120, 30, 27]
    assert moved["devices"][0]["exposed_copy"] == 0


def test_costs_choose_what_to_offload_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "host.toml").write_text("F = 1\nactivation_bytes = 1e9\n[host]\nbandwidth = 0.7e9\n")
    command = ("simulate", "gpipe", "-d", "2", "-m", "8", "--costs", "host.toml")
    auto, limited, kept = (
        json.loads(run(*command, *more, "--json", cwd=tmp_path).stdout)
        for more in (("--offload", "auto"), ("--offload", "auto", "--memory-limit", "7GB"), ())
    )
    assert "memory_choice" not in kept
    assert kept["makespan"] <= auto["makespan"] <= 1.01 * kept["makespan"]
    peaks = [[device["peak_bytes"] for device in found["devices"]] for found in (auto, limited, kept)]
    assert max(peaks[0]) < max(peaks[1]) <= 7e9 < max(peaks[2]) == 8e9
    for found, peak in zip((auto, limited), peaks, strict=False):
        choice = found["memory_choice"]
        assert [device["peak_after"] for device in choice["devices"]] == peak
        assert choice["step_after"] == found["makespan"]
        assert choice["memory"]["fraction"] == [stage["fraction"] for stage in choice["stages"]]
    text = run(*command, "--offload", "auto", cwd=tmp_path).stdout
    assert text.startswith("Offload what makes the step at most 1 % longer. A simulated step takes ")
    assert "more would not hide: the step would take longer" in text
    assert f"makespan {auto['makespan']:g}" in text


def test_weight_gradients_together_from_the_command_line() -> None:
    schedule = ("simulate", "1f1b", "-d", "2", "-m", "8", "--json")
    apart, together = (json.loads(run(*schedule, *more).stdout) for more in ((), ("--wgrad-microbatches", "4")))
    assert [found["devices"][1]["peak_pending"] for found in (apart, together)] == [0, 4]
    assert run("show", "1f1b", "-d", "2", "-m", "4", "--wgrad-microbatches", "2").returncode == 0


def test_compare_says_how_far_off_a_simulation_with_fitted_costs_is(tmp_path: Path) -> None:
    run("show", "1f1b", "--costs", "F=1,I=2,W=1", "-o", "mine.trace.json", cwd=tmp_path)
    done = run("compare", "mine.trace.json", "--fit", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "mine.trace.json: a simulation with the costs fitted to it is +0.0% off"
    shared = run("compare", "mine.trace.json", "--fit", "--cores", "2", "--json", cwd=tmp_path)
    alone, fitted = json.loads(shared.stdout)
    assert fitted["name"] == "mine.trace.json, fitted"
    assert fitted["makespan"] > alone["makespan"]


def counted_step(path: Path) -> None:
    """A trace whose devices have 10 and 20 GB more than the activations, of 1 GB each."""
    timeline = stretto.simulate(gpipe(devices=2, microbatches=4), stretto.Costs(unit="s", F=1, I=1, W=1))
    sizes = np.zeros(len(timeline.program))
    for device, memory in enumerate(timeline.memory()):
        sizes[memory.task] = 10e9 * (device + 1) + 1e9 * memory.activations
    replace(timeline, allocated=sizes).save(path)


def test_peaks_of_allocated_bytes_are_shown_and_compared(tmp_path: Path) -> None:
    counted_step(tmp_path / "step.trace.json")
    done = run("show", "step.trace.json", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "peak allocated: 14 GB on device 0, 24 GB on device 1"
    assert "allocated" not in run("show", "gpipe").stdout
    costs = ("--costs", "activation_bytes=1GB,parameter_bytes=17GB")
    lines = run("simulate", "step.trace.json", *costs, cwd=tmp_path).stdout.splitlines()
    assert [line.split()[-4:] for line in lines[:3]] == [
        ["to", "W", "bytes", "allocated"],
        ["21", "GB", "14", "GB"],
        ["21", "GB", "24", "GB"],
    ]
    assert "allocated" not in run("simulate", "gpipe", *costs).stdout
    done = run("compare", "step.trace.json", "--fit", *costs, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].split()[-2:] == ["bytes", "allocated"]
    assert lines[1].split()[-4:] == ["21", "GB", "24", "GB"]
    assert lines[2].split()[-3:] == ["21", "GB", "–"]  # what is simulated allocates nothing
    assert lines[-1] == (
        "step.trace.json: the costs' peak of 21 GB is -12.5% off the 24 GB allocated (by device -12.5% to +50.0%)"
    )
    assert "off" not in run("compare", "step.trace.json", cwd=tmp_path).stdout  # by which costs?
    found = json.loads(run("compare", "step.trace.json", *costs, "--json", cwd=tmp_path).stdout)
    assert (found[0]["peak_bytes"], found[0]["peak_allocated"]) == (21e9, 24e9)
    found = json.loads(run("simulate", "step.trace.json", "--json", cwd=tmp_path).stdout)
    assert [device["peak_allocated"] for device in found["devices"]] == [14e9, 24e9]


def test_show_draws_memory(tmp_path: Path) -> None:
    counted_step(tmp_path / "step.trace.json")
    done = run("show", "step.trace.json", "--memory", "-o", "x.svg", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("wrote x.svg\n", 0)
    assert ">Peak 14 GB allocated<" in (tmp_path / "x.svg").read_text()
    (tmp_path / "fitted.toml").write_text('unit = "s"\nF = 1\nactivation_bytes = "1GB"\nparameter_bytes = "9GB"')
    costs = ("--costs", "fitted.toml")
    done = run("show", "step.trace.json", "--memory", *costs, "-o", "x.svg", cwd=tmp_path)
    assert "note: step.trace.json has its own times, so only the bytes in the costs are used" in done.stderr
    assert ">Peak 14 GB allocated, 13 GB held<" in (tmp_path / "x.svg").read_text()
    run("show", "gpipe", "--costs", "activation_bytes=1GB", "--lanes", "--memory", "-o", "x.svg", cwd=tmp_path)
    assert ">Peak 8 GB held<" in (tmp_path / "x.svg").read_text()


def test_compare_fits_one_cost_table_to_several_traces(tmp_path: Path) -> None:
    """Phases take longer in pairs; the costs of a run without pairs do not know it, those of both runs do."""
    text = Path(PHASES).read_text()
    text += "[woven]\nattn = { F = 1.4, I = 1.5, W = 0.8 }\ndispatch = { F = 0.9, I = 0.9 }\n"
    (tmp_path / "costs.toml").write_text(text)
    for name in ("zb_v", "dualpipev"):
        done = run(
            *("show", name, "--layers", "moe*8", "--costs", "costs.toml", "-o", f"{name}.trace.json"), cwd=tmp_path
        )
        assert done.returncode == 0
    names = ["zb_v.trace.json", "dualpipev.trace.json"]
    done = run("compare", *names, "--fit", "--together", cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == [
        f"{name}: a simulation with the costs fitted to all is +0.0% off" for name in names
    ]
    run("show", "1f1b", "-o", "whole.trace.json", cwd=tmp_path)
    done = run("compare", names[0], "whole.trace.json", "--fit", "--together", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "stretto: timelines of phases are not fitted together with timelines of whole passes\n",
    )


def test_simulate_and_show_cut_lists_of_costs_anew(tmp_path: Path) -> None:
    """As `compare` does: the same model costs the same in any number of stages, bytes and figures included."""
    (tmp_path / "two.toml").write_text("F = [2, 4]\nI = 2\nactivation_bytes = [40, 80]\n")
    (tmp_path / "four.toml").write_text("F = [1, 1, 2, 2]\nI = 1\nW = 0.5\nactivation_bytes = [20, 20, 40, 40]\n")
    for command in (("simulate", "gpipe", "--json"), ("simulate", "zb_h1"), ("show", "gpipe", "--json")):
        anew, plain = (run(*command, "--costs", costs, cwd=tmp_path) for costs in ("two.toml", "four.toml"))
        assert (anew.returncode, anew.stdout) == (0, plain.stdout)
        assert anew.stderr == "note: the lists in the costs are not for 4 stages; the costs of the model are cut anew\n"
        assert plain.stderr == ""
    traces = []
    for costs in ("two.toml", "four.toml"):
        for command in ("simulate", "show"):
            done = run(command, "gpipe", "--costs", costs, "-o", "x.trace.json", cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            traces.append((tmp_path / "x.trace.json").read_text())
    assert len({*traces}) == 1


def test_numbers_in_costs_stay_those_of_a_stage_to_the_bit(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text("F = 0.1\nI = 0.1\nW = 0.1\n")
    done = run("simulate", "gpipe", "-d", "3", "-m", "1", "--costs", "costs.toml", "--json", cwd=tmp_path)
    plan = stretto.schedules.gpipe(devices=3, microbatches=1)
    assert json.loads(done.stdout)["makespan"] == stretto.simulate(plan, stretto.Costs(F=0.1, I=0.1, W=0.1)).makespan


def test_the_lines_for_pairs_in_the_example_may_be_uncommented(tmp_path: Path) -> None:
    text = Path(PHASES).read_text()
    assert "\n# [woven] " in text
    before, woven = text.split("\n# [woven] ")
    (tmp_path / "costs.toml").write_text(before + "\n[woven] " + woven.replace("\n# ", "\n"))
    given = ("--layers", "moe*8", "-m", "8", "--json")
    for schedule, longer in (("1f1b", False), ("dualpipev", True)):
        alone, paired = (
            json.loads(run("simulate", schedule, *given, "--costs", costs, cwd=tmp_path).stdout)["makespan"]
            for costs in (PHASES, "costs.toml")
        )
        assert (paired > alone) == longer


def test_compare_draws_and_takes_traces(tmp_path: Path) -> None:
    run("show", "dualpipe", "-o", "mine.trace.json", cwd=tmp_path)
    done = run("compare", "mine.trace.json", "1f1b", "-o", "both.svg", cwd=tmp_path)
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [
        ["mine.trace.json", "26"],
        ["one_f_one_b", "33"],
    ]
    assert "mine.trace.json: 26, 7.7% idle" in (tmp_path / "both.svg").read_text()


def test_compare_says_where_sizes_differ(tmp_path: Path) -> None:
    run("show", "gpipe", "-m", "16", "-o", "long.trace.json", cwd=tmp_path)
    run("show", "zb_v", "-o", "stages.trace.json", cwd=tmp_path)
    (tmp_path / "small.csv").write_text(str(gpipe(devices=2, microbatches=4)))
    said = "note: sizes differ, and times are compared as they are: "
    done = run("compare", "long.trace.json", "1f1b", "gpipe", cwd=tmp_path)
    assert done.stderr == f"{said}long.trace.json: 16 microbatches; one_f_one_b, gpipe: 8 microbatches\n"
    assert done.stdout.splitlines()[0].split()[:3] == ["schedule", "microbatches", "makespan"]
    assert done.stdout.splitlines()[-1].split()[:2] == ["long.trace.json", "16"]
    done = run("compare", "gpipe", "small.csv", cwd=tmp_path)
    assert done.stderr == f"{said}gpipe: 4 devices and 8 microbatches; small.csv: 2 devices and 4 microbatches\n"
    done = run("compare", "stages.trace.json", "1f1b", "--json", cwd=tmp_path)
    assert done.stderr == f"{said}stages.trace.json: 8 stages; one_f_one_b: 4 stages\n"
    assert {(row["devices"], row["microbatches"]) for row in json.loads(done.stdout)} == {(4, 8)}
    assert run("compare", "zb_v", "1f1b").stderr == ""


def test_seconds_are_compared_with_seconds(tmp_path: Path) -> None:
    run("show", "1f1b", "--costs", "unit=s,F=0.5,I=0.5,W=0.5", "-o", "mine.trace.json", cwd=tmp_path)
    done = run("compare", "mine.trace.json", "gpipe", "--costs", "unit=s,F=1,I=1,W=1", cwd=tmp_path)
    assert done.stdout.startswith("schedule        makespan, s ")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["mine.trace.json", "gpipe"]
    assert done.stderr == ""
    assert run("compare", "mine.trace.json", "--fit", cwd=tmp_path).returncode == 0


def test_copies_that_take_no_time_are_said_to(tmp_path: Path) -> None:
    (tmp_path / "host.toml").write_text("activation_bytes = 30\n[host]\nbandwidth = 100\n")
    note = "note: copies to and from host memory take no time with these costs; "
    for command in (("simulate", "gpipe"), ("show", "gpipe"), ("compare",), ("show", "gpipe", "-o", "x.trace.json")):
        free = run(*command, "--offload", "1", cwd=tmp_path)
        assert (free.returncode, free.stderr.count("\n")) == (0, 1)
        assert free.stderr.startswith(note)
        assert run(*command, "--offload", "1", "--costs", "host.toml", cwd=tmp_path).stderr == ""
        assert run(*command, cwd=tmp_path).stderr == ""


def test_tables_are_whole_when_piped() -> None:
    done = run("compare", "-d", "4", "-m", "16", "--layers", "embedding,moe*14,loss", "--costs", PHASES)
    assert "…" not in done.stdout


def test_a_number_and_a_list_mean_the_same(tmp_path: Path) -> None:
    """A cost is that of a slice of the model, of which there are as many as the lists have entries."""
    (tmp_path / "mixed.toml").write_text("F = [1, 1, 1, 1, 1, 1, 1, 1]\nI = 1\nW = 1\n")
    (tmp_path / "lists.toml").write_text("\n".join(f"{op} = [1, 1, 1, 1, 1, 1, 1, 1]" for op in "FIW"))
    tables = [run("compare", "--costs", costs, cwd=tmp_path).stdout for costs in ("mixed.toml", "lists.toml")]
    assert tables[0] == tables[1]
    (tmp_path / "four.toml").write_text("F = [1, 1, 1, 1]\n")
    assert run("compare", "--costs", "four.toml", cwd=tmp_path).stdout == run("compare").stdout


def test_bandwidths_in_seconds_have_units(tmp_path: Path) -> None:
    table = 'unit = "s"\nF = 1\nI = 1\nW = 1\nmessage_bytes = "2GB"\n[link]\nbandwidth = {}\n'
    (tmp_path / "words.toml").write_text(table.format('"1GB/s"'))
    (tmp_path / "numbers.toml").write_text(table.format("1e9"))
    shown = [
        run("simulate", "gpipe", "--costs", costs, cwd=tmp_path).stdout for costs in ("words.toml", "numbers.toml")
    ]
    assert shown[0] == shown[1]
    assert "makespan 52 s" in shown[0]


def test_an_unsound_schedule_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        SCHEDULES, "gpipe", replace(SCHEDULES["gpipe"], make=lambda **_: stretto.parse_plan("0F0,0B0\n1B0,1F0"))
    )
    refused = run("simulate", "gpipe", "-d", "2", "-m", "1")
    assert refused.stderr.startswith("stretto: gpipe is not sound: dependencies: 1B0 comes before 1F0 on device 1")
    refused = run("simulate", "gpipe", "-d", "2", "-m", "2")
    assert "was to plan 2 devices and 2 microbatches, but its plan has 2 and 1" in refused.stderr
    assert (refused.returncode, refused.stdout) == (2, "")
    monkeypatch.setitem(SCHEDULES, "gpipe", replace(SCHEDULES["gpipe"], make=lambda **_: None))  # type: ignore[arg-type,return-value]
    refused = run("simulate", "gpipe")
    assert (refused.returncode, refused.stderr) == (2, "stretto: gpipe returns no Plan (got None)\n")


def test_buckets_are_counted_exactly() -> None:
    for size, bucket in (("4.03GB", "0.31GB"), ("4.07GB", "0.11GB"), ("8.05GB", "0.35GB")):
        whole = [f"{round(float(text[:-2]) * 1000)}MB" for text in (size, bucket)]
        exact, found = (
            json.loads(run(*UPDATE, "-d", "1", "--size", a, "--bucket", b, "--json").stdout)
            for a, b in (whole, (size, bucket))
        )
        assert found == exact


def test_a_file_with_other_devices_has_the_same_model(tmp_path: Path) -> None:
    one_f_one_b(devices=4, microbatches=8).save(tmp_path / "four.csv")
    (tmp_path / "lists.toml").write_text("\n".join(f"{op} = [1, 1, 1, 1, 1, 1, 1, 1]" for op in "FIW"))
    ways = ("F=1,I=1,W=1", "lists.toml")
    rows = [
        json.loads(run("compare", "1f1b", "four.csv", "-d", "8", "--costs", way, "--json", cwd=tmp_path).stdout)
        for way in ways
    ]
    assert rows[0] == rows[1]
    assert rows[0][1]["makespan"] == 2 * 33


def test_sums_of_equal_times_may_differ_in_their_last_bits() -> None:
    assert run("simulate", "gpipe", "--costs", "F=0.1,I=0.1,W=0.2,FB=0.3").returncode == 0


def test_the_output_may_be_full() -> None:
    with (
        mock.patch.object(out, "print", side_effect=OSError(28, "No space left on device")),
    ):
        done = run("show")
    assert (done.returncode, done.stderr) == (2, "stretto: cannot write the output: No space left on device\n")


def test_show_prints_json() -> None:
    schedules = json.loads(run("show", "--json").stdout)
    assert [schedule["name"] for schedule in schedules] == list(SCHEDULES)
    assert schedules[0]["bubble"] == "(p−1)(F+B)"
    trace = json.loads(run("show", "dualpipe", "--json").stdout)
    assert trace["otherData"]["stretto"]["microbatches"] == 8


def test_simulate_draws(tmp_path: Path) -> None:
    done = run("simulate", "gpipe", "-o", "x.trace.json", cwd=tmp_path)
    assert done.stdout.endswith("wrote x.trace.json\n")
    assert stretto.load_timeline(tmp_path / "x.trace.json").makespan == 33


def test_lists_of_slices_fit_schedules_of_any_stages_in_phases(tmp_path: Path) -> None:
    (tmp_path / "slices.toml").write_text("F = [1, 2, 3, 4]\nI = [1, 2, 3, 4]\nW = [1, 2, 3, 4]\n")
    done = run("compare", "--layers", "moe*8", "--costs", "slices.toml", cwd=tmp_path)
    assert done.stderr == ""


def test_a_copy_may_have_more_time_than_there_is() -> None:
    assert run("show", "gpipe", "--offload", "99999999999999999999").returncode == 0


def test_times_too_small_to_draw_are_no_error() -> None:
    assert run("show", "gpipe", "--costs", "F=1e-310,I=1e-310,W=1e-310").returncode == 0


def test_compare_shows_exposed_copies(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text("activation_bytes = 30\n[host]\nbandwidth = 10\n")
    done = run("compare", "gpipe", "--costs", "slow.toml", "--offload", "1", cwd=tmp_path)
    headings, figures = (line.split() for line in done.stdout.splitlines())
    assert headings[-2:] == ["copy", "bytes"]
    assert float(figures[-2]) > 0


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"stretto {stretto.__version__}\n"
