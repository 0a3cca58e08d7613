"""What commands take: schedules or files, sizes, costs."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stretto.check import check
from stretto.cli.console import err
from stretto.costs import BYTES, Costs, parse_costs, parse_costs_toml
from stretto.draw import draw_figure, draw_trace, parse_trace
from stretto.ir.errors import CostError, PlanError, ProgramError, TextError
from stretto.ir.plan import Plan
from stretto.ir.text import parse_plan_json
from stretto.program.lower import lower
from stretto.program.phases import cut_layers, parse_layers
from stretto.program.program import Program
from stretto.program.task import COPIES
from stretto.program.text import parse_program
from stretto.schedules.catalogue import schedule_named
from stretto.simulate import simulate
from stretto.timeline import Timeline

LARGEST = 20_000_000  # actions; beyond this a machine runs out of memory before it runs out of time
LARGEST_FILE = 256 * 2**20

Devices = Annotated[int | None, typer.Option("--devices", "-d", help="Pipeline devices (p). [default: 4]")]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", "-m", help="Microbatches per step (m). [default: 8]")
]
Virtual = Annotated[int | None, typer.Option(help="Stages per device (v), for interleaved. [default: 2]")]
Overlap = Annotated[bool, typer.Option("--overlap", help="interleaved: Kimi K2's woven form.")]
Cost = Annotated[
    str | None,
    typer.Option(
        help="Times per stage, e.g. F=1,I=1,W=1,B=2,FB=3. B defaults to I+W, FB (a woven pair) to F+B. "
        "BW is the part of B that runs after the gradient has left. reduce is the sum of a stage's gradients over "
        "its devices, where it has several. Bytes too: activation_bytes=…"
    ),
]
CostFile = Annotated[Path | None, typer.Option("--costs", help="The same from TOML; lists give a value per stage.")]
Layers = Annotated[
    str | None,
    typer.Option(
        help="The model's layers, e.g. embedding,dense,moe*13,loss: passes are then taken apart into phases, and "
        "pairs woven. Times from [phases.attn] and the like in --costs; without, phases share their stage's."
    ),
]
Offload = Annotated[
    int,
    typer.Option(
        help="Send what forwards saved to host memory and back, each copy beside this many actions; 1 is "
        "Kimi K2's rule. Bytes from activation_bytes or offload_bytes, speed from [host] in --costs."
    ),
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute", help="Compute again what forwards discarded, right before the backward, in R (F unless given)."
    ),
]
WgradMicrobatches = Annotated[
    int,
    typer.Option(
        help="Compute the weight gradients of this many microbatches at once: those that wait take memory "
        "(pending_bytes), a B is an I and a W, and W says what each then takes."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes as given on the command line; None where they were not."""

    devices: int | None = None
    microbatches: int | None = None
    virtual: int | None = None
    overlap: bool = False

    def given(self) -> bool:
        return self != Sizes()


