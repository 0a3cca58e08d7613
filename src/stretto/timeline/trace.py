"""A timeline as Chrome trace JSON, for Perfetto: a process per device, a thread per lane. It can be read back."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import numpy as np

from stretto.costs import Costs, Unit
from stretto.ir.errors import StrettoError, TextError
from stretto.ir.mesh import MeshShape
from stretto.ir.placement import Placement
from stretto.layers import Layer
from stretto.program.anatomy import Anatomy
from stretto.program.columns import TaskColumns
from stretto.program.needs import lanes_of, link_tasks
from stretto.program.program import Program
from stretto.program.task import (
    COMPUTE,
    EXPERT_SUM,
    FORWARDS,
    LANES,
    PAIR_PHASES,
    RECEIVES,
    SENDS,
    UPDATES,
    WEIGHTS,
    Kind,
    Lane,
    Task,
)
from stretto.timeline.memory import Floats
from stretto.timeline.timeline import Timeline

_MICROSECONDS: dict[Unit, float] = {"s": 1e6, None: 1e3}
"""Microseconds, the format's unit, per unit of time; times without a unit show as milliseconds."""


class _Origin(msgspec.Struct):
    """The facts about a program that its slices do not contain."""

    routes: list[list[Annotated[int, msgspec.Meta(ge=0, lt=2**20)]]]
    microbatches: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    layers: list[list[Layer]] | None
    """None if actions are not split into phases."""
    ties: list[list[int]] = []
    """Stages that share weights."""
    calls: list[str] = []
    """The names of a user's own calls."""
    wgrad_microbatches: Annotated[int, msgspec.Meta(ge=1, lt=2**40)] = 1
    """How many microbatches' weight gradients are computed together."""
    mesh: dict[str, int] | None = None
    experts: list[int] = []
    """Stages whose experts are shared out among expert-parallel ranks."""
    unit: Unit = None
    """The unit of the times in the slices' arguments. Old traces do not name it, and load without a unit."""


def trace_json(timeline: Timeline, *, costs: Costs | None = None) -> str:
    """Return a trace: slices for tasks, arrows for transfers, counters for memory.

    Seconds show as seconds; times without a unit show as milliseconds. The file also stores the unit and the original
    times. It always counts activations; bytes held if the costs name any, and bytes allocated if they were recorded.
    """
    events = [*_names(timeline), *_slices(timeline), *_late(timeline), *_counters(timeline, costs)]
    program = timeline.program
    placement, anatomy = program.placement, program.anatomy
    origin = _Origin(
        [list(route) for route in placement.routes],
        placement.microbatches,
        None if anatomy.is_whole else [list(stage) for stage in anatomy.layers],
        [list(tie) for tie in anatomy.ties],
        list(anatomy.calls),
        anatomy.wgrad_microbatches,
        None if placement.mesh is None else dict(placement.mesh.dimensions),
        list(anatomy.experts),
        timeline.unit,
    )
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"stretto": msgspec.to_builtins(origin)}}
    return msgspec.json.encode(trace).decode()


def parse_trace(text: str) -> Timeline:
    """Read what `trace_json` wrote: the same program with the same times."""
    try:
        trace = msgspec.json.decode(text, type=_Trace)
        origin = msgspec.convert(trace.otherData["stretto"], _Origin)
        slices = [msgspec.convert(event, _Slice) for event in trace.traceEvents if event.get("ph") == "X"]
    except KeyError:
        raise TextError("this trace is not one of Stretto's: it does not say which program it shows") from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise TextError(f"not a trace of Stretto's: {error}") from None
    if not slices:
        raise TextError("this trace shows no tasks")
    try:
        program = _program(origin, slices)
    except StrettoError as error:
        raise TextError(f"not a sound trace of Stretto's: {error}") from None
    start, end = (np.array([getattr(slice_.args, name) for slice_ in slices]) for name in ("start", "end"))
    try:
        issued = _recorded([slice_.args.issued for slice_ in slices], "when they were issued")
        allocated = _recorded([slice_.args.allocated for slice_ in slices], "how many bytes were allocated")
        return Timeline(program, start, end, origin.unit, issued, allocated)
    except StrettoError as error:
        raise TextError(f"not a sound trace of Stretto's: {error}") from None


def _recorded(column: list[float | None], what: str) -> Floats | None:
    """Return a column that was recorded for all tasks, or None if it was for none."""
    known = [number for number in column if number is not None]
    if len(known) not in (0, len(column)):
        _refuse(f"it says of some tasks only {what}")
    return np.array(known) if known else None


_Index = Annotated[int, msgspec.Meta(ge=-1, lt=2**40)]


