"""Rooms for what arrives: never lent twice at once, and no more of them than are needed at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto.layers import Layer
from stretto.pipeline.descriptions import Description, describe
from stretto.pipeline.pytree import LEAF, Tree
from stretto.pipeline.recv_buffers import RecvBuffers, share_recv_buffers
from stretto.program.task import COMPUTE, RECEIVES, Kind
from stretto.program.wgrads import joined_ends
from stretto.schedules import one_f_one_b


@given(plans(), st.integers(1, 4))
def test_a_room_is_lent_to_one_at_a_time_and_no_room_is_idle_for_good(plan: stretto.Plan, count: int) -> None:
    program = stretto.lower(plan, wgrad_microbatches=count)
    for rank in range(plan.devices):
        tasks = [task for task in program.tasks() if task.device == rank]
        joined = joined_ends(tasks, count)
        recv_buffers, after = share_recv_buffers(tasks, joined)
        assert recv_buffers.keys() == {at for at, task in enumerate(tasks) if task.kind in RECEIVES}
        ends = {
            (task.stage, task.microbatch): joined.get(at, at)
            for at, task in enumerate(tasks)
            if task.kind in (Kind.W, Kind.WGRAD)  # every stage's pass ends with its weight gradients
        }
        spans = [
            (at, ends[tasks[at].stage, tasks[at].microbatch], buffer_key) for at, buffer_key in recv_buffers.items()
        ]
        for at, end, buffer_key in spans:
            assert not [1 for other, until, taken in spans if taken == buffer_key and other < at <= until < end]
            assert not [1 for other, _, taken in spans if taken == buffer_key and at < other <= end]
        for at, _, buffer_key in spans:
            earlier = [end for other, end, taken in spans if taken == buffer_key and other < at]
            assert after.get(at, [])[-1:] == sorted(earlier)[-1:]
        for kind, stage in {buffer_key[:2] for buffer_key in recv_buffers.values()}:
            of = [(at, end) for at, end, buffer_key in spans if buffer_key[:2] == (kind, stage)]
            most = max(sum(at <= when <= end for at, end in of) for when, _ in of)
            assert len({buffer_key for buffer_key in recv_buffers.values() if buffer_key[:2] == (kind, stage)}) == most


@given(plans())
def test_a_room_is_lent_again_after_all_that_read_it_on_any_lane(plan: stretto.Plan) -> None:
    layer = Layer("mine", (stretto.Phase("first", "comm"), stretto.Phase("second")))
    program = stretto.lower(plan, layers=[[layer]] * plan.stages)
    for rank in range(plan.devices):
        places = [place for place, task in enumerate(program.tasks()) if task.device == rank]
        tasks = [task for task in program.tasks() if task.device == rank]
        index = {place: at for at, place in enumerate(places)}
        taken, after = share_recv_buffers(tasks, {})
        before: list[set[int]] = []
        for at, place in enumerate(places):
            same = [other for other in range(at) if tasks[other].lane == tasks[at].lane][-1:]
            needs = [index[need] for need in program.needs(place) if need in index]
            before.append({k for one in (*same, *needs, *after.get(at, ())) for k in (one, *before[one])})
        holds: dict[object, tuple[int, int]] = {}
        for at, key in taken.items():
            readers = [
                other
                for other in range(at)
                if key in holds
                and tasks[other].kind in COMPUTE
                and (tasks[other].stage, tasks[other].microbatch) == holds[key]
            ]
            assert before[at].issuperset(readers)
            holds[key] = tasks[at].stage, tasks[at].microbatch


def test_in_the_steady_state_of_1f1b_rooms_are_as_many_as_microbatches_in_flight() -> None:
    program = stretto.lower(one_f_one_b(devices=4, microbatches=32))
    for rank, inputs in ((1, 3), (2, 2), (3, 1)):
        tasks = [task for task in program.tasks() if task.device == rank]
        recv_buffers = set(share_recv_buffers(tasks, {})[0].values())
        assert len({buffer_key for buffer_key in recv_buffers if buffer_key[0] is Kind.RECV_F}) in (
            inputs,
            inputs + 1,
        )  # one may come early
        assert len({buffer_key for buffer_key in recv_buffers if buffer_key[0] is Kind.RECV_B}) <= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory of streams")
def test_memory_that_the_device_still_reads_is_not_lent_again() -> None:
    """Where shapes change, a buffer that no longer fits is freed, while a message that lay in it may still be read."""

    def described(rows: int) -> Description:
        return describe(Tree([torch.empty(rows, 1024, device="cuda")], LEAF, [True]), torch.device("cuda"), 0)[0]

    buffers, lane = RecvBuffers(torch.device("cuda")), torch.cuda.Stream()
    buffers.reader = torch.cuda.current_stream()
    with torch.cuda.stream(lane):
        first = buffers.take((Kind.RECV_F, 1, 0), described(4096)).tensors[0].data_ptr()
    torch.cuda._sleep(2_000_000_000)  # a second in which the device reads the first message
    with torch.cuda.stream(lane):
        buffers.take((Kind.RECV_F, 1, 0), described(64))
        other = buffers.take((Kind.RECV_B, 1, 0), described(4096)).tensors[0].data_ptr()
    assert other != first
