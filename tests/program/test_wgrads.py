"""Weight gradients that wait for others: only they move, and the program is as sound as before."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto.layers import MOE
from stretto.program.task import BACKWARDS, COMPUTE, WEIGHTS, Kind, Task
from stretto.program.wgrads import joined_ends
from stretto.schedules import dualpipe, gpipe, interleaved, one_f_one_b, zb_v
from stretto.timeline.trace import parse_trace, trace_json

LAYERS = [MOE]


def on_device(program: stretto.Program, device: int) -> list[Task]:
    return [task for task in program.tasks() if task.device == device]


def renamed(task: Task) -> Task:
    """As if every backward were a full one."""
    kind = {Kind.I: Kind.B, Kind.W: Kind.WGRAD}.get(task.kind, task.kind)
    return replace(task, kind=kind)


@given(plans(), st.integers(1, 5), st.booleans(), st.booleans())
def test_only_weight_gradients_move_and_they_stand_together(
    plan: stretto.Plan, count: int, phased: bool, offload: bool
) -> None:
    layers = [LAYERS * 2] * plan.stages if phased else None
    before = stretto.lower(plan, layers=layers, offload=int(offload))
    after = stretto.lower(plan, layers=layers, offload=int(offload), wgrad_microbatches=count)
    assert stretto.check(after) == []
    for device in range(plan.devices):
        old, new = ([renamed(task) for task in on_device(program, device)] for program in (before, after))
        assert Counter(old) == Counter(new)
        usual = [[task for task in tasks if task.kind in COMPUTE and task.kind not in WEIGHTS] for tasks in (old, new)]
        assert usual[0] == usual[1]
        weights: dict[tuple[int, int], list[int]] = defaultdict(list)
        for at, task in enumerate(new):
            if task.kind in WEIGHTS:
                weights[task.stage, task.part].append(at)
        ends = joined_ends(new, count)
        for (stage, part), places in weights.items():
            order = [task for task in old if task.kind in WEIGHTS and (task.stage, task.part) == (stage, part)]
            assert [new[at] for at in places] == order
            groups = Counter(ends.get(at, at) for at in places)
            assert sorted(groups.values(), reverse=True)[:-1] == [count] * (len(groups) - 1)
            assert len(groups) == -(-len(places) // count)
            for at in places:  # none waits longer than for the last of its group
                assert old.index(new[ends.get(at, at)]) >= old.index(new[at])


@given(plans(), st.integers(2, 4))
def test_it_completes_and_what_waits_is_counted_as_memory(plan: stretto.Plan, count: int) -> None:
    program = stretto.lower(plan, wgrad_microbatches=count)
    for costs in (stretto.Costs(), stretto.Costs(BW=0.5)):
        timeline = stretto.simulate(program, costs)
        for number, device in enumerate(timeline.summary().devices):
            assert device.peak_pending >= most_owed(timeline, number)


def most_owed(timeline: stretto.Timeline, device: int) -> int:
    """How many passes wait for their weight gradients at once, for any time at all."""
    begin: dict[tuple[int, int], float] = {}
    end: dict[tuple[int, int], float] = {}
    for span in timeline.spans():
        task = span.task
        if task.device == device and task.kind in BACKWARDS:
            begin[task.backward or (task.stage, task.microbatch)] = span.end
        elif task.device == device and task.kind in WEIGHTS:
            end[task.stage, task.microbatch] = span.end
    times = sorted({*begin.values(), *end.values()})
    return max(sum(begin[it] <= now < end[it] for it in begin) for now in times)


def test_the_order_of_1f1b() -> None:
    program = stretto.lower(one_f_one_b(devices=2, microbatches=4), wgrad_microbatches=3)
    own = [str(task) for task in on_device(program, 1) if task.lane.name == "compute"]
    assert " ".join(own) == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2 1F3 1I3 1W3"
    assert stretto.simulate(program).summary().devices[1].peak_pending == 3
    again = stretto.parse_program(str(program))
    assert str(again) == str(program)


def test_sums_over_devices_wait_for_the_last() -> None:
    program = stretto.lower(dualpipe(devices=4, microbatches=8), wgrad_microbatches=4)
    tasks = list(program.tasks())
    for at, task in enumerate(tasks):
        if task.kind is Kind.REDUCE:
            same = [
                place
                for place, other in enumerate(tasks)
                if other.kind in WEIGHTS and (other.device, other.stage) == (task.device, task.stage)
            ]
            assert max(same) in program.needs(at)


def test_traces_keep_it() -> None:
    for layers in (None, [LAYERS] * 4):
        program = stretto.lower(interleaved(devices=2, microbatches=4), layers=layers, wgrad_microbatches=3)
        again = parse_trace(trace_json(stretto.simulate(program))).program
        assert again.anatomy.wgrad_microbatches == 3
        assert list(map(str, again.tasks())) == list(map(str, program.tasks()))


def test_more_than_there_are_is_all() -> None:
    plan = zb_v(devices=2, microbatches=4)
    for count in (4, 5, 2**40, 10**30):
        program = stretto.lower(plan, wgrad_microbatches=count)
        assert str(program) == str(stretto.lower(plan, wgrad_microbatches=4))
        assert parse_trace(trace_json(stretto.simulate(program))).program.anatomy.wgrad_microbatches == 4


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", None, True])
def test_nonsense(count: object) -> None:
    with pytest.raises(stretto.PlanError, match="wgrad_microbatches is a whole number of at least 1"):
        stretto.lower(gpipe(devices=2, microbatches=2), wgrad_microbatches=count)  # type: ignore[arg-type]