class _Args(msgspec.Struct, omit_defaults=True):
    """Everything about a task; Perfetto shows it with the slice."""

    kind: Literal[tuple(Kind.__members__)]  # type: ignore[valid-type]
    stage: _Index
    microbatch: _Index
    lane: str
    start: float
    end: float
    issued: float | None = None
    allocated: float | None = None
    peer: _Index | None = None
    backward: tuple[_Index, _Index] | None = None
    part: _Index = 0
    slot: _Index = -1
    woven: bool = False
    """Old traces do not say it; their pairs load as if their phases ran alone."""
    needs: list[_Index] | None = None
    """Given for a weight update, where the mode decides, and for a user's own program; in training, needs and
    counterparts follow from the tasks."""
    counterpart: _Index = -1


class _Slice(msgspec.Struct):
    pid: int
    args: _Args


class _Trace(msgspec.Struct):
    traceEvents: list[dict[str, Any]]
    otherData: dict[str, Any]


def _program(origin: _Origin, slices: list[_Slice]) -> Program:
    mesh = None if origin.mesh is None else MeshShape.of(origin.mesh)
    placement = Placement(tuple(map(tuple, origin.routes)), origin.microbatches, mesh)
    if placement.stages * placement.microbatches > 4 * len(slices) + 64:
        _refuse("it has room for far more tasks than it shows")
    if origin.layers is not None and len(origin.layers) != placement.stages:
        _refuse(f"it has {placement.stages} stages, but layers for {len(origin.layers)}")
    if origin.experts and (mesh is None or mesh.ep == 1):
        _refuse("it has experts on several ranks, but no mesh with several expert-parallel ranks")
    if origin.calls and origin.layers is not None:
        _refuse("a user's own program has no layers")
    make = partial(Anatomy.whole, placement.stages) if origin.layers is None else partial(Anatomy, origin.layers)
    anatomy = make(
        ties=origin.ties,
        experts=origin.experts,
        calls=origin.calls,
        wgrad_microbatches=origin.wgrad_microbatches,
    )
    tasks = [_task(slice_, placement, anatomy) for slice_ in slices]
    if any((task.kind is Kind.CALL) != bool(origin.calls) for task in tasks):
        _refuse("calls of a user's own program are mixed with other tasks")
    if not origin.calls and not any(task.kind in UPDATES for task in tasks):
        return link_tasks(tasks, placement, anatomy)
    needs = [(task, need) for task, slice_ in enumerate(slices) for need in slice_.args.needs or ()]
    needing, need = np.array(needs, dtype=np.int64).reshape(-1, 2).T
    counterpart = np.array([slice_.args.counterpart for slice_ in slices])
    ends = np.flatnonzero(counterpart >= 0)
    if (
        (need >= needing).any()
        or not np.array_equal(np.sort(counterpart[ends]), ends)
        or (counterpart == np.arange(len(counterpart))).any()
    ):
        _refuse("a task refers to one that is not there")
    lanes, lane = lanes_of(tasks)
    return Program.of(lanes, lane, TaskColumns.of_tasks(tasks), [(needing, need)], counterpart, placement, anatomy)


def _task(slice_: _Slice, placement: Placement, anatomy: Anatomy) -> Task:
    args = slice_.args
    kind = Kind[args.kind]
    lane = Lane(slice_.pid, args.lane, args.peer)
    stages = [args.stage] if args.backward is None else [args.stage, args.backward[0]]
    microbatches = [args.microbatch] if args.backward is None else [args.microbatch, args.backward[1]]
    for name, values, limit in (
        ("stage", stages, placement.stages),
        ("microbatch", microbatches, placement.microbatches),
        ("device", [lane.device, args.peer or 0], placement.devices),
    ):
        if not all(0 <= value < limit for value in values):
            _refuse(f"{name} {max(values)} does not exist; there are {limit}")
    first, parts = 0, 1
    if kind in COMPUTE:
        own = anatomy.weight_steps if kind in WEIGHTS else anatomy.forward if kind in FORWARDS else anatomy.backward
        parts = len(own[args.stage])
    elif kind is Kind.REDUCE:
        first, parts = EXPERT_SUM if args.stage in anatomy.experts else 0, 1 + len(anatomy.ties)
    elif kind is Kind.CALL:
        parts = len(anatomy.calls)
    if not first <= args.part < parts:
        _refuse(f"{args.kind} of stage {args.stage} has no part {args.part}")
    if (args.backward is not None) != (kind is Kind.PAIR):
        _refuse("a pair, and only a pair, has a backward")
    if args.woven and (anatomy.is_whole or kind not in PAIR_PHASES):
        _refuse("only the phases of a pair are woven")
    if kind is Kind.CALL:
        if args.peer is not None:
            _refuse(f"a call on lane {lane.name} has no peer")
    elif lane.name not in LANES[kind] or (args.peer is not None) != (lane.name in ("send", "recv")):
        _refuse(f"{args.kind} is not done on a lane {lane.name}")
    return Task(lane, kind, args.stage, args.microbatch, args.backward, args.part, slot=args.slot, woven=args.woven)


