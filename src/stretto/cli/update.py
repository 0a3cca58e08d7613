"""`stretto simulate weight_update`: how long a weight update takes in each mode."""

import math
from pathlib import Path

import msgspec

from stretto.cli.console import DRAWN, number, out, print_table, print_timeline, working
from stretto.cli.inputs import DEVICES, CostTable, size_with_unit, write_figure
from stretto.costs import BucketTimes, Costs
from stretto.ir.errors import CostError, PlanError
from stretto.program.update import MODES, weight_update
from stretto.schedules.registry import WEIGHT_UPDATE
from stretto.simulate import simulate
from stretto.timeline import Timeline

LARGEST = 2_000_000  # tasks


def is_weight_update(name: str) -> bool:
    """Return whether a user has named the weight update; case and dashes do not matter, as in names of schedules."""
    return name.lower().replace("-", "_") == WEIGHT_UPDATE


class UpdateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a weight update, from the command line; None if not given."""

    size: str | None = None
    bucket: str | None = None
    h2d: str | None = None
    broadcast: str | None = None
    reload: str | None = None
    mode: str | None = None

    def given(self) -> bool:
        return self != UpdateOptions()


_DEFAULTS = UpdateOptions(
    size="16GB", bucket="2GB", h2d="50GB/s", broadcast="100GB/s", reload="200GB/s", mode="overlap_reload"
)


class Update(msgspec.Struct, frozen=True):
    """One mode's figures."""

    mode: str
    seconds: float
    gb_per_second: float
    """The rate at which the whole model reaches every device."""
    busy: dict[str, float]
    """The share of the time that each step runs on the first device."""


def simulate_update(
    devices: int | None, options: UpdateOptions, table: CostTable, *, output: Path | None, json: bool
) -> None:
    """Compare all modes, and draw one."""
    devices = DEVICES if devices is None else devices
    given = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
    chosen = {**msgspec.structs.asdict(_DEFAULTS), **given}
    if (mode := chosen["mode"]) not in MODES:
        raise PlanError(f"--mode is one of {', '.join(MODES)} (got {mode!r:.40})")
    if other := [name for name in table.names if name not in ("shared", "unit")]:
        raise CostError(f"a weight update takes only shared resources from --costs; leave {other[0]} out")
    total, each = (round(_positive(name, chosen[name])) for name in ("size", "bucket"))
    buckets = -(-total // each)
    if devices < 1 or buckets * (2 * devices + 1) > LARGEST:
        raise PlanError(f"{devices} devices × {buckets} buckets: stay between 1 device and {LARGEST:,} tasks")
    times = {name: each / _positive(name, chosen[name], per="/s") for name in BucketTimes.__struct_fields__}
    costs = Costs(unit="s", bucket=BucketTimes(**times), shared=table.costs.shared)
    with working("simulating the update"):
        timelines = {
            name: simulate(weight_update(devices=devices, buckets=buckets, mode=name), costs) for name in MODES
        }
    rows = [
        Update(name, timeline.makespan, total / timeline.makespan / 1e9, _busy(timeline))
        for name, timeline in timelines.items()
    ]
    if output is not None:
        with working(f"writing {output}"):
            write_figure(timelines[mode], output)
    if json:
        out.print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    _print(rows)
    out.print(
        f"\n{buckets} buckets in {math.ceil(buckets / devices)} rounds; columns: how much of the time each step runs"
    )
    if output is not None:
        out.print(f"wrote {output}")
    elif len(timelines[mode].program) <= DRAWN:
        print_timeline(timelines[mode])


def _print(rows: list[Update]) -> None:
    steps = rows[-1].busy
    print_table(
        ["mode", "seconds", "GB/s", *steps],
        [
            [
                row.mode,
                number(row.seconds),
                f"{row.gb_per_second:.1f}",
                *(f"{row.busy.get(step, 0):.0%}" for step in steps),
            ]
            for row in rows
        ],
    )


def _positive(name: str, text: str, *, per: str = "") -> float:
    value = size_with_unit(f"--{name}", text, per=per)
    if not 1 <= value <= 1e21:
        raise CostError(f"--{name} must be at least 1 byte{per} and at most 1e21 (got {text!r:.40})")
    return value


def _busy(timeline: Timeline) -> dict[str, float]:
    program, length = timeline.program, timeline.end - timeline.start
    return {
        lane.name: float(length[program.lane == index].sum()) / timeline.makespan
        for index, lane in enumerate(program.lanes)
        if lane.device == 0
    }
