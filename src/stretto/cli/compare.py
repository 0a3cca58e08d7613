"""`stretto compare`: schedules side by side."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stretto.cli.console import err, number, out, print_table, size_text, working
from stretto.cli.inputs import (
    CostsOption,
    CostTable,
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
    is_file,
    is_trace,
    note_free_copies,
    read_costs,
    read_program,
    training_of,
)
from stretto.costs import Costs, SharedResource
from stretto.draw import draw_comparison
from stretto.ir.errors import CostError, PlanError, StrettoError
from stretto.ir.units import bytes_text
from stretto.program.program import Program
from stretto.schedules.registry import SCHEDULES, schedule_named
from stretto.simulate import simulate
from stretto.timeline import Summary, Timeline
from stretto.timeline import fit as fit_costs


class Comparison(msgspec.Struct, frozen=True):
    """One schedule's figures: per device, the worst one's; activations and parameters count p-ths of the model."""

    name: str
    devices: int
    microbatches: int
    makespan: float
    bubble_ratio: float
    span_bubble: float
    """Idle time between a device's first start and last end."""
    exposed_transfer: float
    exposed_comm: float
    exposed_copy: float
    host_late: float
    peak_activations: float
    peak_pending: float
    parameters: float
    peak_bytes: float | None
    """By the costs."""
    peak_allocated: float | None
    """As recorded."""


