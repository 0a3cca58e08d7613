"""Draws the source figures into out/ and says what they show; then trains, pushes into live engines and generates."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

import figures
import stretto
from stretto import Costs
from stretto.costs import BucketTimes, SharedResource, parse_costs_toml
from stretto.layers import EMBEDDING, LOSS, MOE, cut_layers
from stretto.schedules import dualpipev, interleaved, one_f_one_b, zb_h1, zb_v

HERE = Path(__file__).parent
OUT = Path("out")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def tell(what: str, *lines: str) -> None:
    for line in lines:
        print(f"{what:<22} {line}")
        what = ""


def dualpipe() -> None:
    summary = stretto.simulate(stretto.schedules.dualpipe(devices=8, microbatches=20)).summary()
    held = summary.devices[0].peak_activations
    tell(
        "out/dualpipe.png",
        "DeepSeek-V3's DualPipe: microbatches enter at both ends, forward and backward woven in pairs;",
        f"8 devices idle {summary.bubble_ratio:.1%} of the step, holding {held} activations.",
    )


def overlap() -> None:
    costs = parse_costs_toml((HERE / "phases.toml").read_text())
    found = []
    for plan, offload in (
        (one_f_one_b(devices=4, microbatches=16), 0),
        (interleaved(devices=4, microbatches=16, overlap=True), 1),
    ):
        layers = cut_layers([EMBEDDING, *[MOE] * 14, LOSS], stages=plan.stages)
        fitted = costs.for_stages(plan.stages, devices=4)
        program = stretto.lower(plan, layers=layers, costs=fitted, offload=offload)
        summary = stretto.simulate(program, fitted).summary(fitted)
        exposed = max(device.exposed_comm for device in summary.devices) / summary.makespan
        found.append((f"{exposed:.0%}", f"{max(device.peak_bytes or 0 for device in summary.devices) / 1e6:.0f}"))
    (plain, held), (woven, left) = found
    tell(
        "out/overlap.png",
        "Kimi K2's interleaved 1F1B: one more warm-up forward makes each steady slot a pair, whose phases",
        f"hide each other's expert communication: {plain} of a step exposed in 1F1B, {woven} here;",
        f"activations stream to host memory and back: at most {left} MB held, not {held}.",
    )


def weight_update() -> None:
    costs = Costs(bucket=BucketTimes(h2d=3, broadcast=1.2, reload=1))
    serial, two, three = (
        stretto.simulate(stretto.weight_update(devices=4, buckets=8, mode=mode), costs).makespan
        for mode in ("serial", "overlap_reload", "overlap_all")
    )
    tell(
        "out/weight_update.png",
        "Kimi K2's weight update: copy to the device, broadcast from each in turn, reload meanwhile;",
        f"{serial:g} one after the other, {two:g} as drawn, {three:g} with the copies overlapped too.",
    )


def comparison() -> None:
    costs = Costs(F=1, I=1, W=1, FB=2.7)
    timelines = {}
    for schedule in (
        one_f_one_b,
        zb_h1,
        zb_v,
        stretto.schedules.dualpipe,
        dualpipev,
    ):
        plan = schedule(devices=8, microbatches=32)
        timelines[schedule.__name__] = stretto.simulate(plan, costs.for_stages(plan.stages, devices=8))
    stretto.draw_comparison(timelines, OUT / "comparison.png")
    steps = ", ".join(f"{name} {timeline.makespan:g}" for name, timeline in timelines.items())
    tell("out/comparison.png", f"The same work on 8 devices: {steps}.")


def check() -> None:
    (violation,) = stretto.check(stretto.parse_plan("0F0,0B0\n1B0,1F0"))
    tell("stretto.check", "proves a plan sound before anything runs it, or says what is wrong:", str(violation))


@contextlib.contextmanager
def started_engines() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two engines by the addresses where they take weights; they get ready while figures are drawn."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        engines = {}
        for address in (f"unix://{folder}/a", f"unix://{folder}/b"):
            command = [sys.executable, "-m", "mini_engine", "--address", address]
            engines[address] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
            running.callback(engines[address].terminate)
        yield engines


def loop(engines: Mapping[str, subprocess.Popen[str]]) -> None:
    """Four processes train, push into the running engines, and those generate; twice. The last of each is measured."""
    print()
    places = []
    for address, engine in engines.items():
        assert engine.stdout is not None
        said = engine.stdout.readline().split()
        if not said:
            sys.exit("an engine did not start")
        places.append(f"{address}={said[-1]}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(HERE / "loop.py"), *places], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"the loop failed:\n{done.stderr}")
    print()


def measured() -> None:
    """What the loop measured of its last step and its last push, beside what was predicted."""
    step, push = (stretto.load_timeline(OUT / f"{name}.trace.json") for name in ("training", "push"))
    cores = len(os.sched_getaffinity(0))
    shared = {"cores": SharedResource(cores, {"compute": 1}, devices=4)} if cores < 4 else {}
    simulated = stretto.simulate(step.program, msgspec.structs.replace(stretto.fit(step), shared=shared))
    stretto.draw_comparison({"simulated": simulated, "measured": step}, OUT / "training.png")
    push.save(OUT / "push.png")
    took, predicted = 1e3 * step.makespan, 1e3 * simulated.makespan
    tell(
        "out/training.png",
        f"the loop's last training step took {took:.0f} ms, a simulation with costs fitted to it {predicted:.0f} ms.",
    )
    tell("out/push.png", "its last push, measured: copy, broadcast from each in turn, reload into both engines.")


def main() -> None:
    OUT.mkdir(exist_ok=True)
    with started_engines() as engines:
        for draw in (figures.dualpipe, figures.overlap, figures.weight_update):
            draw(OUT / f"{draw.__name__}.png")
        for part in (dualpipe, overlap, weight_update, comparison, check):
            part()
        loop(engines)
    measured()


if __name__ == "__main__":
    main()
