"""How well costs from two recorded steps predict other schedules: python benchmarks/moe/predict.py FOLDER

FOLDER has what `run.py --out` saves: timelines, and the median times of steps that were not recorded. Costs are fitted
to interleaved 1F1B, woven and not; and for comparison to each of the two alone. Where a schedule sums experts'
gradients over devices, which interleaved 1F1B does not, that takes as long by the byte as other sums.
"""

import argparse
from pathlib import Path

import msgspec
import torch
from k2_layers import CONFIG

import stretto
from stretto.model.blocks import MoeBlock
from stretto.moe.experts import experts_of
from stretto.timeline import Timeline

FITTED = ("interleaved", "interleaved-not-woven")


def experts_share(ranks: int) -> float:
    """How many times as many parameters a rank's experts of a layer have as the rest of it."""
    with torch.device("meta"):
        block = MoeBlock(CONFIG)
    experts = sum(weight.numel() for module in experts_of(block) for weight in module.parameters())
    return experts / ranks / (sum(weight.numel() for weight in block.parameters()) - experts)


def fitting(costs: stretto.Costs, timeline: Timeline) -> stretto.Costs:
    """The costs for as many stages as a timeline's plan has."""
    stages, devices, mesh = timeline.program.placement.stages, timeline.program.devices, timeline.program.placement.mesh
    assert mesh is not None
    costs = costs.for_stages(stages, devices=devices)
    reduce = costs.per_stage("reduce", stages=stages) * experts_share(mesh.ep)
    return msgspec.structs.replace(costs, reduce_experts=tuple(reduce.tolist()))


def table(timelines: dict[str, Timeline], measured: dict[str, float]) -> list[str]:
    """One row for each schedule, fastest first: its step time, and that of its simulation, with costs from each fit."""
    fits = {
        "both": stretto.fit(*(timelines[name] for name in FITTED)),
        "the woven one": stretto.fit(timelines[FITTED[0]]),
        "the other": stretto.fit(timelines[FITTED[1]]),
    }
    titles = " | ".join(f"predicted from {name}" for name in fits)
    lines = [f"| schedule | median, ms | recorded, ms | {titles} |", "|---" * (3 + len(fits)) + "|"]
    for name in sorted(measured, key=measured.__getitem__):
        timeline = timelines[name]
        predicted = [stretto.simulate(timeline.program, fitting(costs, timeline)).makespan for costs in fits.values()]
        columns = " | ".join(f"{time * 1e3:.0f} ({time / measured[name] - 1:+.1%})" for time in predicted)
        lines.append(f"| {name} | {measured[name] * 1e3:.0f} | {timeline.makespan * 1e3:.0f} | {columns} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what `run.py --out` has saved")
    folder = parser.parse_args().folder
    if not (folder / "medians.txt").is_file():
        parser.error(f"{folder} has no medians.txt, which run.py --out writes with the timelines")
    timelines: dict[str, dict[str, Timeline]] = {}
    medians: dict[str, dict[str, float]] = {}
    for line in (folder / "medians.txt").read_text().splitlines():
        file, median = line.split()
        run, _, name = file.partition("-ours-")
        timelines.setdefault(run, {})[name] = stretto.load_timeline(folder / f"{file}.trace.json")
        medians.setdefault(run, {})[name] = float(median)
    for run, recorded in timelines.items():
        if missing := [name for name in FITTED if name not in recorded]:
            print(f"\n{run}: not predicted, since {' and '.join(missing)} was not recorded")
        else:
            print(f"\n{run}\n", *table(recorded, medians[run]), sep="\n")


if __name__ == "__main__":
    main()
