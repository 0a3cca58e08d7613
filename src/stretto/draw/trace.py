"""A timeline as Chrome trace JSON, for Perfetto: a process per device, a thread per lane. It can be read back."""

from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import numpy as np

from stretto.costs import LANES, Costs
from stretto.ir.errors import StrettoError, TextError
from stretto.ir.placement import Placement
from stretto.program.phases import Anatomy, Layer
from stretto.program.program import Program
from stretto.program.task import SENDS, WEIGHTS, Kind, Lane, Task
from stretto.program.work import Ints, Work
from stretto.timeline import Timeline

_UNIT = 1000.0  # microseconds shown for one unit of time


class _Origin(msgspec.Struct):
    """What the slices do not say of their program."""

    routes: list[list[int]]
    microbatches: int
    layers: list[list[Layer]] | None
    """None where actions are whole."""


def draw_trace(timeline: Timeline, *, costs: Costs | None = None) -> str:
    """Slices for tasks, arrows for transfers, counters for memory. One unit of time shows as a millisecond.

    Bytes are counted if the costs name any, activations always.
    """
    events = [*_names(timeline), *_slices(timeline), *_counters(timeline, costs)]
    program = timeline.program
    origin = _Origin(
        [list(route) for route in program.placement.routes],
        program.placement.microbatches,
        None if program.anatomy.is_whole else [list(stage) for stage in program.anatomy.layers],
    )
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"stretto": msgspec.to_builtins(origin)}}
    return msgspec.json.encode(trace).decode()


def parse_trace(text: str) -> Timeline:
    """Read what `draw_trace` wrote: the same program with the same times.

    >>> from stretto import gpipe, simulate
    >>> parse_trace(draw_trace(simulate(gpipe(devices=2, microbatches=3)))).makespan
    12.0
    """
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
    except (StrettoError, ValueError, IndexError) as error:
        raise TextError(f"not a sound trace of Stretto's: {error}") from None
    start, end = (np.array([getattr(slice_.args, name) for slice_ in slices]) for name in ("start", "end"))
    if not (np.isfinite(start).all() and np.isfinite(end).all() and (start <= end).all()):
        raise TextError("not a sound trace of Stretto's: a task ends before it starts")
    return Timeline(program, start, end)


class _Args(msgspec.Struct):
    """All there is to know of a task; Perfetto shows it with the slice."""

    kind: str
    stage: int
    microbatch: int
    lane: str
    start: float
    end: float
    needs: list[int]
    peer: int | None = None
    backward: tuple[int, int] | None = None
    part: int = 0
    slot: int = -1
    mate: int = -1


class _Slice(msgspec.Struct):
    pid: int
    args: _Args


class _Trace(msgspec.Struct):
    traceEvents: list[dict[str, Any]]  # noqa: N815
    otherData: dict[str, Any]  # noqa: N815


def _program(origin: _Origin, slices: list[_Slice]) -> Program:
    placement = Placement(tuple(map(tuple, origin.routes)), origin.microbatches)
    anatomy = Anatomy.whole(placement.stages) if origin.layers is None else Anatomy(origin.layers)
    tasks = [
        Task(
            Lane(slice_.pid, args.lane, args.peer),
            Kind[args.kind] if args.kind in Kind.__members__ else _refuse(f"{args.kind!r:.40} is no kind of task"),
            args.stage,
            args.microbatch,
            args.backward,
            args.part,
            slot=args.slot,
        )
        for slice_ in slices
        for args in [slice_.args]
    ]
    lanes = tuple(sorted({task.lane for task in tasks}))
    index = {lane: k for k, lane in enumerate(lanes)}
    work = Work.of_tasks(tasks)
    needs = [(task, need) for task, slice_ in enumerate(slices) for need in slice_.args.needs]
    needing, need = np.array(needs, dtype=np.int64).reshape(-1, 2).T
    mate = np.array([slice_.args.mate for slice_ in slices])
    _demand(work, placement, anatomy, lanes, need, mate)
    return Program.of(
        lanes, np.array([index[task.lane] for task in tasks]), work, [(needing, need)], mate, placement, anatomy
    )


def _demand(
    work: Work, placement: Placement, anatomy: Anatomy, lanes: tuple[Lane, ...], need: Ints, mate: Ints
) -> None:
    """What every program of ours keeps to, and what reads it relies on."""
    work.demand(placement)
    parts, weights = np.diff(anatomy.pass_rows), np.diff(anatomy.weight_rows)
    limit = np.where(work.among(WEIGHTS), weights[work.stage], parts[work.stage])
    ends = np.flatnonzero(mate >= 0)
    if ((work.part < 0) | (work.part >= limit)).any():
        _refuse("a task is a part that its stage does not have")
    if ((need < 0) | (need >= len(work))).any() or not np.array_equal(np.sort(mate[ends]), ends):
        _refuse("a task refers to one that is not there")
    devices = 1 + max(max(route) for route in placement.routes)
    if any(lane.name not in LANES or not 0 <= lane.device < devices for lane in lanes):
        _refuse("a task is on a lane that no program has")


def _refuse(message: str) -> NoReturn:
    raise TextError(message)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for device in range(timeline.program.devices):
        yield {"ph": "M", "pid": device, "name": "process_name", "args": {"name": f"device {device}"}}
        yield {"ph": "M", "pid": device, "name": "process_sort_index", "args": {"sort_index": device}}
    for tid, lane in enumerate(timeline.program.lanes):
        place = {"ph": "M", "pid": lane.device, "tid": tid}
        yield {**place, "name": "thread_name", "args": {"name": str(lane)}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slices(timeline: Timeline) -> Iterator[dict[str, Any]]:
    program = timeline.program
    lanes, mates = program.lane.tolist(), program.mate.tolist()
    for index, span in enumerate(timeline.spans()):
        task, start, end = span.task, span.start * _UNIT, span.end * _UNIT
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
                needs=program.needs(index),
                peer=task.lane.peer,
                backward=task.backward,
                part=task.part,
                slot=task.slot,
                mate=mates[index],
            ),
        }
        # An arrow from where something is sent to each place where it arrives, numbered by the latter.
        flow = {**place, "name": "transfer", "cat": "transfer"}
        if mates[index] >= 0:
            if task.kind in SENDS or (task.kind is Kind.BROADCAST and task.device == task.stage):
                for end_index in program.ends(index)[1:]:
                    yield {"ph": "s", "ts": start, "id": end_index, **flow}
            else:
                yield {"ph": "f", "bp": "e", "ts": end, "id": index, **flow}


def _counters(timeline: Timeline, costs: Costs | None) -> Iterator[dict[str, Any]]:
    for device, held in enumerate(timeline.memory(costs)):
        counts = zip(held.time.tolist(), held.activations.tolist(), held.pending.tolist(), strict=True)
        for time, activations, pending in counts:
            args = {"activations": activations, "between I and W": pending}
            yield {"ph": "C", "pid": device, "name": "stage passes held", "ts": time * _UNIT, "args": args}
        if held.bytes is not None:
            for time, size in zip(held.time.tolist(), held.bytes.tolist(), strict=True):
                yield {"ph": "C", "pid": device, "name": "bytes held", "ts": time * _UNIT, "args": {"bytes": size}}
