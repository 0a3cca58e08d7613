"""Draws the three figures that Stretto started from, out of its own programs: python examples/figures.py FOLDER

dualpipe.*          DeepSeek-V3's: two opposite pipelines over eight devices, twenty microbatches
overlap.*           Kimi K2's: interleaved 1F1B with one more warm-up forward, and three of its cells in phases
overlap_measured.*  the same from a recorded step, beside its simulation
weight_update.*     Kimi K2's: two rounds of host to device, broadcast and reload over four devices

Each as SVG and PNG.
"""

import gzip
import sys
from pathlib import Path

import stretto
from insets import draw_insets
from stretto import Costs, Plan, Timeline
from stretto.costs import BucketTimes, Link, PhaseTimes
from stretto.ir.mesh import MeshShape
from stretto.layers import MOE
from stretto.schedules import interleaved
from stretto.timeline.trace import parse_trace

RECORDING = Path(__file__).parent.parent / "docs" / "figures" / "overlap_measured.trace.json.gz"
"""A recorded step of `interleaved(overlap=True)` in phases, as `Timeline.save` writes it, compressed by `gzip -9n`."""


def dualpipe(path: Path) -> None:
    stretto.simulate(stretto.schedules.dualpipe(devices=8, microbatches=20)).save(path)


def overlap(path: Path) -> None:
    """Communication takes a little less than what hides it; sending on takes as long as the weight gradients."""
    compute, experts = PhaseTimes(F=1, I=1, W=0.7), PhaseTimes(F=0.85, I=0.85)
    costs = Costs(
        phases={"attn": compute, "mlp": compute, "dispatch": experts, "combine": experts},
        link=Link(latency=1.4),
        activation_bytes=2e9,
        host=Link(bandwidth=1e9),
    )
    plan = interleaved(devices=4, stages_per_device=2, microbatches=8, overlap=True)
    program = stretto.lower(plan, layers=[[MOE]] * plan.stages, costs=costs, offload=1)
    draw_insets(plan, stretto.simulate(plan), {"simulated": stretto.simulate(program, costs)}, path)


def overlap_measured(path: Path) -> None:
    """A recorded step, and the same program simulated with costs that are fitted to it."""
    measured = parse_trace(gzip.decompress(RECORDING.read_bytes()).decode())
    simulated = stretto.simulate(measured.program, stretto.fit(measured))
    draw_insets(recorded_plan(measured), measured, {"measured": measured, "simulated": simulated}, path)


def recorded_plan(timeline: Timeline) -> Plan:
    """Kimi K2's schedule on the mesh of a recorded step, with its stages and microbatches."""
    placement = timeline.program.placement
    mesh = placement.mesh or MeshShape.of({"pp": placement.devices})
    plan = interleaved(
        devices=mesh.pp,
        stages_per_device=placement.stages // mesh.pp,
        microbatches=placement.microbatches // mesh.replicas,
        overlap=True,
    )
    return plan.on_mesh(mesh)


def weight_update(path: Path) -> None:
    costs = Costs(bucket=BucketTimes(h2d=3, broadcast=1.2, reload=1))
    stretto.simulate(stretto.weight_update(devices=4, buckets=8), costs).save(path)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for draw in (dualpipe, overlap, overlap_measured, weight_update):
        for ending in ("svg", "png"):
            draw(folder / f"{draw.__name__}.{ending}")


if __name__ == "__main__":
    main()
