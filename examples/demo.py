"""Draws the three source figures and a comparison into out/ and says in ten lines what they show; then trains."""

import os
import subprocess
import sys
from pathlib import Path

import figures
import msgspec

import stretto
from stretto import Costs
from stretto.costs import parse_costs_toml

HERE = Path(__file__).parent
OUT = Path("out")


def tell(what: str, *lines: str) -> None:
    for line in lines:
        print(f"{what:<22} {line}")
        what = ""


def dualpipe() -> None:
    summary = stretto.simulate(stretto.dualpipe(devices=8, microbatches=20)).summary()
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
        (stretto.one_f_one_b(devices=4, microbatches=16), 0),
        (stretto.interleaved(devices=4, microbatches=16, overlap=True), 1),
    ):
        layers = stretto.cut_layers([stretto.EMBEDDING, *[stretto.MOE] * 14, stretto.LOSS], stages=plan.stages)
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
    costs = Costs(bucket=stretto.BucketTimes(h2d=3, broadcast=1.2, reload=1))
    serial, two, three = (
        stretto.simulate(stretto.weight_update(devices=4, buckets=8, mode=mode), costs).makespan
        for mode in ("serial", "two", "three")
    )
    tell(
        "out/weight_update.png",
        "Kimi K2's weight update: copy to the device, broadcast from each in turn, reload meanwhile;",
        f"{serial:g} one after the other, {two:g} as drawn, {three:g} with the copies overlapped too.",
    )


def comparison() -> None:
    costs = Costs(F=1, I=1, W=1, FB=2.7)
    timelines = {}
    for schedule in (stretto.one_f_one_b, stretto.zb_h1, stretto.zb_v, stretto.dualpipe, stretto.dualpipev):
        plan = schedule(devices=8, microbatches=32)
        timelines[schedule.__name__] = stretto.simulate(plan, costs.for_stages(plan.stages, devices=8))
    stretto.draw_comparison(timelines, OUT / "comparison.png")
    steps = ", ".join(f"{name} {timeline.makespan:g}" for name, timeline in timelines.items())
    tell("out/comparison.png", f"The same work on 8 devices: {steps}.")


def check() -> None:
    (violation,) = stretto.check(stretto.parse_plan("0F0,0B0\n1B0,1F0"))
    tell("stretto.check", "proves a plan sound before anything runs it, or says what is wrong:", str(violation))


def training() -> None:
    """Four processes on this machine train by DualPipe; their last step is measured."""
    trace = OUT / "training.trace.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "train.py"), "dualpipe", str(trace)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(f"training failed:\n{done.stderr}")
    measured = stretto.parse_trace(trace.read_text())
    cores = len(os.sched_getaffinity(0))
    shared = {"cores": stretto.Shared(cores, {"compute": 1}, devices=4)} if cores < 4 else {}
    simulated = stretto.simulate(measured.program, msgspec.structs.replace(stretto.fit(measured), shared=shared))
    stretto.draw_comparison({"simulated": simulated, "measured": measured}, OUT / "training.png")
    first, *_, last = (line.split("loss")[1].strip() for line in done.stdout.splitlines())
    took, predicted = 1e3 * measured.makespan, 1e3 * simulated.makespan
    tell(
        "out/training.png",
        f"4 processes on {cores} cores trained by DualPipe: loss {first} at first, {last} after 20 steps; the last one",
        f"took {took:.0f} ms, a simulation with costs fitted to it {predicted:.0f} ms ({predicted / took - 1:+.0%}).",
    )


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for draw in (figures.dualpipe, figures.overlap, figures.weight_update):
        draw(OUT / f"{draw.__name__}.png")
    for part in (dualpipe, overlap, weight_update, comparison, check, training):
        part()


if __name__ == "__main__":
    main()
