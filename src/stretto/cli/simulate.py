"""`stretto simulate`: time, bubbles and memory of a schedule; time of a weight update."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stretto.cli.console import number, out, print_table, size_text, working
from stretto.cli.inputs import (
    CostsOption,
    Devices,
    Json,
    Layers,
    LowerOptions,
    MeshOption,
    Microbatches,
    Offload,
    Overlap,
    Recompute,
    Sizes,
    StagesPerDevice,
    WgradMicrobatches,
    choice_of,
    costs_of,
    note_free_copies,
    read_costs,
    size_of,
    training_of,
    write_figure,
)
from stretto.cli.update import UpdateOptions, is_weight_update, simulate_update
from stretto.ir.errors import PlanError
from stretto.timeline import Summary, Timeline
from stretto.timeline.units import time_text


def simulate(
    name: Annotated[str, typer.Argument(help="A schedule, a CSV, JSON or trace file, or weight_update.")],
    devices: Devices = None,
    microbatches: Microbatches = None,
    stages_per_device: StagesPerDevice = None,
    overlap: Overlap = False,
    mesh: MeshOption = None,
    costs: CostsOption = None,
    layers: Layers = None,
    offload: Offload = 0,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="With --offload auto: offload only what keeps every device within this size, e.g. 60GB."),
    ] = None,
    recompute: Recompute = False,
    wgrad_microbatches: WgradMicrobatches = 1,
    size: Annotated[str | None, typer.Option(help="weight_update: size of the model. [default: 16GB]")] = None,
    bucket: Annotated[
        str | None, typer.Option(help="weight_update: size of a bucket, and so of each buffer. [default: 2GB]")
    ] = None,
    h2d: Annotated[
        str | None, typer.Option(help="weight_update: speed from host to device, for each device. [default: 50GB/s]")
    ] = None,
    broadcast: Annotated[
        str | None, typer.Option(help="weight_update: speed of a broadcast to all devices. [default: 100GB/s]")
    ] = None,
    reload: Annotated[
        str | None,
        typer.Option(help="weight_update: speed of loading a buffer into the engine's weights. [default: 200GB/s]"),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="weight_update: the mode to draw: serial, overlap_reload or overlap_all. [default: overlap_reload]"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw FILE: .svg, .png, or .trace.json for Perfetto.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate a schedule: time, bubbles and memory of each device. Or a weight update: its time in each mode.

    Costs are per stage: with two stages per device, halve them to compare with one. Lists in a file that were made for
    another number of stages, such as fitted costs, are cut anew, as compare does.

    bubble is the makespan minus busy. exposed is idle time spent waiting for a running transfer, comm
    for a running dispatch, combine or count of tokens, copy for a running copy to or from host memory. For a measured
    trace, host late is idle time because a host had not issued the next task, and allocated the most bytes that were
    allocated after any task. activations, I to W (passes between I and W) and bytes are peaks.

    weight_update copies a model from host to device, broadcasts it and reloads it, in buckets. serial
    runs one step after the other; overlap_reload overlaps broadcast and reload (Kimi K2's figure);
    overlap_all also overlaps copies from the host, and needs a second H2D buffer. The last bucket
    counts as full. --costs gives only shared resources, e.g. a PCIe link.

    --offload auto chooses how much of each stage's activations goes to host memory: as much as makes the step at most
    1 % longer, and with --memory-limit no more than that takes. It prints what it chose and why.

    Examples:

      stretto simulate dualpipe --devices 8 --microbatches 20

      stretto simulate zb_h1 -d 4 -m 12 --costs F=1,I=1.1,W=0.9 --json

      stretto simulate interleaved --overlap --layers 'embedding,moe*14,loss' --costs examples/phases.toml

      stretto simulate dualpipev --mesh pp=4,ep=2 -m 8 --layers 'moe*8' --costs examples/phases.toml

      stretto simulate interleaved --overlap --layers 'moe*8' --costs examples/phases.toml --offload auto

      stretto simulate weight_update --devices 8 --size 1000GB --bucket 4GB --h2d 50GB/s --mode overlap_all
    """
    table = read_costs(costs)
    sizes = Sizes(devices, microbatches, stages_per_device, overlap, mesh)
    options = LowerOptions(layers, offload, recompute, wgrad_microbatches)
    update = UpdateOptions(size=size, bucket=bucket, h2d=h2d, broadcast=broadcast, reload=reload, mode=mode)
    if is_weight_update(name):
        if sizes != Sizes(devices) or options.given() or memory_limit is not None:
            raise PlanError("weight_update takes --devices and sizes of its own; the other options go with a schedule")
        simulate_update(devices, update, table, output=output, json=json)
        return
    if update.given():
        raise PlanError(
            f"--size, --bucket, --h2d, --broadcast, --reload and --mode go with weight_update, not with {name}"
        )
    if memory_limit is not None and options.offload != "auto":
        raise PlanError("--memory-limit goes with --offload auto; stretto check --memory-limit checks a program")
    choice = None
    with working(f"simulating {name}"):
        if options.offload == "auto":
            limit = None if memory_limit is None else size_of("--memory-limit", memory_limit)
            choice, options, table = choice_of(name, sizes, options, table, limit=limit)
        timeline = training_of(name, sizes, options, table)
        cut = costs_of(table.costs, timeline.program.placement.stages)
        summary = timeline.summary(cut)
    note_free_copies(options, [timeline])
    if output is not None:
        with working(f"writing {output}"):
            write_figure(timeline, output, costs=cut)
    if json:
        fields = msgspec.to_builtins(summary) | ({} if choice is None else {"memory_choice": choice})
        out.print(msgspec.json.format(msgspec.json.encode(fields)).decode())
        return
    if choice is not None:
        out.print(f"{choice}\n")
    _print(summary, timeline)
    if output is not None:
        out.print(f"wrote {output}")


def _print(summary: Summary, timeline: Timeline) -> None:
    recorded, counted = timeline.issued is not None, timeline.allocated is not None
    rows = [
        [
            timeline.program.placement.device_name(index),
            number(device.busy),
            number(device.span),
            number(device.bubble),
            number(device.exposed_transfer),
            number(device.exposed_comm),
            number(device.exposed_copy),
            *[number(device.host_late)] * recorded,
            str(device.peak_activations),
            str(device.peak_pending),
            size_text(device.peak_bytes),
            *[size_text(device.peak_allocated)] * counted,
        ]
        for index, device in enumerate(summary.devices)
    ]
    names = ("busy", "span", "bubble", "exposed", "comm", "copy", *["host late"] * recorded)
    times = [f"{name}, s" if timeline.unit else name for name in names]
    print_table(["device", *times, "activations", "I to W", "bytes", *["allocated"] * counted], rows)
    out.print(f"\nmakespan {time_text(summary.makespan, timeline.unit)}, bubble {summary.bubble_ratio:.1%}")
    path = [str(span.task).removesuffix("OVERLAP_F_B") for span in timeline.critical_path() if span.end > span.start]
    shown = path if len(path) <= 24 else [*path[:12], "…", *path[-11:]]
    out.print(f"critical path, {len(path)} tasks: {' '.join(shown)}")
