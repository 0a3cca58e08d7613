"""Policies that costs choose, in pipelines: from a dry run to a step that trains the same."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import memory_jobs
from devices import device_ranks
from models import Case
from ranks import Ranks
from stretto import Costs, Memory, choose_memory, lower
from stretto.costs import Link
from stretto.ir.errors import PipelineError
from stretto.pipeline.memory_report import MemoryReport
from stretto.timeline.memory_bound import memory_bound

AUTO = Memory(sites={"*": "offload"}, fraction="auto", min_bytes=0)
TIMES = Costs(F=1, I=1, W=1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = device_ranks(4)
    yield started
    started.stop()


@pytest.mark.parametrize("schedule", ["gpipe", "dualpipe", "interleaved"])
def test_from_a_dry_run_to_a_step_that_trains_the_same(ranks: Ranks, schedule: str) -> None:
    case = Case(schedule, 4, 8, layers=10, dropout=0.2, dtype=torch.float32)
    keeps, leaves = Memory(min_bytes=0), Memory(sites={"*": "offload"}, min_bytes=0)
    (costs, totals), *_ = ranks.run(memory_jobs.counted, 4, case, keeps, TIMES)
    (others, _), *_ = ranks.run(memory_jobs.counted, 4, case, leaves, TIMES)
    assert others.offload_bytes == costs.offload_bytes, "what may leave is counted with a policy or without"
    # A device holds what the report says, or a little more where stages have several devices.
    late = msgspec.structs.replace(costs, BW=1.0)
    bound = [device.peak_bytes for device in memory_bound(lower(case.plan(), costs=late), late)]
    assert np.all(np.array(bound) >= np.array(totals) * (1 - 1e-9))
    assert np.all(np.array(bound) <= np.array(totals) * 1.02)

    largest = max(costs.offload_bytes)
    slow = msgspec.structs.replace(costs, host=Link(bandwidth=0.6 * largest))
    plain = ranks.run(memory_jobs.trained, 4, case, "none")
    told = ranks.run(memory_jobs.chosen, 4, case, slow, AUTO)
    expected = choose_memory(case.plan(), slow, memory=AUTO)
    assert any(0 < stage.fraction < 1 for stage in expected.stages)
    for rank, ((losses, gradients), choice, offloaded, logged) in enumerate(told):
        (plain_losses, plain_gradients), *_ = plain[rank]
        assert losses == plain_losses
        assert gradients.keys() == plain_gradients.keys()
        assert all(np.array_equal(gradients[name], plain_gradients[name]) for name in gradients)
        assert choice == expected
        assert logged == (str(expected) if rank == 0 else "")
        for stage, left in zip(choice.stages, offloaded, strict=True):
            assert left <= stage.leaves  # whole tensors leave
            assert bool(left) == (stage.fraction > 0.2) or stage.fraction <= 0.2


def test_each_stage_offloads_its_own_fraction(ranks: Ranks) -> None:
    case = Case("gpipe", 4, 8, layers=10, dtype=torch.float32)
    policy = Memory(sites={"*": "offload"}, min_bytes=0, fraction=(0.0, 1.0, 0.5, 0.0))
    offloaded = ranks.run(memory_jobs.chosen, 4, case, TIMES, policy)[0][2]
    (costs, _), *_ = ranks.run(memory_jobs.counted, 4, case, policy, TIMES)
    assert offloaded[:2] == [0, costs.offload_bytes[1]]
    assert 0 < offloaded[2] <= 0.5 * costs.offload_bytes[2]
    assert offloaded[3] == 0


GIVEN = Costs(F=1, I=1, W=1, activation_bytes=1e6, host=Link(bandwidth=1e9))
REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no bytes": ([{"memory": "auto", "costs": TIMES}], "the costs have no activation_bytes"),
    "no costs": ([{"memory": "auto"}], "there are no costs to choose by"),
    "no bandwidth": ([{"memory": "auto", "costs": Costs(activation_bytes=1)}], "the costs have no bandwidth to host"),
    "other costs": (
        [{"memory": "auto", "costs": msgspec.structs.replace(GIVEN, F=time)} for time in (1, 2)],
        "rank 1 was given other costs than rank 0, and memory is auto, which goes by them",
    ),
    "one rank only": (
        [{"memory": "auto", "costs": GIVEN}, {"memory": "none", "costs": GIVEN}],
        "rank 1 was given another memory than rank 0: only that of rank 0 is auto",
    ),
    "entries": (
        [{"memory": Memory(sites={"*": "offload"}, fraction=(0.5,) * 3)}],
        "memory.fraction has 3 entries, but there are 2 stages",
    ),
    "a short form": ([{"memory": "auto", "checkpoint": True}], "checkpoint is a short form of memory, so give one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks: Ranks, name: str) -> None:
    options, says = REFUSED[name]
    for said in ranks.run(memory_jobs.refused, 2, options):
        assert says in said


def test_a_report_without_the_loss_gives_no_costs() -> None:
    report = MemoryReport((), (), has_loss=False, memory=Memory())
    with pytest.raises(PipelineError, match="the dry run had no targets, so its bytes leave out the loss"):
        report.costs(TIMES)
