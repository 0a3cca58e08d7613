"""`stretto compare`: schedules side by side."""

from collections import Counter
from typing import Annotated

import msgspec
import typer

from stretto.cli.console import err, number, out, table, working
from stretto.cli.inputs import (
    Cost,
    CostFile,
    Devices,
    Json,
    Microbatches,
    Overlap,
    Virtual,
    is_file,
    read_costs,
    sound_program,
)
from stretto.costs import Costs
from stretto.ir.errors import StrettoError
from stretto.program.program import Program
from stretto.schedules.catalogue import SCHEDULES, schedule_named
from stretto.simulate import simulate


class Row(msgspec.Struct, frozen=True):
    name: str
    makespan: float
    bubble_ratio: float
    span_bubble: float
    """The largest idle time within a device's own span."""
    exposed_transfer: float
    peak_activations: float
    """On the worst device, in p-ths of the model."""
    peak_pending: float
    parameters: float
    """On the worst device, in p-ths of the model."""
    peak_bytes: float | None


def compare(
    names: Annotated[list[str] | None, typer.Argument(help="Schedules and CSV or JSON files; none is all.")] = None,
    devices: Devices = 4,
    microbatches: Microbatches = 8,
    virtual: Virtual = None,
    overlap: Overlap = False,
    cost: Cost = None,
    costs: CostFile = None,
    json: Json = False,
) -> None:
    """Compare schedules at the same sizes and costs.

    Costs are those of a p-th of the model: a schedule with v stages per device gets a v-th of each
    for a stage, so all do the same work. bubble is idle time over the step, in span the worst device's
    within its own first start and last end; activations, I to W (between the two), params, exposed
    (transfer time not hidden) and bytes are the worst device's. What cannot be made at these sizes is
    named below the table.

    Examples:

      stretto compare --devices 8 --microbatches 32

      stretto compare 1f1b zb_h1 dualpipe mine.csv -d 8 -m 32 --cost F=1,B=2,FB=2.6
    """
    table_of_costs = read_costs(cost, costs)
    rows, refused = [], []
    for name, options in _targets(names or [], virtual, overlap):
        label = name + (" +overlap" if options.get("overlap") else "")
        with working(f"simulating {label}"):
            try:
                program = sound_program(name, devices=devices, microbatches=microbatches, **options)
                rows.append(_row(label, program, table_of_costs))
            except StrettoError as error:
                if names:
                    raise
                refused.append(str(error))
    if json:
        out.print(msgspec.json.format(msgspec.json.encode(rows)).decode(), markup=False)
    else:
        _print(rows)
    for reason in refused:
        err.print(f"left out: {reason}", markup=False)


def _targets(names: list[str], virtual: int | None, overlap: bool) -> list[tuple[str, dict[str, object]]]:
    targets: list[tuple[str, dict[str, object]]] = []
    for name in names or SCHEDULES:
        if is_file(name) or not (schedule := schedule_named(name)).variable:
            targets.append((name if is_file(name) else schedule.name, {}))
        elif names:
            targets.append((schedule.name, {"virtual": virtual, "overlap": overlap}))
        else:
            targets += [(schedule.name, {"virtual": virtual, "overlap": woven}) for woven in (False, True)]
    return targets


def _row(name: str, program: Program, costs: Costs) -> Row:
    per_device = program.placement.stages / program.devices
    costs = costs.divided(per_device)
    summary = simulate(program, costs).summary(costs)
    homes = {(device, stage) for route in program.placement.routes for stage, device in enumerate(route)}
    worst = summary.devices
    return Row(
        name=name,
        makespan=summary.makespan,
        bubble_ratio=summary.bubble_ratio,
        span_bubble=max(device.span - device.busy for device in worst),
        exposed_transfer=max(device.exposed_transfer for device in worst),
        peak_activations=max(device.peak_activations for device in worst) / per_device,
        peak_pending=max(device.peak_pending for device in worst) / per_device,
        parameters=max(Counter(device for device, _ in homes).values()) / per_device,
        peak_bytes=None if worst[0].peak_bytes is None else max(device.peak_bytes or 0.0 for device in worst),
    )


def _print(rows: list[Row]) -> None:
    # Columns that say nothing here are left out.
    exposed, sized = any(row.exposed_transfer for row in rows), any(row.peak_bytes is not None for row in rows)
    headings = ["schedule", "makespan", "bubble", "in span", "activations", "I to W", "params"]
    shown = table(*headings, *["exposed"] * exposed, *["bytes"] * sized)
    for row in sorted(rows, key=lambda row: row.makespan):
        shown.add_row(
            row.name,
            number(row.makespan),
            f"{row.bubble_ratio:.1%}",
            number(row.span_bubble),
            number(row.peak_activations),
            number(row.peak_pending),
            f"{row.parameters:g}×",
            *[number(row.exposed_transfer)] * exposed,
            *[number(row.peak_bytes)] * sized,
        )
    out.print(shown)
