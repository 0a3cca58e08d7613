"""Arguments that commands share: schedules or files, sizes, costs."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from stretto.check import check
from stretto.choose import MemoryChoice, choose_memory
from stretto.cli.console import err
from stretto.costs import BYTES, Costs, load_costs, parse_costs
from stretto.ir.errors import CostError, PlanError, ProgramError, TextError
from stretto.ir.files import read_text
from stretto.ir.mesh import MeshShape
from stretto.ir.plan import Plan
from stretto.ir.text import parse_plan_json
from stretto.ir.units import parse_bytes
from stretto.layers import Layer, cut_layers, parse_layers
from stretto.program.lower import lower
from stretto.program.program import Program
from stretto.program.task import COPIES
from stretto.program.text import parse_order
from stretto.schedules.registry import schedule_named
from stretto.simulate import simulate
from stretto.timeline import Timeline, load_timeline

DEVICES = 4
"""How many devices a schedule is made for, unless the user says so."""
LARGEST = 20_000_000  # actions; above this, a machine runs out of memory first, not of time

Devices = Annotated[int | None, typer.Option("--devices", "-d", help="Pipeline devices (p). [default: 4]")]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", "-m", help="Microbatches per step and pipeline (m). [default: 8]"),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Instead of --devices: pipelines side by side, e.g. pp=4,ep=2,dp=2, outermost first as in a DeviceMesh. "
        "Each of the ep × dp pipelines of pp devices runs its own microbatches; along ep they share out the experts "
        "of moe layers (--layers; without, of all stages) and exchange tokens, and loads in --costs make that uneven; "
        "stages that several devices hold sum their gradients.",
    ),
]
StagesPerDevice = Annotated[int | None, typer.Option(help="Stages per device (v), for interleaved. [default: 2]")]
Overlap = Annotated[bool, typer.Option("--overlap", help="interleaved: Kimi K2's woven form.")]
CostsOption = Annotated[
    str | None,
    typer.Option(
        "--costs",
        help="Times per stage (compare: per slice of the model), e.g. F=1,I=1,W=1,B=2,FB=3, or a TOML file, in which "
        "lists give a value each. "
        "B defaults to I+W, FB (a woven pair) to F+B. BW is the part of B that runs after the gradient is sent; "
        "reduce is the sum of a stage's gradients over its devices, if it has several, and reduce_experts that of its "
        "experts' on a mesh. loads = [1.2, 0.8], in a file, gives the tokens of each expert-parallel rank, relative to "
        "an even share. Also sizes, e.g. activation_bytes=2GB.",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        help="The model's layers, e.g. embedding,dense,moe*13,loss: splits passes into phases and weaves pairs. Phase "
        "times come from [phases.attn] and the like in --costs; without them, phases share their stage's time."
    ),
]


def _parse_offload(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"a number of actions, or auto (got {text!r:.40})") from None


Offload = Annotated[
    Any,
    typer.Option(
        parser=_parse_offload,
        metavar="ACTIONS",
        help="Offload saved activations to host memory and load them back, each copy beside this many actions; 1 is "
        "Kimi K2's rule. Sizes come from activation_bytes or offload_bytes, speed from [host] in --costs. In stretto "
        "simulate, auto chooses by these costs how much of each stage leaves.",
    ),
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute", help="Recompute what forwards discarded, right before the backward; takes R (F unless given)."
    ),
]
WgradMicrobatches = Annotated[
    int,
    typer.Option(
        help="Compute the weight gradients of this many microbatches at once. Waiting ones take memory "
        "(pending_bytes), a B is split into I and W, and W is the time per microbatch."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes from the command line; None if not given."""

    devices: int | None = None
    microbatches: int | None = None
    stages_per_device: int | None = None
    overlap: bool = False
    mesh: str | None = None

    def given(self) -> bool:
        return self != Sizes()

    @property
    def shape(self) -> MeshShape | None:
        """The shape of the mesh, if one is given."""
        if self.mesh is None:
            return None
        shape = MeshShape.parse(self.mesh)
        if self.devices is not None:
            raise PlanError(f"give --devices or --mesh, whose pp is the number of devices (got {self.mesh!r:.40})")
        if "pp" not in dict(shape.dimensions):
            raise PlanError(f"--mesh has the number of pipeline devices as pp, e.g. pp=4,ep=2 (got {self.mesh!r:.40})")
        return shape

    @property
    def pipeline_devices(self) -> int:
        """The number of devices of a pipeline."""
        shape = self.shape
        return shape.pp if shape is not None else DEVICES if self.devices is None else self.devices


