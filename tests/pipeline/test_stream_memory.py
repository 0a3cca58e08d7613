"""Where lanes are streams, memory is given away only when its stream waits for all that used it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ranks import Ranks
from stream_jobs import Averaging, foreseen, watched
from stretto import Memory
from stretto.pipeline.storages import storages_of

POLICIES: dict[str, Any] = {
    "none": "none",
    "recompute": {"*": "recompute"},
    "offload": Memory(sites={"*": "offload"}, min_bytes=0),
    "norms": Memory(sites={"*norm": "recompute", "*": "offload"}, min_bytes=0),
    "half": Memory(sites={"*.experts": "recompute+offload", "*": "offload"}, min_bytes=0, fraction=0.5),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(1)
    yield started
    started.stop()


@pytest.mark.parametrize("split", [False, True])
def test_no_policy_gives_memory_away_too_early(ranks: Ranks, split: bool) -> None:
    peaks, expected = {}, None
    for name, policy in POLICIES.items():
        ((wrong, peaks[name], left, grads),) = ranks.run(watched, 1, split, policy)
        assert wrong == [], name
        assert left == (0 if name in ("none", "recompute") else 8)
        expected = grads if expected is None else expected
        assert all(torch.equal(found, other) for found, other in zip(grads, expected, strict=True)), name
    assert peaks["norms"] < peaks["offload"] < peaks["none"], peaks


def test_joined_weight_gradients_neither(ranks: Ranks) -> None:
    assert ranks.run(watched, 1, True, POLICIES["offload"], "nobody", 2)[0][0] == []


def test_what_a_phase_of_communication_sets_neither(ranks: Ranks) -> None:
    """The module drops it when the next microbatch comes, and only a graph of the compute lane still holds it."""
    assert ranks.run(watched, 1, False, "none", "nobody", 1, Averaging)[0][0] == []


def test_all_memory_of_a_tensor_is_found() -> None:
    dense = torch.eye(4)
    for tensor, count in (
        (dense[1:], 1),
        (dense.to_sparse(), 2),
        (dense.to_sparse_csr(), 3),
        (dense.to_sparse_csc(), 3),
        (dense.to_sparse_bsr((2, 2)), 3),
        (dense.to_sparse_bsc((2, 2)), 3),
    ):
        assert len({storage._cdata for storage in storages_of(tensor)}) == count, tensor.layout


@pytest.mark.parametrize("forgetful", ["backwards", "weights"])
def test_it_would_be_seen_and_keeping_takes_little(ranks: Ranks, forgetful: str) -> None:
    ((wrong, least, _, _),) = ranks.run(watched, 1, True, POLICIES["offload"], forgetful)
    assert wrong
    ((_, peak, _, _),) = ranks.run(watched, 1, True, POLICIES["offload"])
    assert peak <= 1.02 * least


@pytest.mark.parametrize(
    ("schedule", "device", "policy"),
    [
        ("interleaved", 0, "offload"),
        ("interleaved", 1, "none"),
        ("dualpipev", 0, "offload"),
        ("dualpipev", 1, "norms"),
        ("zb_v", 0, "norms"),
        ("zb_v", 1, "none"),
    ],
)
def test_dry_runs_foresee_peaks(ranks: Ranks, schedule: str, device: int, policy: str) -> None:
    """Also beside backwards that no forward is paired with, where gradients come to whole passes."""
    ((predicted, held),) = ranks.run(foreseen, 1, schedule, device, POLICIES[policy])
    assert 0.95 * predicted <= held <= 1.01 * predicted, held / predicted
