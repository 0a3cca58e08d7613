"""How well costs from two recorded steps predict the others: python benchmarks/moe/predict.py FOLDER

FOLDER has the timelines that `run.py --out` saves for one mesh and routing. Costs are fitted to interleaved 1F1B, woven
and not; and for comparison to each of the two alone.
"""

import sys
from pathlib import Path

import numpy as np

import stretto
from stretto.timeline import Timeline

FITTED = ("interleaved", "interleaved-not-woven")


def table(timelines: dict[str, Timeline]) -> list[str]:
    """One row for each timeline: its step time, and that of its simulation, with costs from several fits."""
    fits = {
        "from both": stretto.fit(*(timelines[name] for name in FITTED)),
        "from the woven one": stretto.fit(timelines[FITTED[0]]),
        "from the other": stretto.fit(timelines[FITTED[1]]),
    }
    lines = [f"| recorded | ms | {' | '.join(f'{name}, ms' for name in fits)} |", "|---" * (2 + len(fits)) + "|"]
    measured = {name: timeline.makespan for name, timeline in timelines.items()}
    for name in sorted(measured, key=measured.__getitem__):
        predicted = [predicted_time(timelines[name], costs) for costs in fits.values()]
        columns = " | ".join(f"{time * 1e3:.1f} ({time / measured[name] - 1:+.1%})" for time in predicted)
        lines.append(f"| {name} | {measured[name] * 1e3:.1f} | {columns} |")
    return lines


def predicted_time(timeline: Timeline, costs: stretto.Costs) -> float:
    program = timeline.program
    fitting = costs.for_stages(program.placement.stages, devices=program.devices)
    return stretto.simulate(program, fitting).makespan


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    groups: dict[str, dict[str, Timeline]] = {}
    for file in sorted(Path(sys.argv[1]).glob("*.trace.json")):
        run, _, name = file.name.removesuffix(".trace.json").partition("-ours-")
        groups.setdefault(run, {})[name] = stretto.load_timeline(file)
    for run, timelines in groups.items():
        if not {*FITTED} <= timelines.keys():
            continue
        print(f"\n{run}\n", *table(timelines), sep="\n")
        times = np.array([timeline.makespan for timeline in timelines.values()])
        print(f"\nrecorded steps take {times.min() * 1e3:.0f} to {times.max() * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