@dataclass(frozen=True, slots=True)
class LowerOptions:
    """Options of `lower`, from the command line."""

    layers: str | None = None
    offload: int | Literal["auto"] = 0
    recompute: bool = False
    wgrad_microbatches: int = 1

    def given(self) -> bool:
        return self != LowerOptions()


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs from the command line."""

    costs: Costs
    names: tuple[str, ...] = ()
    """The names of the costs given."""
    from_file: bool = False

    @property
    def times(self) -> list[str]:
        """The names of the costs given, except bytes."""
        return [name for name in self.names if name not in BYTES]

    @property
    def has_bytes(self) -> bool:
        """Whether bytes of activations or weights are among the costs given."""
        return any(name in BYTES for name in self.names)


def read_costs(given: str | None) -> CostTable:
    """Read costs from the command line: by name, or in a file."""
    if given is None:
        return CostTable(Costs())
    if "=" in given and not Path(given).exists():
        names = (part.partition("=")[0].strip() for part in given.split(","))
        return CostTable(parse_costs(given), tuple(filter(None, names)))
    if not given.lower().endswith(".toml") and not Path(given).is_file():
        raise CostError(f"--costs takes times such as F=1,I=1, or a TOML file; {given!r:.40} is neither")
    return CostTable(load_costs(given), tuple(tomllib.loads(read_text(given))), from_file=True)


def size_of(option: str, text: str, *, per: str = "") -> float:
    """Read the size that an option gives, in bytes, or in bytes per second with "/s" as `per`."""
    try:
        return parse_bytes(text.removesuffix(per))
    except TextError as error:
        raise CostError(f"{option}: {error}") from None


def size_with_unit(option: str, text: str, *, per: str = "") -> float:
    """Read a size that must have a unit: these options took other units once."""
    if not text.endswith(per):
        raise CostError(f"{option} is a speed, e.g. 50GB{per} (got {text!r:.40})")
    size = size_of(option, text, per=per)
    if text.removesuffix(per).strip()[-1:].lower() != "b":
        unit = "MiB" if option == "--bucket" else "GB"
        raise CostError(f"{option} needs a unit, e.g. {text.removesuffix(per).strip()}{unit}{per} (got {text!r:.40})")
    return size


def is_file(target: str) -> bool:
    return target.lower().endswith((".csv", ".json")) or "/" in target


def is_trace(target: str) -> bool:
    return target.lower().endswith(".trace.json")


def read_program(
    path: Path, options: LowerOptions | None = None, costs: Costs | None = None, *, slices: int | None = None
) -> Program:
    """Read a program from a file, or lower the plan in it, without checking it."""
    options = options or LowerOptions()
    if is_trace(path.name):
        return load_timeline(path).program
    text = read_text(path)
    try:
        order = _parse_file(path, text)
        if isinstance(order, Plan):
            return _lowered(order, options, costs or Costs(), slices=slices)
        if options.given():
            raise PlanError(
                "--layers, --offload, --recompute and --wgrad-microbatches go with a schedule or a plan, and this is a "
                "program, with transfers"
            )
        return order
    except (TextError, PlanError, ProgramError) as error:
        raise TextError(f"{path}: {error}") from None


def _parse_file(path: Path, text: str) -> Plan | Program:
    return parse_plan_json(text) if path.suffix.lower() == ".json" else parse_order(text)


def make_plan(name: str, sizes: Sizes) -> Plan:
    schedule = schedule_named(name)
    devices, mesh = sizes.pipeline_devices, sizes.shape
    microbatches = 8 if sizes.microbatches is None else sizes.microbatches
    stages_per_device = schedule.stages_per_device if sizes.stages_per_device is None else sizes.stages_per_device
    if not schedule.variable and (sizes.stages_per_device is not None or sizes.overlap):
        raise PlanError(f"{schedule.name} takes no --stages-per-device and no --overlap; interleaved does")
    replicas = 1 if mesh is None else mesh.replicas
    if 3 * devices * stages_per_device * (microbatches + 2 * devices) * replicas > LARGEST:
        many = f" on {replicas} pipelines" if replicas > 1 else ""
        raise PlanError(f"{devices} devices × {microbatches} microbatches{many} is too large for the command line")
    more = {"stages_per_device": stages_per_device, "overlap": sizes.overlap} if schedule.variable else {}
    plan = schedule.make(devices=devices, microbatches=microbatches, **more)
    if not isinstance(plan, Plan):
        raise PlanError(f"{schedule.name} returns no Plan (got {plan!r:.40})")
    if (plan.devices, plan.microbatches) != (devices, microbatches):
        raise PlanError(
            f"{schedule.name} was to plan {devices} devices and {microbatches} microbatches, but its plan has "
            f"{plan.devices} and {plan.microbatches}"
        )
    return plan if mesh is None else plan.on_mesh(mesh)


def _sound_program(target: str, sizes: Sizes, options: LowerOptions, costs: Costs, *, slices: int | None) -> Program:
    """Lower a schedule, or read a file; raise ProgramError if `check` finds violations in it."""
    if is_file(target):
        _validate_no_sizes(target, sizes)
        program = read_program(Path(target), options, costs, slices=slices)
    else:
        program = _lowered(make_plan(target, sizes), options, costs, slices=slices)
    if violations := check(program):
        where = f"; see stretto check {target}" if is_file(target) else ""
        more = f" (and {len(violations) - 1} more{where})" if len(violations) > 1 else ""
        raise ProgramError(f"{target} is not sound: {violations[0]}{more}")
    return program


def _validate_no_sizes(target: str, sizes: Sizes) -> None:
    if sizes.given():
        raise PlanError(f"{target} has its own sizes; --devices, --mesh and the like go with a schedule's name")


def choice_of(
    target: str, sizes: Sizes, options: LowerOptions, table: CostTable, *, limit: float | None
) -> tuple[MemoryChoice, LowerOptions, CostTable]:
    """Choose by costs what to offload. Return the choice, and options and costs to simulate it with."""
    plan = _plan_of(target, sizes)
    costs = costs_of(table.costs, plan.stages)
    _note_cut(table.costs, costs, plan.stages)
    choice = choose_memory(
        plan,
        costs,
        layers=_layers_of(plan, options),
        recompute=options.recompute,
        wgrad_microbatches=options.wgrad_microbatches,
        limit=limit,
    )
    if not choice.memory.offloads:
        return choice, replace(options, offload=0), replace(table, costs=costs)
    costs = msgspec.structs.replace(costs, offload_bytes=choice.offload_bytes)
    return choice, replace(options, offload=choice.memory.copy_actions), replace(table, costs=costs)


def _plan_of(target: str, sizes: Sizes) -> Plan:
    """Make a schedule's plan, or read one from a file."""
    if not is_file(target):
        return make_plan(target, sizes)
    _validate_no_sizes(target, sizes)
    if is_trace(target):
        raise PlanError(f"{target} is a timeline: --offload auto goes with a schedule or a plan")
    try:
        plan = _parse_file(Path(target), read_text(target))
    except (TextError, PlanError, ProgramError) as error:
        raise TextError(f"{target}: {error}") from None
    if not isinstance(plan, Plan):
        raise PlanError(f"{target}: --offload auto goes with a schedule or a plan, and this is a program")
    return plan


