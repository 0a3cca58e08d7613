"""A timeline as Chrome trace JSON, for Perfetto: a process per device, a thread per lane."""

from collections.abc import Iterator
from typing import Any

import msgspec

from stretto.costs import Costs
from stretto.program.task import SENDS
from stretto.timeline import Timeline

_UNIT = 1000.0  # microseconds shown for one unit of time


def draw_trace(timeline: Timeline, *, costs: Costs | None = None) -> str:
    """Slices for tasks, arrows for transfers, counters for memory. One unit of time shows as a millisecond.

    Bytes are counted if the costs name any, activations always.
    """
    events = [*_names(timeline), *_slices(timeline), *_counters(timeline, costs)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}).decode()


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
    lanes = program.lane.tolist()
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
            "args": {"kind": task.kind.name, "stage": task.stage, "microbatch": task.microbatch},
        }
        if (mate := program.mate.item(index)) >= 0:
            sending = task.kind in SENDS
            arrow = {"ph": "s", "ts": start} if sending else {"ph": "f", "bp": "e", "ts": end}
            yield {**arrow, **place, "id": min(index, mate), "name": "transfer", "cat": "transfer"}


def _counters(timeline: Timeline, costs: Costs | None) -> Iterator[dict[str, Any]]:
    for device, held in enumerate(timeline.memory(costs)):
        counts = zip(held.time.tolist(), held.activations.tolist(), held.pending.tolist(), strict=True)
        for time, activations, pending in counts:
            args = {"activations": activations, "between I and W": pending}
            yield {"ph": "C", "pid": device, "name": "stage passes held", "ts": time * _UNIT, "args": args}
        if held.bytes is not None:
            for time, size in zip(held.time.tolist(), held.bytes.tolist(), strict=True):
                yield {"ph": "C", "pid": device, "name": "bytes held", "ts": time * _UNIT, "args": {"bytes": size}}
