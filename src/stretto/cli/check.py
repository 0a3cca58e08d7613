"""`stretto check`: find what is wrong with a schedule in a file."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stretto.check import check as find_violations
from stretto.cli.console import out, working
from stretto.cli.inputs import CostsOption, Json, read_costs, read_program, size_of
from stretto.ir.errors import CostError

_SHOWN = 20


class JsonViolation(msgspec.Struct, frozen=True):
    """A violation, as --json prints it."""

    rule: str
    message: str
    tasks: list[int]


def check(
    file: Annotated[
        Path, typer.Argument(help="PyTorch pipelining CSV, with or without transfers, Stretto's JSON, or a trace.")
    ],
    memory_limit: Annotated[
        str | None, typer.Option(help="The most memory a device may hold, e.g. 80GB; needs bytes in --costs.")
    ] = None,
    costs: CostsOption = None,
    json: Json = False,
) -> None:
    """Check a schedule in a file: nothing missing, nothing misplaced, no deadlock.

    Exit code 0: sound. 1: violations, printed one per line. 2: the file could not be read.

    Examples:

      stretto check my_schedule.csv

      stretto check my_schedule.csv --memory-limit 60GB --costs activation_bytes=2GB
    """
    limit = None if memory_limit is None else size_of("--memory-limit", memory_limit)
    if memory_limit is None and costs is not None:
        raise CostError("costs matter to a check only with --memory-limit")
    table = read_costs(costs)
    with working(f"checking {file}"):
        program = read_program(file)
        violations = find_violations(program, costs=table.costs, memory_limit=limit)
    if json:
        out.print(
            msgspec.json.encode([JsonViolation(each.rule, each.message, list(each.at)) for each in violations]).decode()
        )
        raise typer.Exit(1 if violations else 0)
    for violation in violations[:_SHOWN]:
        out.print(str(violation))
    if len(violations) > _SHOWN:
        out.print(f"… and {len(violations) - _SHOWN} more")
    if violations:
        raise typer.Exit(1)
    placement = program.placement
    if program.is_update:
        out.print(f"sound: {program.devices} devices, {placement.microbatches} buckets, {len(program)} tasks")
        return
    if program.is_own:
        out.print(f"sound: {program.devices} devices, {len(program.lanes)} lanes, {len(program)} calls")
        return
    routes = f" on {len(placement.routes)} routes" if len(placement.routes) > 1 else ""
    out.print(
        f"sound: {program.devices} devices, {placement.stages} stages{routes}, {placement.microbatches} microbatches, "
        f"{len(program)} tasks"
    )
