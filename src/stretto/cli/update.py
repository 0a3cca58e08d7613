"""`stretto update`: how long a weight update takes in each mode."""

import math
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stretto.cli.console import number, out, print_table, working
from stretto.cli.inputs import CostsOption, Json, read_costs, size_with_unit, write_figure
from stretto.costs import BucketTimes, Costs
from stretto.draw import draw_rich, draw_text
from stretto.ir.errors import CostError, PlanError
from stretto.program.update import MODES, weight_update
from stretto.simulate import simulate
from stretto.timeline import Timeline

LARGEST = 2_000_000  # tasks
_DRAWN = 160  # tasks; more do not fit a terminal


class Update(msgspec.Struct, frozen=True):
    """One mode's figures."""

    mode: str
    seconds: float
    gb_per_second: float
    """The rate at which the whole model reaches every device."""
    busy: dict[str, float]
    """The share of the time that each step runs on the first device."""


def update(
    devices: Annotated[
        int, typer.Option("--devices", "-d", help="Devices, each with a shard of the model in host memory.")
    ] = 4,
    size: Annotated[str, typer.Option(help="Size of the model.")] = "16GB",
    bucket: Annotated[str, typer.Option(help="Size of a bucket, and so of each buffer.")] = "2GB",
    h2d: Annotated[str, typer.Option(help="Speed from host to device, for each device.")] = "50GB/s",
    broadcast: Annotated[str, typer.Option(help="Speed of a broadcast to all devices.")] = "100GB/s",
    reload: Annotated[str, typer.Option(help="Speed of loading a buffer into the engine's weights.")] = "200GB/s",
    mode: Annotated[str, typer.Option(help="The mode to draw: serial, two or three (stages overlapped).")] = "two",
    costs: CostsOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw FILE: .svg, .png, or .trace.json for Perfetto.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate a weight update: host to device, broadcast, reload, in buckets.

    Compares all three modes and draws one. serial runs one step after the other; two overlaps broadcast
    and reload (Kimi K2's figure); three also overlaps copies from the host, and needs a second H2D
    buffer. The last bucket counts as full. --costs gives only shared resources, e.g. a PCIe link.

    Examples:

      stretto update --devices 8 --size 1000GB --bucket 4GB --h2d 50GB/s --broadcast 100GB/s --reload 200GB/s

      stretto update --mode three -o update.svg
    """
    if mode not in MODES:
        raise PlanError(f"--mode is one of {', '.join(MODES)} (got {mode!r:.40})")
    total, each = (_positive(name, text) for name, text in (("size", size), ("bucket", bucket)))
    speeds = {"h2d": h2d, "broadcast": broadcast, "reload": reload}
    if devices < 1 or math.ceil(total / each) * (2 * devices + 1) > LARGEST:
        raise PlanError(f"{devices} devices × {total / each:.0f} buckets: stay between 1 device and {LARGEST:,} tasks")
    buckets = math.ceil(total / each)
    times = BucketTimes(**{name: each / _positive(name, text, per="/s") for name, text in speeds.items()})
    table = Costs(unit="s", bucket=times, shared=read_costs(costs).costs.shared)
    with working("simulating the update"):
        timelines = {
            name: simulate(weight_update(devices=devices, buckets=buckets, mode=name), table) for name in MODES
        }
    rows = [
        Update(name, timeline.makespan, total / timeline.makespan / 1e9, _busy(timeline))
        for name, timeline in timelines.items()
    ]
    drawn = timelines[mode]
    if output is not None:
        with working(f"writing {output}"):
            write_figure(drawn, output)
    if json:
        out.print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    print_table(
        ["mode", "seconds", "GB/s", *rows[-1].busy],
        [
            [
                row.mode,
                number(row.seconds),
                f"{row.gb_per_second:.1f}",
                *(f"{row.busy.get(k, 0):.0%}" for k in rows[-1].busy),
            ]
            for row in rows
        ],
    )
    out.print(
        f"\n{buckets} buckets in {math.ceil(buckets / devices)} rounds; columns: how much of the time each step runs"
    )
    if output is not None:
        out.print(f"wrote {output}")
    elif len(drawn.program) <= _DRAWN:
        coloured = out.is_terminal and not out.no_color
        out.print((draw_rich if coloured else draw_text)(drawn, width=out.width))


def _positive(name: str, text: str, *, per: str = "") -> float:
    value = size_with_unit(f"--{name}", text, per=per)
    if not 1 <= value <= 1e21:
        raise CostError(f"--{name} must be at least 1 byte{per} and at most 1e21 (got {text!r:.40})")
    return value


def _busy(timeline: Timeline) -> dict[str, float]:
    program, length = timeline.program, timeline.end - timeline.start
    return {
        lane.name: float(length[program.lane == index].sum()) / timeline.makespan
        for index, lane in enumerate(program.lanes)
        if lane.device == 0
    }
