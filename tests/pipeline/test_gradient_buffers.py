"""Places for sums: in whatever order, the sum is that of all that was added, and not of what lay there before."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stretto.pipeline.gradient_buffers import Block, Buffer, Sum, add_all

ROWS, COLUMNS = 6, 4
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex128]
ADDED = ["gradient", "rows", "product", "product of rows", "sparse", "nothing", "no tokens"]


def laid_out(*parameters: Tensor, dtype: torch.dtype | None = None, shared: bool = False) -> tuple[Buffer, list[Sum]]:
    """Sums in a buffer that is full of numbers that are none."""
    sums = [Sum(parameter, dtype or parameter.dtype, parameter.dtype) for parameter in parameters]
    buffer = Buffer([Block(sums, shared=shared)])
    buffer.renew()
    assert buffer.flat is not None
    buffer.flat.fill_(float("nan"))
    return buffer, sums


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(ADDED), max_size=6),
    st.sampled_from(TYPES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_a_sum_is_that_of_all_that_was_added(
    added: list[str], dtype: torch.dtype, transposed: bool, loose: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    shape = (COLUMNS, ROWS) if transposed else (ROWS, COLUMNS)
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype).T if transposed else torch.zeros(shape, dtype=dtype))
    summed_in = torch.float32 if dtype == torch.bfloat16 else dtype
    _, (sum_,) = laid_out(parameter, dtype=summed_in)
    if loose:
        sum_.place = None
    expected, some = torch.zeros(ROWS, COLUMNS, dtype=torch.complex128), False

    def small(*size: int) -> Tensor:
        return torch.randint(-3, 4, size).to(dtype)  # whole numbers: every order gives the same

    for what in added:
        rows = slice(2, 5) if "rows" in what else None
        height = ROWS if rows is None else 3
        if what == "nothing":
            continue
        some = True
        if "product" in what or what == "no tokens":
            tokens = 0 if what == "no tokens" else 5
            left, right = small(height, tokens), small(tokens, COLUMNS)
            sum_.add_product(left, right, rows)
            made = left.to(expected.dtype) @ right.to(expected.dtype)
        else:
            grad = small(height, COLUMNS)
            sum_.add(grad.to_sparse(1) if what == "sparse" else grad, rows)
            made = grad.to(expected.dtype)
        expected[rows or slice(None)] += made
    if not some:
        assert sum_.value is None
        return
    assert sum_.value is not None
    assert sum_.value.dtype == summed_in
    assert torch.equal(sum_.value.to_dense().to(expected.dtype), expected)


def test_gradients_of_many_parameters_are_added_at_once() -> None:
    """Whatever their sums are: in place or not yet, of another type, by themselves, or of a sparse gradient."""
    kinds = [torch.float32, torch.bfloat16, torch.float64]
    parameters = [nn.Parameter(torch.zeros(3, 4, dtype=dtype)) for dtype in kinds for _ in range(4)]
    sums = [
        laid_out(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))[1][0] for parameter in parameters
    ]
    for at in range(3, len(sums), 4):
        sums[at].place = None
    for turn in (1, 2, 3):
        grads = [torch.full((3, 4), turn + at, dtype=p.dtype) for at, p in enumerate(parameters)]
        grads[2] = grads[2].to_sparse()
        given = [
            torch.ones(()).to(dtype).expand(3, 4) if at % 4 == 1 else grad
            for at, (dtype, grad) in enumerate(zip((p.dtype for p in parameters), grads, strict=True))
        ]
        add_all(zip(sums, given, strict=True))
    for at, sum_ in enumerate(sums):
        assert sum_.value is not None
        whole = sum_.value.to_dense() if sum_.value.is_sparse else sum_.value
        assert (whole == (3 if at % 4 == 1 else 6 + 3 * at)).all(), at


def test_what_is_added_is_copied() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    _, (sum_,) = laid_out(parameter)
    for place in (sum_.place, None):
        sum_.place, sum_.value = place, None
        grad = torch.ones(4)
        sum_.add(grad)
        sum_.add(torch.ones(4))
        grad.fill_(7)
        assert sum_.value is not None
        assert sum_.value.tolist() == [2.0] * 4


def test_places_look_like_their_parameters_and_begin_where_kernels_like_it() -> None:
    parameters = [
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(5, 2).T),
        nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(0, 3)),
    ]
    buffer, sums = laid_out(*parameters)
    assert buffer.size % 1024 == 0
    ends = []
    for sum_ in sums:
        assert sum_.place is not None
        assert (sum_.place.shape, sum_.place.stride()) == (sum_.parameter.shape, sum_.parameter.stride())
        assert sum_.place.storage_offset() % 64 == 0
        assert not sum_.place._is_view()
        ends.append((sum_.place.storage_offset(), sum_.place.storage_offset() + sum_.place.numel()))
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


@pytest.mark.parametrize("dtype", TYPES)
def test_what_no_rank_has_used_has_no_gradient(dtype: torch.dtype) -> None:
    """Of three parameters both ranks use the first, and one of them the second."""

    def made(rank: int) -> tuple[Block, list[Sum]]:
        buffer, sums = laid_out(*(nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(3)), shared=True)
        for sum_ in sums[: 1 + rank]:
            sum_.add(torch.ones(3, dtype=dtype))
        return buffer.blocks[0], sums

    flats = [made(rank)[0].message().clone() for rank in range(2)]
    for rank in range(2):
        block, sums = made(rank)
        block.message().copy_(flats[0] + flats[1])
        assert block.is_in_doubt
        block.settle()
        assert [None if sum_.value is None else sum_.value.tolist() for sum_ in sums] == [[2] * 3, [1] * 3, None]