def _layers_of(plan: Plan, options: LowerOptions) -> tuple[tuple[Layer, ...], ...] | None:
    ep = 1 if plan.placement.mesh is None else plan.placement.mesh.ep
    return None if options.layers is None else cut_layers(parse_layers(options.layers, ep=ep), stages=plan.stages)


def _lowered(plan: Plan, options: LowerOptions, costs: Costs, *, slices: int | None) -> Program:
    if options.offload == "auto":
        raise PlanError("--offload auto goes with stretto simulate; give a number of actions here")
    costs = costs_of(costs, plan.stages, slices=slices)
    return lower(
        plan,
        layers=_layers_of(plan, options),
        costs=costs,
        offload=options.offload,
        recompute=options.recompute,
        wgrad_microbatches=options.wgrad_microbatches,
    )


def costs_of(costs: Costs, stages: int, *, slices: int | None = None) -> Costs:
    """Return the costs for this many stages. If they have lists of another length, these are cut anew.

    Numbers are costs of a stage, or with `slices`, of one of so many slices of the model.
    """
    return costs.for_stages(stages, devices=stages if slices is None else slices)


def training_of(
    target: str, sizes: Sizes, options: LowerOptions, table: CostTable, *, slices: int | None = None
) -> Timeline:
    """Return `timeline_of` of a training step; raise PlanError if it is a weight update."""
    timeline = timeline_of(target, sizes, options, table, slices=slices)
    if timeline.program.is_update:
        raise PlanError(
            f"{target} shows a weight update; stretto show draws it, stretto simulate weight_update simulates one"
        )
    return timeline


