"""Rows as bytes: within the bound of their rounding, and the same from the GPU's kernels."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.moe.fp8 import pack, unpack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where kernels run, on CPUs in Triton's interpreter
DTYPES = torch.float16, torch.float32, torch.bfloat16
KERNEL_DTYPES = DTYPES if DEVICE == "cuda" else DTYPES[:2]  # the interpreter misreads bfloat16 below 2⁻¹²⁶


@st.composite
def rows(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = (*DTYPES, torch.float64)) -> Tensor:
    dtype = draw(st.sampled_from(dtypes))
    features = draw(st.sampled_from([1, 5, 127, 128, 129, 300]))
    torch.manual_seed(draw(st.integers(0, 999)))
    x = torch.randn(draw(st.integers(0, 3)), features, dtype=torch.float64)
    x *= 10.0 ** draw(st.integers(-45, 38))
    if draw(st.booleans()):
        x *= torch.rand_like(x) ** 20  # over many magnitudes
    most = torch.finfo(dtype).max if dtype != torch.float64 else 1e40
    special = draw(st.lists(st.sampled_from([0.0, most, -most, torch.finfo(dtype).tiny, 448.0, 464.0]), max_size=4))
    for value in special if len(x) else ():
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    return x.clamp(-most, most).to(dtype)


@settings(max_examples=300)
@given(rows())
def test_rows_in_fp8_are_within_the_bound(x: Tensor) -> None:
    packed = pack(x)
    tiles = -(-x.shape[1] // 128)
    assert packed.shape == (len(x), x.shape[1] + 4 * tiles)
    back = unpack(packed, features=x.shape[1], dtype=x.dtype)
    assert back.dtype == x.dtype
    exact = x.double()
    for columns in range(0, x.shape[1], 128):
        tile = exact[:, columns : columns + 128]
        most = tile.abs().amax(1, keepdim=True)
        scale = (most / 224).clamp(min=2**-126)
        bound = torch.maximum(tile.abs() / 16, scale / 1024) + (2**-25 if x.dtype == torch.float16 else 0)
        assert ((back[:, columns : columns + 128].double() - tile).abs() <= bound).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_tiles_with_numbers_that_are_not_finite_arrive_as_nan(value: float) -> None:
    x = torch.ones(2, 200, dtype=torch.float64)
    x[1, 3] = value
    back = unpack(pack(x), features=200, dtype=x.dtype)
    assert torch.equal(back[0], x[0])
    assert back[1, :128].isnan().all()
    assert torch.equal(back[1, 128:], x[1, 128:])


def test_a_tile_of_zeros_has_the_least_scale() -> None:
    assert pack(torch.tensor([[0.0, -0.0, 0.0, 0.0]]))[:, 4:].view(torch.float32).tolist() == [[2**-126]]


NAN = 0x7F


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@settings(max_examples=40)
@given(
    rows(KERNEL_DTYPES),
    st.lists(st.tuples(st.integers(0, 999), st.sampled_from([float("inf"), float("-inf"), float("nan")])), max_size=2),
)
def test_kernels_give_the_same_bytes_and_numbers(x: Tensor, special: list[tuple[int, float]]) -> None:
    kernels = _kernels()
    for place, value in special if len(x) else ():
        x.view(-1)[place % x.numel()] = value
    features, expected = x.shape[1], pack(x)
    packed = kernels.pack(x.to(DEVICE), tile=128).cpu()
    assert torch.equal(_without_sign_of_nan(packed, features), _without_sign_of_nan(expected, features))
    order = torch.arange(5)[: 5 * len(x)] % max(1, len(x))
    for chosen in (None, order):
        rows = unpack(expected, chosen, features=features, dtype=x.dtype)
        on_device = expected.to(DEVICE), None if chosen is None else chosen.to(DEVICE)
        found = kernels.unpack(*on_device, features=features, dtype=x.dtype, tile=128).cpu()
        assert torch.equal(found.isnan(), rows.isnan())
        assert torch.equal(found.nan_to_num().view(torch.uint8), rows.nan_to_num().view(torch.uint8))


def test_kernels_pack_rows_of_any_layout() -> None:
    x = torch.randn(300, 4)
    assert torch.equal(_kernels().pack(x.to(DEVICE).T, tile=128).cpu(), pack(x.T))


def test_kernels_know_all_numbers_of_float8() -> None:
    """Each number of float8, those between two of them and just beside, in the range of one scale."""
    every = torch.arange(NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (every[1:] + every[:-1]) / 2
    up, down = between.nextafter(torch.tensor(999.0)), between.nextafter(torch.tensor(0.0))
    x = torch.cat([every, between, up, down])
    x = torch.cat([x, -x])
    x = torch.cat([x, x.new_zeros(-len(x) % 127)]).view(-1, 127)
    x = torch.nn.functional.pad(x, (0, 1), value=448.0)  # so that each row's scale is 1
    packed = _kernels().pack(x.to(DEVICE), tile=128).cpu()
    assert torch.equal(packed[:, :128], x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(packed, pack(x))


def _kernels() -> Any:
    pytest.importorskip("triton")
    from stretto.moe import fp8_kernels

    return fp8_kernels


def _without_sign_of_nan(packed: Tensor, features: int) -> Tensor:
    """On CPUs, a negative NaN is packed as one."""
    packed = packed.clone()
    float8 = packed[:, :features]
    float8[float8 == 0x80 | NAN] = NAN
    return packed
