"""`stretto show`: list the schedules, or draw one."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from stretto.cli.console import out, working
from stretto.cli.inputs import (
    Cost,
    CostFile,
    Devices,
    Layers,
    Microbatches,
    Overlap,
    Sizes,
    Virtual,
    is_file,
    make_plan,
    read_costs,
    sound_program,
)
from stretto.draw import draw_figure, draw_rich, draw_text, draw_trace
from stretto.ir.errors import PlanError, TextError
from stretto.ir.text import plan_to_json
from stretto.program.lower import lower
from stretto.schedules.catalogue import SCHEDULES
from stretto.simulate import simulate


def show(
    name: Annotated[str | None, typer.Argument(help="A schedule, or a CSV or JSON file; none lists them.")] = None,
    devices: Devices = None,
    microbatches: Microbatches = None,
    virtual: Virtual = None,
    overlap: Overlap = False,
    cost: Cost = None,
    costs: CostFile = None,
    layers: Layers = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write FILE: its order as .csv or .json, a figure as .svg or .png, or a .trace.json for Perfetto.",
        ),
    ] = None,
    transfers: Annotated[bool, typer.Option("--transfers", help="With -o FILE.csv: sends and receives too.")] = False,
    width: Annotated[int | None, typer.Option(help="Columns to draw in. [default: the terminal's]")] = None,
) -> None:
    """List the schedules, or draw one.

    Examples:

      stretto show

      stretto show dualpipe --devices 8 --microbatches 20

      stretto show interleaved --overlap -o k2.csv

      stretto show dualpipe -d 8 -m 20 -o dualpipe.svg
    """
    sizes = Sizes(devices, microbatches, virtual, overlap)
    if name is None:
        if sizes.given() or output is not None:
            raise PlanError("name a schedule to draw or write; stretto show alone lists them")
        _list()
    elif output is not None:
        with working(f"writing {output}"):
            _write(name, sizes, output, transfers=transfers, cost=cost, costs=costs, layers=layers)
        out.print(f"wrote {output}")
    else:
        if width is not None and width < 20:
            raise PlanError(f"--width needs at least 20 columns (got {width})")
        with working(f"simulating {name}"):
            table = read_costs(cost, costs)
            timeline = simulate(sound_program(name, sizes, layers=layers, costs=table), table)
            coloured = out.is_terminal and not out.no_color
            drawing = (draw_rich if coloured else draw_text)(timeline, width=width or out.width)
        out.print(drawing)
        out.print(f"time {timeline.makespan:g} →")


def _list() -> None:
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
    path: Path,
    *,
    transfers: bool,
    cost: str | None,
    costs: Path | None,
    layers: str | None,
) -> None:
    """An order as CSV or JSON, or a timeline as a figure or trace."""
    suffix = ".trace.json" if path.name.lower().endswith(".trace.json") else path.suffix.lower()
    if suffix in (".svg", ".png", ".trace.json"):
        table = read_costs(cost, costs)
        timeline = simulate(sound_program(name, sizes, layers=layers, costs=table), table)
        if suffix == ".trace.json":
            _write_text(path, draw_trace(timeline, costs=table))
        else:
            draw_figure(timeline, path)
        return
    if is_file(name):
        raise PlanError("-o writes a schedule's order; name one")
    if any(option is not None for option in (cost, costs, layers)):
        raise PlanError(f"{path} holds the order of a schedule, which costs and layers do not change; leave them out")
    match suffix:
        case ".csv":
            plan = make_plan(name, sizes)
            _write_text(path, str(lower(plan) if transfers else plan) + "\n")
        case ".json" if not transfers:
            _write_text(path, plan_to_json(make_plan(name, sizes)) + "\n")
        case _:
            raise PlanError(
                f"-o writes .csv, with or without --transfers, .json, .svg, .png or .trace.json (got {path})"
            )


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TextError(f"cannot write {path}: {error.strerror}") from None
