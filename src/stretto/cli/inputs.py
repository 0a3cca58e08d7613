"""What commands take: schedules or files, sizes, costs."""

from pathlib import Path
from typing import Annotated

import typer

from stretto.check import check
from stretto.costs import Costs, parse_costs, parse_costs_toml
from stretto.ir.errors import PlanError, ProgramError, TextError
from stretto.ir.plan import Plan
from stretto.ir.text import parse_plan_json
from stretto.program.lower import lower
from stretto.program.program import Program
from stretto.program.text import parse_program
from stretto.schedules.catalogue import schedule_named

LARGEST = 20_000_000  # actions; beyond this a machine runs out of memory before it runs out of time
LARGEST_FILE = 256 * 2**20

Devices = Annotated[int, typer.Option("--devices", "-d", help="Pipeline devices (p).")]
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", help="Microbatches per step (m).")]
Virtual = Annotated[int | None, typer.Option(help="Stages per device (v), for interleaved. [default: 2]")]
Overlap = Annotated[bool, typer.Option("--overlap", help="interleaved: Kimi K2's woven form.")]
Cost = Annotated[
    str | None,
    typer.Option(
        help="Times per stage, e.g. F=1,I=1,W=1,B=2,FB=3. B defaults to I+W, FB (a woven pair) to F+B. "
        "BW is the part of B that runs after the gradient has left. Bytes too: activation_bytes=…"
    ),
]
CostFile = Annotated[Path | None, typer.Option("--costs", help="The same from TOML; lists give a value per stage.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def read_costs(text: str | None, path: Path | None) -> Costs:
    if text is not None and path is not None:
        raise PlanError("give --cost or --costs, not both")
    if path is not None:
        return parse_costs_toml(read_text(path))
    return parse_costs(text or "")


def read_text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise TextError(f"{path} is larger than {LARGEST_FILE // 2**20} MiB")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TextError(f"{path} is not UTF-8 text") from None


def is_file(target: str) -> bool:
    return target.lower().endswith((".csv", ".json")) or "/" in target


def read_program(path: Path) -> Program:
    """A program from a file, not yet checked."""
    text = read_text(path)
    try:
        if path.suffix.lower() == ".json":
            return lower(parse_plan_json(text))
        return parse_program(text)
    except (TextError, PlanError, ProgramError) as error:
        raise TextError(f"{path}: {error}") from None


def make_plan(name: str, *, devices: int, microbatches: int, virtual: int | None = None, overlap: bool = False) -> Plan:
    schedule = schedule_named(name)
    if not schedule.variable and (virtual is not None or overlap):
        raise PlanError(f"{schedule.name} takes no --virtual and no --overlap; interleaved does")
    per_device = virtual or schedule.stages_per_device if schedule.variable else schedule.stages_per_device
    if 3 * devices * microbatches * per_device > LARGEST:
        raise PlanError(f"{devices} devices × {microbatches} microbatches is too large; stay below {LARGEST:,} actions")
    if schedule.variable:
        virtual = schedule.stages_per_device if virtual is None else virtual
        return schedule.make(devices=devices, microbatches=microbatches, virtual=virtual, overlap=overlap)
    return schedule.make(devices=devices, microbatches=microbatches)


def sound_program(target: str, **sizes: object) -> Program:
    """A schedule or file as a program that has passed `check`."""
    if not is_file(target):
        return lower(make_plan(target, **sizes))  # type: ignore[arg-type]
    program = read_program(Path(target))
    if found := check(program):
        more = f" (and {len(found) - 1} more; see stretto check {target})" if len(found) > 1 else ""
        raise ProgramError(f"{target} is not sound: {found[0]}{more}")
    return program
