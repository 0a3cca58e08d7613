"""`stretto simulate`: time, bubbles and memory of a schedule."""

from typing import Annotated

import msgspec
import typer

from stretto.cli.console import number, out, print_table, working
from stretto.cli.inputs import (
    CostsOption,
    Devices,
    Json,
    Layers,
    LowerOptions,
    Microbatches,
    Offload,
    Overlap,
    Recompute,
    Sizes,
    StagesPerDevice,
    WgradMicrobatches,
    note_free_copies,
    read_costs,
    training_of,
)
from stretto.ir.units import bytes_text
from stretto.timeline import Summary, Timeline
from stretto.timeline.units import time_text


def simulate(
    name: Annotated[str, typer.Argument(help="A schedule, or a CSV, JSON or trace file.")],
    devices: Devices = None,
    microbatches: Microbatches = None,
    stages_per_device: StagesPerDevice = None,
    overlap: Overlap = False,
    costs: CostsOption = None,
    layers: Layers = None,
    offload: Offload = 0,
    recompute: Recompute = False,
    wgrad_microbatches: WgradMicrobatches = 1,
    json: Json = False,
) -> None:
    """Simulate a schedule: time, bubbles and memory of each device.

    Costs are per stage: with two stages per device, halve them to compare with one.

    bubble is the makespan minus busy. exposed is idle time spent waiting for a running transfer, comm
    for a running dispatch or combine, copy for a running copy to or from host memory. For a measured
    trace, host late is idle time because a host had not issued the next task. activations, I to W
    (passes between I and W) and bytes are peaks.

    Examples:

      stretto simulate dualpipe --devices 8 --microbatches 20

      stretto simulate zb_h1 -d 4 -m 12 --costs F=1,I=1.1,W=0.9 --json

      stretto simulate interleaved --overlap --layers 'embedding,moe*14,loss' --costs examples/phases.toml
    """
    table = read_costs(costs)
    with working(f"simulating {name}"):
        sizes = Sizes(devices, microbatches, stages_per_device, overlap)
        options = LowerOptions(layers, offload, recompute, wgrad_microbatches)
        timeline = training_of(name, sizes, options, table)
        summary = timeline.summary(table.costs)
    note_free_copies(options, [timeline])
    if json:
        out.print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    else:
        _print(summary, timeline)


def _print(summary: Summary, timeline: Timeline) -> None:
    recorded = timeline.issued is not None
    rows = [
        [
            str(index),
            number(device.busy),
            number(device.span),
            number(device.bubble),
            number(device.exposed_transfer),
            number(device.exposed_comm),
            number(device.exposed_copy),
            *[number(device.host_late)] * recorded,
            str(device.peak_activations),
            str(device.peak_pending),
            "–" if device.peak_bytes is None else bytes_text(device.peak_bytes),
        ]
        for index, device in enumerate(summary.devices)
    ]
    names = ("busy", "span", "bubble", "exposed", "comm", "copy", *["host late"] * recorded)
    times = [f"{name}, s" if timeline.unit else name for name in names]
    print_table(["device", *times, "activations", "I to W", "bytes"], rows)
    out.print(f"\nmakespan {time_text(summary.makespan, timeline.unit)}, bubble {summary.bubble_ratio:.1%}")
    path = [str(span.task).removesuffix("OVERLAP_F_B") for span in timeline.critical_path() if span.end > span.start]
    shown = path if len(path) <= 24 else [*path[:12], "…", *path[-11:]]
    out.print(f"critical path, {len(path)} tasks: {' '.join(shown)}")