def timeline_of(
    target: str, sizes: Sizes, options: LowerOptions, table: CostTable, *, slices: int | None = None
) -> Timeline:
    """Load a trace, or simulate a schedule or file.

    With `slices`, costs are those of so many slices of the model, and each schedule's stages take their share; so they
    do without, if costs have lists of another length than there are stages.
    """
    if is_trace(target):
        if options.given() or sizes.given():
            raise PlanError(f"{target} is a timeline: sizes, --layers and the like go with a schedule or a plan")
        if table.times and not (table.from_file and table.has_bytes):
            raise CostError(f"{target} has its own times; leave {', '.join(table.times)} out, only bytes matter here")
        if table.times:
            err.print(f"note: {target} has its own times, so only the bytes in the costs are used")
        return load_timeline(target)
    costs = table.costs
    program = _sound_program(target, sizes, options, costs, slices=slices)
    if costs.reduce_tied and not program.anatomy.ties:
        err.print(f"note: {target} ties no weights, so reduce_tied takes no time")
    stages = program.placement.stages
    cut = costs_of(costs, stages, slices=slices)
    if slices is None:
        _note_cut(costs, cut, stages)
    return simulate(program, cut)


def _note_cut(costs: Costs, cut: Costs, stages: int) -> None:
    if cut is not costs:
        err.print(f"note: the lists in the costs are not for {stages} stages; the costs of the model are cut anew")


def note_free_copies(options: LowerOptions, timelines: Iterable[Timeline]) -> None:
    """Print a note if offloading was requested but takes no time."""
    copies = [(timeline.end - timeline.start)[timeline.program.work.among(COPIES)] for timeline in timelines]
    if options.offload and any(len(times) and not times.any() for times in copies):
        err.print(
            "note: copies to and from host memory take no time with these costs; "
            "a file (--costs) may give activation_bytes and the bandwidth of [host]"
        )


def figure_kind(path: Path) -> str:
    """Return the extension that says what to draw: .svg, .png, .trace.json, or any other."""
    return ".trace.json" if is_trace(path.name) else path.suffix.lower()


def write_figure(
    timeline: Timeline, path: Path, *, costs: Costs | None = None, lanes: bool = False, memory: bool = False
) -> None:
    if figure_kind(path) not in (".svg", ".png", ".trace.json"):
        raise PlanError(f"-o draws .svg, .png or .trace.json (got {path})")
    timeline.save(path, costs=costs, lanes=lanes, memory=memory)
