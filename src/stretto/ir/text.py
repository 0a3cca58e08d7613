"""Plans as text: PyTorch's pipelining CSV, one line per device, with or without transfers; and JSON."""

import re
from pathlib import Path
from typing import TypeAlias

import msgspec

from stretto.ir.action import Action, End, Op, Pair, Reduce, Transfer
from stretto.ir.errors import PlanError, TextError
from stretto.ir.files import file_path, read_text, write_text
from stretto.ir.mesh import MeshShape
from stretto.ir.placement import Placement
from stretto.ir.plan import Cell, Plan, infer_placement

Item: TypeAlias = Action | Pair | Transfer | Reduce

_ONE = re.compile(r"(\d{1,7})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d{1,7})", re.ASCII)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_SHARDING = re.compile(r"\d{1,7}(UNSHARD|RESHARD)(\d{1,7})?", re.ASCII)
_REDUCE = re.compile(r"(\d{1,7})REDUCE_GRAD(\d{1,7})?", re.ASCII)
_EXAMPLES = 'like "2F0", "(0F3;3B1)OVERLAP_F_B" or "1SEND_F0"'


def parse_plan(text: str) -> Plan:
    """Read compute-only CSV.

    >>> str(parse_plan("0F0,0B0"))
    '0F0,0B0'
    """
    rows: list[tuple[Cell, ...]] = []
    for device, items in enumerate(parse_rows(text)):
        row = tuple(item for item in items if not isinstance(item, Transfer | Reduce))
        if any(isinstance(item, Transfer) for item in items):
            raise TextError(f"line {device + 1} has transfers; a plan holds compute actions only")
        rows.append(row)
    return Plan(tuple(rows), infer_placement(rows))


def load_plan(path: str | Path) -> Plan:
    """Read a plan from PyTorch's compute-only CSV, or from the JSON that `Plan.save` writes."""
    text = read_text(path)
    try:
        return parse_plan_json(text) if file_path(path).suffix.lower() == ".json" else parse_plan(text)
    except (TextError, PlanError) as error:
        raise TextError(f"{path}: {error}") from None


def save_plan(plan: Plan, path: str | Path) -> None:
    match file_path(path).suffix.lower():
        case ".csv":
            if plan.placement.mesh is not None:
                raise TextError(f"a .csv holds no mesh, and this plan is for {plan.placement.mesh}; save it as .json")
            write_text(path, f"{plan}\n")
        case ".json":
            write_text(path, plan_to_json(plan) + "\n")
        case _:
            raise TextError(f"a plan is saved as .csv or .json (got {path})")


class _PlanFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    rows: list[list[str]]
    routes: list[list[int]]
    microbatches: int
    mesh: dict[str, int] | None = None


def plan_to_json(plan: Plan) -> str:
    rows = [[str(cell) for cell in row] for row in plan.rows]
    routes = [list(route) for route in plan.placement.routes]
    mesh = None if plan.placement.mesh is None else dict(plan.placement.mesh.dimensions)
    return msgspec.json.encode(_PlanFile(rows, routes, plan.microbatches, mesh)).decode()


def parse_plan_json(text: str) -> Plan:
    """Read what `plan_to_json` writes.

    >>> parse_plan_json('{"rows": [["0F0"]], "routes": [[0]], "microbatches": 1}').devices
    1
    """
    try:
        file = msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=_PlanFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TextError(f"not a plan in JSON: {error}") from None
    rows = tuple(tuple(_parse_cell(text, number) for text in row) for number, row in enumerate(file.rows, 1))
    mesh = None if file.mesh is None else MeshShape.of(file.mesh)
    placement = Placement(tuple(map(tuple, file.routes)), file.microbatches, mesh)
    if placement.stages * placement.microbatches > 4 * sum(map(len, rows)) + 64:
        raise TextError(f"{placement.stages} stages × {placement.microbatches} microbatches, but only a few actions")
    return Plan(rows, placement)


def _parse_cell(text: str, line: int) -> Cell:
    item = _parse_item(text, line)
    if isinstance(item, Transfer | Reduce):
        what = "transfers" if isinstance(item, Transfer) else "sums of gradients"
        raise TextError(f"row {line} has {what}; a plan holds compute actions only")
    return item


def parse_rows(text: str) -> list[list[Item]]:
    """Read CSV with or without transfers, line by line; skip empty cells and PyTorch's sharding actions."""
    lines = text.removeprefix("\ufeff").rstrip().splitlines()
    if not lines:
        raise TextError("the text is empty; expected one line of comma-separated actions per device")
    rows = []
    for number, line in enumerate(lines, 1):
        cells = (cell.strip().strip('"') for cell in line.split(","))
        row = [_parse_item(cell, number) for cell in cells if cell and not _SHARDING.fullmatch(cell)]
        if not row:
            raise TextError(f"line {number} is empty; every device needs at least one action")
        rows.append(row)
    return rows


def _parse_item(cell: str, line: int) -> Item:
    if match := _ONE.fullmatch(cell):
        stage, kind, microbatch = int(match[1]), match[2], int(match[3])
        if len(kind) == 1:
            return Action(stage, Op(kind), microbatch)
        return Transfer(stage, End(kind), microbatch)
    if match := _REDUCE.fullmatch(cell):
        return Reduce(int(match[1]))
    if match := _PAIR.fullmatch(cell):
        forward, backward = (_parse_item(half.strip(), line) for half in match.groups())
        if isinstance(forward, Action) and isinstance(backward, Action) and forward.op + backward.op == "FB":
            return Pair(forward, backward)
        raise TextError(f"line {line}: {_short(cell)} must pair a forward with a full backward")
    raise TextError(f"line {line}: {_short(cell)} is not an action {_EXAMPLES}")


def _short(cell: str) -> str:
    """Return the cell, shortened and printable on one line."""
    return repr(cell if len(cell) <= 40 else cell[:37] + "...")