@dataclass(frozen=True, slots=True)
class LowerOptions:
    """How a plan is to be lowered, as given on the command line."""

    layers: str | None = None
    offload: int = 0
    recompute: bool = False
    wgrad_microbatches: int = 1

    def given(self) -> bool:
        return self != LowerOptions()


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs as given on the command line."""

    costs: Costs
    times: tuple[str, ...] = ()
    """The names of those given that are no bytes."""


def read_costs(text: str | None, path: Path | None) -> CostTable:
    if text is not None and path is not None:
        raise CostError("give --cost or --costs, not both")
    if path is None:
        costs, names = parse_costs(text or ""), [part.partition("=")[0].strip() for part in (text or "").split(",")]
    else:
        written = read_text(path)
        try:
            costs, names = parse_costs_toml(written), list(tomllib.loads(written))
        except CostError as error:
            raise CostError(f"{path}: {error}") from None
    return CostTable(costs, tuple(name for name in names if name and name not in BYTES))


def read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise TextError(f"{path} is larger than {LARGEST_FILE // 2**20} MiB")
        return data.decode()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TextError(f"{path} is not UTF-8 text") from None


def is_file(target: str) -> bool:
    return target.lower().endswith((".csv", ".json")) or "/" in target


def is_trace(target: str) -> bool:
    return target.lower().endswith(".trace.json")


def read_trace(path: Path) -> Timeline:
    try:
        return parse_trace(read_text(path))
    except TextError as error:
        raise error if str(path) in str(error) else TextError(f"{path}: {error}") from None


def read_program(path: Path) -> Program:
    """A program from a file, not yet checked."""
    if is_trace(path.name):
        return read_trace(path).program
    text = read_text(path)
    try:
        if path.suffix.lower() == ".json":
            return lower(parse_plan_json(text))
        return parse_program(text)
    except (TextError, PlanError, ProgramError) as error:
        raise TextError(f"{path}: {error}") from None


def make_plan(name: str, sizes: Sizes) -> Plan:
    schedule = schedule_named(name)
    devices = 4 if sizes.devices is None else sizes.devices
    microbatches = 8 if sizes.microbatches is None else sizes.microbatches
    virtual = schedule.stages_per_device if sizes.virtual is None else sizes.virtual
    if not schedule.variable and (sizes.virtual is not None or sizes.overlap):
        raise PlanError(f"{schedule.name} takes no --virtual and no --overlap; interleaved does")
    if 3 * devices * virtual * (microbatches + 2 * devices) > LARGEST:
        raise PlanError(f"{devices} devices × {microbatches} microbatches is too large; stay below {LARGEST:,} actions")
    if schedule.variable:
        return schedule.make(devices=devices, microbatches=microbatches, virtual=virtual, overlap=sizes.overlap)
    return schedule.make(devices=devices, microbatches=microbatches)


def _sound_program(target: str, sizes: Sizes, options: LowerOptions, costs: Costs, *, same_model: bool) -> Program:
    """A schedule or file as a program that has passed `check`."""
    if not is_file(target):
        plan = make_plan(target, sizes)
        if same_model:
            costs = costs.for_stages(plan.stages, devices=plan.devices)
        layers = None if options.layers is None else cut_layers(parse_layers(options.layers), stages=plan.stages)
        return lower(
            plan,
            layers=layers,
            costs=costs,
            offload=options.offload,
            recompute=options.recompute,
            wgrad_microbatches=options.wgrad_microbatches,
        )
    if options.given():
        raise PlanError(
            "--layers, --offload, --recompute and --wgrad-microbatches go with a schedule's name, not with a file such "
            f"as {target}"
        )
    if sizes.given():
        raise PlanError(f"{target} has its own sizes; --devices and the like go with a schedule's name")
    program = read_program(Path(target))
    if found := check(program):
        more = f" (and {len(found) - 1} more; see stretto check {target})" if len(found) > 1 else ""
        raise ProgramError(f"{target} is not sound: {found[0]}{more}")
    return program


def training_of(
    target: str, sizes: Sizes, options: LowerOptions, table: CostTable, *, same_model: bool = False
) -> Timeline:
    """The same of what can only be a training step."""
    timeline = timeline_of(target, sizes, options, table, same_model=same_model)
    if timeline.program.is_update:
        raise PlanError(f"{target} shows a weight update; stretto show draws it, stretto update simulates one")
    return timeline


def timeline_of(
    target: str, sizes: Sizes, options: LowerOptions, table: CostTable, *, same_model: bool = False
) -> Timeline:
    """What a trace shows, or what the simulation of a schedule or file gives.

    With `same_model`, costs are a p-th of the model's, and each schedule's stages take their share.
    """
    if is_trace(target):
        if options.given() or sizes.given():
            raise PlanError(f"{target} is a timeline: sizes, --layers and the like go with a schedule's name")
        if table.times:
            raise CostError(f"{target} has its own times; leave {table.times[0]} out, only bytes matter here")
        return read_trace(Path(target))
    costs = table.costs
    program = _sound_program(target, sizes, options, costs, same_model=same_model)
    if same_model:
        costs = costs.for_stages(program.placement.stages, devices=program.devices)
    return simulate(program, costs)


def note_free_copies(options: LowerOptions, timelines: Iterable[Timeline]) -> None:
    """Say so where offloading was asked for and costs nothing."""
    copies = [(timeline.end - timeline.start)[timeline.program.work.among(COPIES)] for timeline in timelines]
    if options.offload and any(len(times) and not times.any() for times in copies):
        err.print(
            "note: copies to and from host memory take no time with these costs; "
            "a file (--costs) may give activation_bytes and the bandwidth of [host]"
        )


def figure_kind(path: Path) -> str:
    """The ending of a path that says what to draw: .svg, .png, .trace.json, or whatever it is."""
    return ".trace.json" if is_trace(path.name) else path.suffix.lower()


def write_figure(timeline: Timeline, path: Path, *, costs: Costs | None = None, lanes: bool = False) -> None:
    match figure_kind(path):
        case ".trace.json":
            write_text(path, draw_trace(timeline, costs=costs))
        case ".svg" | ".png":
            draw_figure(timeline, path, lanes=lanes)
        case _:
            raise PlanError(f"-o draws .svg, .png or .trace.json (got {path})")


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TextError(f"cannot write {path}: {error.strerror}") from None
