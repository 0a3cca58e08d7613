"""Recomputed sites in a step: exact, or refused; and nothing of them is left."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import odd_sites
import recompute_jobs
from devices import device_ranks
from ranks import Ranks
from stretto import Memory

POLICY = {"*.site": "recompute"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = device_ranks(1)
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


@pytest.mark.parametrize("policy", [{"*.site": "recompute+fp8"}, {"*.kept": "fp8", "*.site": "recompute"}], ids=str)
@pytest.mark.parametrize("name", odd_sites.FLOAT8)
def test_what_comes_back_from_float8_may_lie_otherwise_in_memory(ranks: Ranks, name: str, policy: Any) -> None:
    (far,) = ranks.run(recompute_jobs.near, 1, name, policy)
    assert far < 0.1
    assert ranks.run(recompute_jobs.near, 1, name, {"*.kept": "keep", "*.site": "recompute"}) == [0]


@pytest.mark.parametrize("cached", [True, False])
def test_nothing_is_held_by_an_autocast_that_goes_on(ranks: Ranks, cached: bool) -> None:
    """Its cache holds the casts of leaves, and so would hold what a site is recomputed from."""
    assert ranks.run(recompute_jobs.held_by_autocast, 1, cached) == [[(0, False)] * 3]


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
def test_functions_that_may_read_attributes_of_what_they_save_are_warned_of(ranks: Ranks, policy: str) -> None:
    """What saved-tensor hooks return has none."""
    memory = Memory(sites={"*": policy}, min_bytes=0)  # type: ignore[dict-item]
    said = ranks.run(recompute_jobs.said_of_attributes, 1, "scale", memory)[0]
    assert any("Scales saves a tensor with attributes (scale) in " in text for text in said), said
    assert not any("attributes" in text for text in ranks.run(recompute_jobs.said_of_attributes, 1, "_own", memory)[0])
    assert ranks.run(recompute_jobs.said_of_attributes, 1, "scale", "none") == [set()]


def test_a_module_that_keeps_its_graph_keeps_one_run_at_most(ranks: Ranks) -> None:
    ((alive, said),) = ranks.run(recompute_jobs.kept, 1)
    assert max(alive) <= 1, alive
    assert "cannot be recomputed after its step; detach what it keeps beyond that" in said
