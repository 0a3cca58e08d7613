"""`stretto show`: list the schedules, or draw one."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from stretto.cli.console import out, print_timeline, working
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
    costs_of,
    figure_kind,
    is_file,
    make_plan,
    note_free_copies,
    read_costs,
    timeline_of,
    write_figure,
)
from stretto.cli.update import is_weight_update
from stretto.ir.errors import PlanError
from stretto.ir.files import write_text
from stretto.ir.units import bytes_text
from stretto.program.lower import lower
from stretto.schedules.registry import SCHEDULES
from stretto.timeline.trace import trace_json
from stretto.timeline.units import time_text


def show(
    name: Annotated[
        str | None, typer.Argument(help="A schedule, or a CSV, JSON or trace file; without one, list the schedules.")
    ] = None,
    devices: Devices = None,
    microbatches: Microbatches = None,
    stages_per_device: StagesPerDevice = None,
    overlap: Overlap = False,
    mesh: MeshOption = None,
    costs: CostsOption = None,
    layers: Layers = None,
    offload: Offload = 0,
    recompute: Recompute = False,
    wgrad_microbatches: WgradMicrobatches = 1,
    lanes: Annotated[
        bool, typer.Option("--lanes", help="Draw a row each for computation, communication and offload.")
    ] = False,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="With -o FILE.svg or .png: draw each device's bytes, those allocated in a recorded step and those "
            "held by the costs.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write FILE: the order as .csv or .json, a figure as .svg or .png, or a .trace.json for Perfetto.",
        ),
    ] = None,
    transfers: Annotated[
        bool, typer.Option("--transfers", help="With -o FILE.csv: include sends and receives.")
    ] = False,
    width: Annotated[int | None, typer.Option(help="Columns to draw in. [default: the terminal's]")] = None,
    json: Json = False,
) -> None:
    """List the schedules, or draw one. With --json: their facts, or the trace that is drawn. Of a recorded step whose
    trace has the bytes allocated on each device, also print the most of them.

    Examples:

      stretto show

      stretto show dualpipe --devices 8 --microbatches 20

      stretto show interleaved --overlap -o k2.csv

      stretto show dualpipe -d 8 -m 20 -o dualpipe.svg

      stretto show interleaved --overlap --layers 'moe*8' --costs examples/phases.toml --offload 1 --lanes

      stretto show measured.trace.json --memory -o measured.svg
    """
    sizes = Sizes(devices, microbatches, stages_per_device, overlap, mesh)
    options = LowerOptions(layers, offload, recompute, wgrad_microbatches)
    if name is None:
        if sizes.given() or options.given() or output or costs or lanes or memory or transfers or width is not None:
            raise PlanError("name a schedule to draw or write; stretto show alone lists them")
        _list(json=json)
    elif is_weight_update(name):
        raise PlanError("stretto simulate weight_update draws a weight update, with -o FILE as a figure")
    elif output is not None:
        if lanes and figure_kind(output) not in (".svg", ".png"):
            raise PlanError("--lanes goes with drawings; a trace has all lanes, and an order none")
        if memory and figure_kind(output) not in (".svg", ".png"):
            raise PlanError("--memory goes with -o FILE.svg or .png; a trace always has it, and an order never")
        if json:
            raise PlanError("--json prints a trace; -o FILE.trace.json writes one (give one of the two)")
        if width is not None:
            raise PlanError("--width is for drawing on a terminal; leave it out with -o")
        if transfers and figure_kind(output) != ".csv":
            raise PlanError("--transfers goes with -o FILE.csv")
        with working(f"writing {output}"):
            _write(name, sizes, options, output, transfers=transfers, costs=costs, lanes=lanes, memory=memory)
        out.print(f"wrote {output}")
    else:
        if transfers:
            raise PlanError("--transfers goes with -o FILE.csv")
        if memory:
            raise PlanError("--memory goes with -o FILE.svg or .png")
        if json and (lanes or width is not None):
            raise PlanError("--lanes and --width are for drawings; leave them out with --json")
        if width is not None and width < 20:
            raise PlanError(f"--width needs at least 20 columns (got {width})")
        with working(f"simulating {name}"):
            table = read_costs(costs)
            timeline = timeline_of(name, sizes, options, table)
            note_free_copies(options, [timeline])
            if json:
                out.print(trace_json(timeline, costs=costs_of(table.costs, timeline.program.placement.stages)))
                return
        print_timeline(timeline, width=width, lanes=lanes)
        out.print(f"time {time_text(timeline.makespan, timeline.unit)} →")
        if (allocated := timeline.allocated_memory()) is not None:
            peaks = [f"{bytes_text(held.peak_bytes)} on device {device}" for device, held in enumerate(allocated)]
            out.print(f"peak allocated: {', '.join(peaks)}")


def _list(*, json: bool) -> None:
    if json:
        facts = [
            {field.name: getattr(schedule, field.name) for field in fields(schedule) if field.name != "make"}
            for schedule in SCHEDULES.values()
        ]
        out.print(msgspec.json.format(msgspec.json.encode(facts)).decode())
        return
    for schedule in SCHEDULES.values():
        out.print(Text(schedule.name, style="bold").append(f"  {schedule.meaning}", style="not bold"))
        for what in ("limits", "bubble", "memory"):
            out.print(f"    {what:<7} {getattr(schedule, what)}")
    out.print(
        "\np devices, m microbatches, v stages per device, device r; limits on p, m and costs; bubble and"
        "\nactivation memory of device r, in times and activations of a p-th of the model."
        "\nDraw one: stretto show dualpipe --devices 8 --microbatches 20"
    )


def _write(
    name: str,
    sizes: Sizes,
    options: LowerOptions,
    path: Path,
    *,
    transfers: bool,
    costs: str | None,
    lanes: bool,
    memory: bool,
) -> None:
    """Write an order as CSV or JSON, or a timeline as a figure or trace."""
    kind = figure_kind(path)
    if kind in (".svg", ".png", ".trace.json"):
        table = read_costs(costs)
        timeline = timeline_of(name, sizes, options, table)
        note_free_copies(options, [timeline])
        cut = costs_of(table.costs, timeline.program.placement.stages)
        write_figure(timeline, path, costs=cut, lanes=lanes, memory=memory)
        return
    if is_file(name):
        raise PlanError(f"-o draws a file as .svg, .png or .trace.json; its order is in {name} (got {path})")
    if costs is not None or options.given() or lanes:
        raise PlanError(
            f"{path} holds the order of a schedule's actions, and no costs, layers, lanes, copies or joined weight "
            "gradients; a .trace.json does"
        )
    match kind:
        case ".csv":
            plan = make_plan(name, sizes)
            if plan.placement.mesh is not None:
                raise PlanError(f"a .csv holds no mesh; write the order as .json (got {path})")
            write_text(path, str(lower(plan) if transfers else plan) + "\n")
        case ".json":
            make_plan(name, sizes).save(path)
        case _:
            raise PlanError(
                f"-o writes .csv, with or without --transfers, .json, .svg, .png or .trace.json (got {path})"
            )