def _refuse(message: str) -> NoReturn:
    raise TextError(message)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for device in range(timeline.program.devices):
        name = f"device {timeline.program.placement.device_name(device)}"
        yield {"ph": "M", "pid": device, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": device, "name": "process_sort_index", "args": {"sort_index": device}}
    for tid, lane in enumerate(timeline.program.lanes):
        place = {"ph": "M", "pid": lane.device, "tid": tid}
        yield {**place, "name": "thread_name", "args": {"name": str(lane)}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slices(timeline: Timeline) -> Iterator[dict[str, Any]]:
    program, scale = timeline.program, _MICROSECONDS[timeline.unit]
    lanes, counterparts = program.lane.tolist(), program.counterpart.tolist()
    says_needs = program.is_update or program.is_own
    issued, allocated = (
        [None] * len(program) if column is None else column.tolist() for column in (timeline.issued, timeline.allocated)
    )
    for index, span in enumerate(timeline.spans()):
        task, start, end = span.task, span.start * scale, span.end * scale
        place = {"pid": task.device, "tid": lanes[index]}
        yield {
            "ph": "X",
            **place,
            "name": str(task).removesuffix("OVERLAP_F_B"),
            "cat": task.lane.name,
            "ts": start,
            "dur": end - start,
            "args": _Args(
                kind=task.kind.name,
                stage=task.stage,
                microbatch=task.microbatch,
                lane=task.lane.name,
                start=span.start,
                end=span.end,
                issued=issued[index],
                allocated=allocated[index],
                needs=program.needs(index) if says_needs else None,
                peer=task.lane.peer,
                backward=task.backward,
                part=task.part,
                slot=task.slot,
                woven=task.woven,
                counterpart=counterparts[index] if says_needs else -1,
            ),
        }
        # An arrow from each send to each of its receives; its id is the receive's task index.
        flow = {**place, "name": "transfer", "cat": "transfer"}
        if counterparts[index] >= 0 and task.kind in (*SENDS, *RECEIVES, Kind.BROADCAST):
            if task.kind in SENDS or (task.kind is Kind.BROADCAST and task.device == task.stage):
                for end_index in program.ends(index)[1:]:
                    yield {"ph": "s", "ts": start, "id": end_index, **flow}
            else:
                yield {"ph": "f", "bp": "e", "ts": end, "id": index, **flow}


def _late(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield idle time due to late hosts, on separate tracks so that `parse_trace` does not read it as tasks."""
    program, gaps, scale = timeline.program, timeline.late_gaps(), _MICROSECONDS[timeline.unit]
    columns = zip(gaps.cause.tolist(), gaps.task.tolist(), gaps.begin.tolist(), gaps.end.tolist(), strict=True)
    for number, (late, waiting, start, end) in enumerate(columns):
        cause, device = program.task(late), program.device.item(waiting)
        where = "" if cause.device == device else f" on device {cause.device}"
        track = {"pid": device, "cat": "host", "id": number, "name": f"{cause}{where} not issued yet"}
        yield {"ph": "b", "ts": start * scale, **track}
        yield {"ph": "e", "ts": end * scale, **track}


def _counters(timeline: Timeline, costs: Costs | None) -> Iterator[dict[str, Any]]:
    scale = _MICROSECONDS[timeline.unit]
    for device, held in enumerate(timeline.memory(costs)):
        counts = zip(held.time.tolist(), held.activations.tolist(), held.pending.tolist(), strict=True)
        for time, activations, pending in counts:
            args = {"activations": activations, "between I and W": pending}
            yield {"ph": "C", "pid": device, "name": "stage passes held", "ts": time * scale, "args": args}
        if held.bytes is not None:
            for time, size in zip(held.time.tolist(), held.bytes.tolist(), strict=True):
                yield {"ph": "C", "pid": device, "name": "bytes held", "ts": time * scale, "args": {"bytes": size}}
    for device, measured in enumerate(timeline.allocated_memory() or []):
        for time, size in zip(measured.time.tolist(), measured.bytes.tolist(), strict=True):
            yield {"ph": "C", "pid": device, "name": "bytes allocated", "ts": time * scale, "args": {"bytes": size}}
