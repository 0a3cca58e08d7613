"""`stretto check`: is a schedule in a file sound?"""

from pathlib import Path
from typing import Annotated

import typer

from stretto.check import check as find_violations
from stretto.cli.console import out, working
from stretto.cli.inputs import Cost, CostFile, read_costs, read_program
from stretto.ir.errors import CostError

_SHOWN = 20


def check(
    file: Annotated[
        Path, typer.Argument(help="PyTorch pipelining CSV, with transfers or without, our JSON, or a trace.")
    ],
    memory_limit: Annotated[
        float | None, typer.Option(help="Bytes no device may exceed, by the bytes in the costs.")
    ] = None,
    cost: Cost = None,
    costs: CostFile = None,
) -> None:
    """Check a schedule from a file: nothing missing, nothing misplaced, nothing that can deadlock.

    Exit code 0: sound. 1: it has violations, printed one per line. 2: it could not be read.

    Examples:

      stretto check my_schedule.csv

      stretto check my_schedule.csv --memory-limit 60e9 --cost activation_bytes=2e9
    """
    if memory_limit is not None and not memory_limit >= 0:
        raise CostError(f"--memory-limit is a number of bytes of at least 0 (got {memory_limit})")
    if memory_limit is None and (cost is not None or costs is not None):
        raise CostError("costs matter to a check only with --memory-limit")
    table = read_costs(cost, costs)
    with working(f"checking {file}"):
        program = read_program(file)
        found = find_violations(program, costs=table.costs, memory_limit=memory_limit)
    for violation in found[:_SHOWN]:
        out.print(str(violation))
    if len(found) > _SHOWN:
        out.print(f"… and {len(found) - _SHOWN} more")
    if found:
        raise typer.Exit(1)
    placement = program.placement
    if program.is_update:
        out.print(f"sound: {program.devices} devices, {placement.microbatches} buckets, {len(program)} tasks")
        return
    routes = f" on {len(placement.routes)} routes" if len(placement.routes) > 1 else ""
    out.print(
        f"sound: {program.devices} devices, {placement.stages} stages{routes}, {placement.microbatches} microbatches, "
        f"{len(program)} tasks"
    )
