"""`stretto show`: list the schedules, or draw one."""

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.console import out, working
from stretto.cli.inputs import (
    Cost,
    CostFile,
    Devices,
    Microbatches,
    Overlap,
    Virtual,
    is_file,
    make_plan,
    read_costs,
    sound_program,
)
from stretto.draw import draw_rich, draw_text
from stretto.ir.errors import PlanError, TextError
from stretto.ir.text import plan_to_json
from stretto.program.lower import lower
from stretto.schedules.catalogue import SCHEDULES
from stretto.simulate import simulate


def show(
    name: Annotated[str | None, typer.Argument(help="A schedule, or a CSV or JSON file; none lists them.")] = None,
    devices: Devices = 4,
    microbatches: Microbatches = 8,
    virtual: Virtual = None,
    overlap: Overlap = False,
    cost: Cost = None,
    costs: CostFile = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write FILE.csv or FILE.json.")] = None,
    transfers: Annotated[bool, typer.Option("--transfers", help="With -o FILE.csv: sends and receives too.")] = False,
    width: Annotated[int | None, typer.Option(help="Columns to draw in. [default: the terminal's]")] = None,
) -> None:
    """List the schedules, or draw one as text.

    Examples:

      stretto show

      stretto show dualpipe --devices 8 --microbatches 20

      stretto show interleaved --overlap -o k2.csv
    """
    if name is None:
        _list()
        return
    sizes = {"devices": devices, "microbatches": microbatches, "virtual": virtual, "overlap": overlap}
    if output is not None:
        if is_file(name):
            raise PlanError("-o writes a schedule; name one")
        plan = make_plan(name, **sizes)  # type: ignore[arg-type]
        match output.suffix.lower():
            case ".csv":
                _write(output, str(lower(plan) if transfers else plan) + "\n")
            case ".json" if not transfers:
                _write(output, plan_to_json(plan) + "\n")
            case _:
                raise PlanError(f"-o writes .csv, with or without --transfers, or .json (got {output})")
        return
    with working(f"simulating {name}"):
        timeline = simulate(sound_program(name, **sizes), read_costs(cost, costs))
    if width is not None and width < 20:
        raise PlanError(f"--width needs at least 20 columns (got {width})")
    columns = width or out.width
    if out.is_terminal and not out.no_color:
        out.print(draw_rich(timeline, width=columns))
    else:
        out.print(draw_text(timeline, width=columns), markup=False)
    out.print(f"time {timeline.makespan:g} →")


def _list() -> None:
    for schedule in SCHEDULES.values():
        out.print(f"[bold]{schedule.name}[/bold]  {schedule.meaning}")
        for what in ("limits", "bubble", "memory"):
            out.print(f"    {what:<7} {getattr(schedule, what)}", markup=False)
    out.print(
        "\np devices, m microbatches, v stages per device, device r; limits on p, m and costs; bubble and"
        "\nactivation memory of device r, in times and activations of a p-th of the model."
        "\nDraw one: stretto show dualpipe --devices 8 --microbatches 20"
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TextError(f"cannot write {path}: {error.strerror}") from None
    out.print(f"wrote {path}", markup=False)
