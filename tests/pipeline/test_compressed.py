"""Saved tensors in float8: rounded within the bound, stored once, and only where the policy says so."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import memory_jobs
from devices import device_ranks
from memory_jobs import CompressedFound
from ranks import Ranks
from stretto import Memory
from stretto.pipeline.compressed import Compressed, compressed_bytes, compressible
from stretto.pipeline.pytree import storage_of
from stretto.pipeline.recompute import Kept
from stretto.pipeline.saving import SavedPass

CPU = torch.device("cpu")


def compressed(tensor: Tensor) -> Tensor:
    features = compressible(tensor)
    assert features
    return Compressed(Kept(compressed_bytes(tensor, features), "a"), tensor, features).tensor()


def bound(tensor: Tensor) -> Tensor:
    """How much each number may change: by its own rounding, or by that of the largest number of its tile."""
    return torch.maximum(tensor.abs().double() * 2**-4, tensor.abs().double().amax() / 224 * 2**-10)


@st.composite
def saved_tensors(draw: st.DrawFn) -> Tensor:
    sizes = [*draw(st.lists(st.integers(1, 5), max_size=3)), draw(st.sampled_from([128, 130, 256]))]
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    torch.manual_seed(draw(st.integers(0, 99)))
    tensor = (torch.randn(sizes) * draw(st.sampled_from([1e-3, 1.0, 100.0]))).to(dtype)
    if draw(st.booleans()):
        tensor = torch.stack([tensor, tensor], dim=-2).select(-2, 0)  # a slice
    return tensor.permute(*draw(st.permutations(range(tensor.dim()))))


@given(saved_tensors())
def test_numbers_are_rounded_within_the_bound_and_nothing_else_changes(tensor: Tensor) -> None:
    found = compressed(tensor)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert ((found.double() - tensor.double()).abs() <= bound(tensor)).all()
    assert torch.equal(found == 0, tensor.abs() <= (tensor - found).abs())  # only what vanishes is 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 256),
        torch.randn(4, 256).double(),
        torch.ones(4, 256, dtype=torch.int16),
        torch.randn(1, 256).bfloat16().expand(8, 256),
        torch.randn(3, 5).bfloat16(),
        torch.empty(0, 256).bfloat16(),
        torch.randn(4, 256, dtype=torch.complex64),
        torch.nn.Parameter(torch.randn(4, 256).bfloat16()),
    ],
    ids=["float32", "float64", "integers", "expanded", "short rows", "empty", "complex", "a parameter"],
)
def test_other_tensors_stay_as_they_are(tensor: Tensor) -> None:
    assert not compressible(tensor)


def test_short_rows_are_stored_in_tiles_across_them() -> None:
    tensor = torch.randn(16, 8).bfloat16()
    assert compressible(tensor) == compressible(tensor.T) == 128
    assert ((compressed(tensor.T) - tensor.T).abs().double() <= bound(tensor.T)).all()


def test_what_is_saved_twice_is_stored_once_and_comes_back_once() -> None:
    saved, tensor = SavedPass(CPU, 0, (), leaves=False), torch.randn(4, 256).bfloat16()
    first, again, other = (
        saved.compressed(it, partial(Kept, site="a"), "compute") for it in (tensor, tensor.detach(), tensor.clone())
    )
    assert first is again
    assert first is not other
    assert first is not None
    held = first.tensor().detach()  # as a weight gradient that waits holds it
    back = first.tensor()
    assert held.data_ptr() == back.data_ptr()
    assert torch.equal(held, back)
    held.add_(1)
    assert not torch.equal(first.tensor(), back)
    assert torch.equal(first.tensor(), compressed(tensor)), "what a backward has changed is made anew"
    tensor.add_(1)
    assert saved.compressed(tensor, partial(Kept, site="a"), "compute") is not first


def test_lanes_share_nothing() -> None:
    saved, tensor = SavedPass(CPU, 0, (), leaves=False), torch.randn(4, 256).bfloat16()
    here, there = (saved.compressed(tensor, partial(Kept, site="a"), lane) for lane in ("compute", "comm"))
    assert here is not there


def test_very_long_rows_are_stored_in_tiles() -> None:
    assert compressible(torch.zeros(1 << 21, dtype=torch.bfloat16)) == 128
    assert not compressible(torch.zeros((1 << 21) + 1, dtype=torch.bfloat16))


def test_what_others_hold_and_what_is_small_stays() -> None:
    tensor = torch.randn(4, 256).bfloat16()
    assert SavedPass(CPU, 2048, (), leaves=False).may_change(tensor)
    assert not SavedPass(CPU, 2049, (), leaves=False).may_change(tensor)
    saved = SavedPass(CPU, 0, (), leaves=False)
    saved.hold([tensor])
    assert not saved.may_change(tensor[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_told_if_nothing_can_be_stored_so(ranks: Ranks, dtype: torch.dtype) -> None:
    (said,) = ranks.run(memory_jobs.said_of_float8, 1, dtype)
    assert ["nothing was stored in float8" in text for text in said] == [True] * (dtype == torch.float32)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("function", [False, True], ids=["a module", "a function"])
def test_weights_that_autocast_casts_stay(ranks: Ranks, frozen: bool, function: bool) -> None:
    if frozen and function:
        pytest.skip("nobody tells that it is a weight")
    (shapes,) = ranks.run(memory_jobs.compressed_shapes, 1, frozen, function)
    assert shapes == {(4, 256)}


PARTS = {
    "one of several": lambda w: w.unbind(0)[1],
    "a half": lambda w: w.flatten(0, 1).chunk(2)[0],
    "expanded": lambda w: w[:1].expand(2, -1, -1),
    "copied": lambda w: w[0].t().contiguous(),
    "squeezed": lambda w: w[:1].squeeze(0).unsqueeze(0),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_weights_stay(part: str) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 128, 128))
    saved = SavedPass(CPU, 0, [storage_of(weight)], leaves=False)
    assert not saved.may_change(PARTS[part](weight).bfloat16())
    assert not saved.may_change(PARTS[part](weight.bfloat16()))
    assert saved.may_change((PARTS[part](weight) * torch.randn(1)).bfloat16())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = device_ranks(4)
    yield started
    started.stop()


def assert_near(found: list[CompressedFound], exact: list[CompressedFound], most: float) -> None:
    """Losses of the first step are equal: only backwards see rounded numbers."""
    for one, other in zip(found, exact, strict=True):
        assert one.losses[0] == other.losses[0]
        differing = 0
        for name, gradient in one.gradients.items():
            expected = other.gradients[name]
            assert np.linalg.norm(gradient - expected) <= most * np.linalg.norm(expected), name
            differing += not np.array_equal(gradient, expected)
        assert differing, "nothing was rounded"


def test_the_same_cuts_give_the_same_gradients(ranks: Ranks) -> None:
    """Whether a stage's input comes from another rank or from this one, as in the turn of a "V"."""
    plans = ["interleaved", "zb_v", "dualpipev"]
    (every, *others) = ranks.run(memory_jobs.each, 2, memory_jobs.compressed_linears, [(name,) for name in plans])
    assert others == [every]
    assert every[1:] == [every[0]] * 2
    assert every[0] != ranks.run(memory_jobs.compressed_linears, 2, "interleaved", "keep")[0], "nothing was rounded"


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "dualpipev"])
def test_gradients_are_near_and_storage_shrinks(ranks: Ranks, schedule: str) -> None:
    actions: list[Any] = ["keep", "fp8", "fp8+offload", "recompute+fp8", "recompute+fp8+offload"]
    policies = [Memory(sites={"*.experts": action}, min_bytes=0) for action in actions]
    runs = [({"pp": 2, "ep": 2}, schedule, policy) for policy in policies]
    told = zip(*ranks.run(memory_jobs.each, 4, memory_jobs.compressed, runs), strict=True)
    exact, fp8, offloaded, again, again_offloaded = (list(found) for found in told)
    assert_near(fp8, exact, 0.1)
    assert_near(again, exact, 0.1)
    for one, other in ((fp8, offloaded), (again, again_offloaded)):  # where the bytes are makes no difference
        for here, there in zip(one, other, strict=True):
            assert here.losses == there.losses
            assert all(np.array_equal(here.gradients[name], there.gradients[name]) for name in here.gradients)
    for each in range(4):
        ratio = fp8[each].experts / exact[each].experts
        assert 0.5 < ratio < 0.6, ratio  # one byte for two, and the scales
        assert again[each].experts < 0.5 * fp8[each].experts


def test_kimi_k2s_policy_on_its_kind_of_model(ranks: Ranks) -> None:
    runs = [({"pp": 2, "ep": 2}, "interleaved", Memory(preset=preset, min_bytes=0)) for preset in ("none", "k2")]
    exact, k2 = (
        list(found) for found in zip(*ranks.run(memory_jobs.each, 4, memory_jobs.compressed, runs), strict=True)
    )
    assert_near(k2, exact, 0.1)
    for one, other in zip(k2, exact, strict=True):
        assert one.kept < 0.35 * other.kept, (one.kept, other.kept)


def test_a_policy_of_ones_own_goes_before_the_preset() -> None:
    policy = Memory(preset="k2", sites={"*.experts": "keep"})
    assert policy.action("mlp.experts") == "keep"
    assert policy.action("mlp.experts.swiglu") == "recompute+fp8"
    assert policy.action("anything") == "offload"
