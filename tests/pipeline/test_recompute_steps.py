"""Recomputed sites in a step: exact, or refused; and nothing of them is left."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import recompute_jobs
from ranks import Ranks
from stretto import Memory

POLICY = {"*.site": "recompute"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(1)
    yield started
    started.stop()


@pytest.mark.parametrize("name", recompute_jobs.EXACT)
def test_exact(ranks: Ranks, name: str) -> None:
    (expected,) = ranks.run(recompute_jobs.trained, 1, name, "none")
    for policy in (POLICY, Memory(sites={"*.site": "recompute+offload"}, min_bytes=0)):
        (found,) = ranks.run(recompute_jobs.trained, 1, name, policy)
        assert found.losses == expected.losses
        assert found.tensors.keys() == expected.tensors.keys()
        for key, tensor in found.tensors.items():
            assert np.array_equal(tensor, expected.tensors[key]), key
        assert found.runs == recompute_jobs.EXACT[name][1]
        assert found.dtype == torch.float32


@pytest.mark.parametrize("name", recompute_jobs.REFUSED)
def test_refused(ranks: Ranks, name: str) -> None:
    (said,) = ranks.run(recompute_jobs.refused, 1, name, POLICY)
    assert recompute_jobs.REFUSED[name][1] in said
    assert ranks.run(recompute_jobs.refused, 1, name, "none") == [""]


def test_a_module_that_keeps_its_graph_keeps_one_run_at_most(ranks: Ranks) -> None:
    ((alive, said),) = ranks.run(recompute_jobs.kept, 1)
    assert max(alive) <= 1, alive
    assert "cannot be recomputed after its step; detach what it keeps beyond that" in said