def compare(
    names: Annotated[
        list[str] | None, typer.Argument(help="Schedules, and CSV, JSON or trace files; without any, all schedules.")
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
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw all of them on one time scale, as .svg or .png.")
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Also simulate each trace with costs fitted to it, and print the error."),
    ] = False,
    together: Annotated[
        bool, typer.Option("--together", help="With --fit: fit one cost table to all traces, which are of one model.")
    ] = False,
    cores: Annotated[
        int | None, typer.Option(min=1, help="With --fit: the devices were processes that shared this many CPU cores.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare schedules at the same sizes and costs.

    All schedules do the same work: costs are those of equal slices of the model, and each schedule's
    stages take their share. There are p slices, or as many as lists in a file have entries; a number
    is the cost of each of them.

    bubble is idle time over the step. All other columns after it show the worst device. in span: idle
    time between its first start and last end. activations, I to W (passes between I and W), params and
    bytes: the most it holds. exposed: transfer time not hidden by compute; comm: the same for dispatch
    and combine; copy: for copies to and from host memory. host late: idle time because the host of a
    measured run had not issued the next task. allocated: the most bytes that were allocated in it after
    any task; if the costs give bytes too, a line below the table says how far off they are.

    A .trace.json is compared as recorded; --fit adds a simulation with costs fitted to it, or with
    --together to all traces: their times in pairs and outside of them. Measured times are in seconds
    and compare only with costs in seconds (unit=s). Below the table: schedules that cannot be made at
    these sizes, and files with other sizes.

    Examples:

      stretto compare --devices 8 --microbatches 32

      stretto compare 1f1b zb_h1 dualpipe mine.csv -d 8 -m 32 --costs F=1,B=2,FB=2.6

      stretto compare -d 8 -m 32 -o compared.png

      stretto compare measured.trace.json --fit --cores 2

      stretto compare measured.trace.json --costs activation_bytes=2GB,parameter_bytes=8GB

      stretto compare 1f1b.trace.json dualpipe.trace.json --fit --together
    """
    if (fit and not any(map(is_trace, names or []))) or ((cores is not None or together) and not fit):
        raise PlanError("--fit goes with a .trace.json, and --cores and --together with --fit")
    table = read_costs(costs)
    if output is not None and output.suffix.lower() not in (".svg", ".png"):
        raise PlanError(f"-o draws .svg or .png (got {output})")
    options = LowerOptions(layers, offload, recompute, wgrad_microbatches)
    simulated = not names or not all(map(is_trace, names))  # whether costs and options apply to anything
    timelines, refused = {}, []
    given = Sizes(devices, microbatches, stages_per_device, overlap, mesh)
    targets = _targets(names or [], given)
    slices = _slices(targets, given)
    for name, sizes in targets:
        label = name + " +overlap" * sizes.overlap
        with working(f"simulating {label}"):
            try:
                arguments = (
                    (LowerOptions(), CostTable(table.costs)) if simulated and is_trace(name) else (options, table)
                )
                timelines[label] = training_of(name, sizes, *arguments, slices=slices)
            except StrettoError as error:
                reason = str(error) if name in str(error) else f"{label}: {error}"
                if names:
                    raise type(error)(reason) from None
                refused.append(reason)
    if not timelines:
        raise PlanError(f"none of the schedules can be compared; {refused[0]}")
    _validate_one_unit(timelines)
    note_free_copies(options, timelines.values())
    sizes_differ = _differing_sizes(timelines)
    traces = {name: timeline for name, timeline in timelines.items() if fit and is_trace(name)}
    fitted = {
        name: _simulated(timeline.program, fit_costs(*(traces.values() if together else [timeline])), cores)
        for name, timeline in traces.items()
    }
    timelines |= {f"{name}, fitted": timeline for name, timeline in fitted.items()}
    summaries = {
        name: timeline.summary(costs_of(table.costs, timeline.program.placement.stages, slices=slices))
        for name, timeline in timelines.items()
    }
    rows = [_compared(name, timeline.program, summaries[name], slices) for name, timeline in timelines.items()]
    ranked = sorted(rows, key=lambda row: row.makespan)
    if output is not None:
        with working(f"writing {output}"):
            draw_comparison({row.name: timelines[row.name] for row in ranked}, output)
    if json:
        out.print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        _print(ranked, seconds=any(timeline.unit == "s" for timeline in timelines.values()))
        for name, timeline in fitted.items():
            off = timeline.makespan / timelines[name].makespan - 1
            out.print(f"{name}: a simulation with the costs fitted to {'all' if together else 'it'} is {off:+.1%} off")
        for row in rows:
            if line := _bytes_off(row, summaries[row.name]):
                out.print(line)
        if output is not None:
            out.print(f"wrote {output}")
    if sizes_differ:
        err.print(f"note: sizes differ, and times are compared as they are: {sizes_differ}")
    for reason in refused:
        err.print(f"left out: {reason}")


def _validate_one_unit(timelines: dict[str, Timeline]) -> None:
    seconds = [name for name, timeline in timelines.items() if timeline.unit == "s"]
    others = [name for name, timeline in timelines.items() if timeline.unit is None]
    if seconds and others:
        way = "give the costs in seconds, with unit=s"
        if is_trace(others[0]):
            way = 'if it was measured, write "unit": "s" into its otherData.stretto'
        raise CostError(f"{seconds[0]} is in seconds, but {others[0]} is not said to be; {way}")


def _differing_sizes(timelines: dict[str, Timeline]) -> str:
    """Return the devices, stages and microbatches of each timeline, as far as they differ; "" if they do not.

    Simulations cut one model into any number of stages, so stages matter only if there are traces.
    """
    placements = {name: timeline.program.placement for name, timeline in timelines.items()}
    kinds = ("devices", "stages", "microbatches") if any(map(is_trace, timelines)) else ("devices", "microbatches")
    differing = [kind for kind in kinds if len({getattr(placement, kind) for placement in placements.values()}) > 1]
    groups: dict[str, list[str]] = {}
    for name, placement in placements.items():
        size = " and ".join(f"{getattr(placement, kind)} {kind}" for kind in differing)
        groups.setdefault(size, []).append(name)
    return "; ".join(f"{', '.join(names)}: {size}" for size, names in groups.items()) if differing else ""


def _simulated(program: Program, costs: Costs, cores: int | None) -> Timeline:
    """Simulate a program with fitted costs, on devices that share CPU cores."""
    shared = {} if cores is None else {"cores": SharedResource(cores, {"compute": 1}, devices=program.devices)}
    return simulate(program, msgspec.structs.replace(costs, shared=shared))


def _targets(names: list[str], sizes: Sizes) -> list[tuple[str, Sizes]]:
    """Return what to compare, each with the sizes that apply to it."""
    if names and sizes.given() and all(map(is_file, names)):
        raise PlanError("files have their own sizes; --devices, --mesh and the like go with a schedule's name")
    plain = replace(sizes, stages_per_device=None, overlap=False)
    targets = []
    for name in names or SCHEDULES:
        if is_file(name):
            targets.append((name, Sizes()))
        elif not (schedule := schedule_named(name)).variable:
            targets.append((schedule.name, plain))
        elif names:
            targets.append((schedule.name, sizes))
        else:
            targets += [(schedule.name, replace(sizes, overlap=woven)) for woven in (False, True)]
    if sizes != plain and not any(name in SCHEDULES and SCHEDULES[name].variable for name, _ in targets):
        raise PlanError("--stages-per-device and --overlap go with interleaved, which is not compared here")
    return targets


def _slices(targets: list[tuple[str, Sizes]], sizes: Sizes) -> int:
    """Return p, the number of slices of the model: a pipeline's devices, of named schedules or of the first file."""
    if sizes.given() or not all(is_file(name) for name, _ in targets):
        return max(1, sizes.pipeline_devices)
    placement = read_program(Path(targets[0][0])).placement
    return placement.devices if placement.mesh is None else placement.mesh.pp


def _compared(name: str, program: Program, summary: Summary, slices: int) -> Comparison:
    share = slices / program.placement.stages  # how much of a p-th of the model a stage is
    return Comparison(
        name=name,
        devices=program.devices,
        microbatches=program.placement.microbatches,
        makespan=summary.makespan,
        bubble_ratio=summary.bubble_ratio,
        span_bubble=max(device.span - device.busy for device in summary.devices),
        exposed_transfer=max(device.exposed_transfer for device in summary.devices),
        exposed_comm=max(device.exposed_comm for device in summary.devices),
        exposed_copy=max(device.exposed_copy for device in summary.devices),
        host_late=max(device.host_late for device in summary.devices),
        peak_activations=max(device.peak_activations for device in summary.devices) * share,
        peak_pending=max(device.peak_pending for device in summary.devices) * share,
        parameters=max(Counter(device for device, _ in program.placement.homes).values()) * share,
        peak_bytes=_most(device.peak_bytes for device in summary.devices),
        peak_allocated=_most(device.peak_allocated for device in summary.devices),
    )


def _most(sizes: Iterable[float | None]) -> float | None:
    return max((size for size in sizes if size is not None), default=None)


def _bytes_off(row: Comparison, summary: Summary) -> str:
    """Return how far the costs' peak is off the one recorded, in words; "" if one of them is missing."""
    if row.peak_bytes is None or not row.peak_allocated:
        return ""
    off = row.peak_bytes / row.peak_allocated - 1
    by_device = [
        device.peak_bytes / device.peak_allocated - 1
        for device in summary.devices
        if device.peak_bytes is not None and device.peak_allocated
    ]
    between = f" (by device {min(by_device):+.1%} to {max(by_device):+.1%})" if len(by_device) > 1 else ""
    return (
        f"{row.name}: the costs' peak of {bytes_text(row.peak_bytes)} is {off:+.1%} off the "
        f"{bytes_text(row.peak_allocated)} allocated{between}"
    )


def _print(rows: list[Comparison], *, seconds: bool) -> None:
    # Leave out columns that are the same, or empty, in all rows.
    devices, microbatches = len({row.devices for row in rows}) > 1, len({row.microbatches for row in rows}) > 1
    exposed, comm = any(row.exposed_transfer for row in rows), any(row.exposed_comm for row in rows)
    copy, late = any(row.exposed_copy for row in rows), any(row.host_late for row in rows)
    sized, counted = (any(getattr(row, name) is not None for row in rows) for name in ("peak_bytes", "peak_allocated"))
    headings = ["schedule", *["devices"] * devices, *["microbatches"] * microbatches]
    headings += ["makespan, s" if seconds else "makespan", "bubble", "in span", "activations", "I to W", "params"]
    print_table(
        [
            *headings,
            *["exposed"] * exposed,
            *["comm"] * comm,
            *["copy"] * copy,
            *["host late"] * late,
            *["bytes"] * sized,
            *["allocated"] * counted,
        ],
        [
            [
                row.name,
                *[str(row.devices)] * devices,
                *[str(row.microbatches)] * microbatches,
                number(row.makespan),
                f"{row.bubble_ratio:.1%}",
                number(row.span_bubble),
                number(row.peak_activations),
                number(row.peak_pending),
                f"{row.parameters:g}×",
                *[number(row.exposed_transfer)] * exposed,
                *[number(row.exposed_comm)] * comm,
                *[number(row.exposed_copy)] * copy,
                *[number(row.host_late)] * late,
                *[size_text(row.peak_bytes)] * sized,
                *[size_text(row.peak_allocated)] * counted,
            ]
            for row in rows
        ],
    )
