"""Tensors that are read again: every changed bit is seen, and named, on the host and in place on a GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.weights.checksums import COLUMNS, ROW
from stretto.weights.layout import lay_out
from stretto.weights.manifest import Manifest, TensorSpec
from stretto.weights.receive.loaders import InPlaceLoader
from stretto.weights.receive.rows import Rows, first_change, is_readable, reads_in_place

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([ROW - 1, ROW, ROW + 1, 3 * ROW, 5 * ROW + 17, 130 * ROW]))
POOL = ThreadPoolExecutor(2)


@pytest.fixture(params=DEVICES, scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def rows_of(tensors: list[Tensor]) -> Rows:
    return Rows(tensors, in_place=all(map(is_readable, tensors)))


def random_bytes(count: int, device: torch.device) -> Tensor:
    return torch.randint(-128, 128, (count,), dtype=torch.int8, device=device)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_changed_bit_is_seen_and_named(device: torch.device, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=9))
    shift = data.draw(st.sampled_from([0, 1, 16]))  # live tensors may begin anywhere
    tensors = [random_bytes(shift + size, device)[shift:] for size in sizes]
    rows = rows_of(tensors)
    before = rows.sums(POOL)
    assert before.shape[1] == COLUMNS
    assert first_change(before, rows.sums(POOL)) is None
    which = data.draw(st.integers(0, len(sizes) - 1))
    place = data.draw(st.one_of(st.just(0), st.just(sizes[which] - 1), st.integers(0, sizes[which] - 1)))
    tensors[which][place] ^= 1 << data.draw(st.integers(0, 6))
    row = first_change(before, rows.sums(POOL))
    assert row is not None
    assert which in rows.at(row)


def test_tensors_of_equal_bytes_have_equal_sums(device: torch.device) -> None:
    """Wherever they lie, which is how what was written is compared with what was given."""
    some = [random_bytes(size, device) for size in (5, ROW, 3 * ROW + 1, 200 * ROW)]
    assert torch.equal(rows_of(some).sums(POOL), rows_of([it.clone() for it in some]).sums(POOL))


def test_where_only_one_side_can_be_read_in_place_both_are_copied(device: torch.device) -> None:
    """The buffer may lie as a GPU wants it, and the live tensor not, or the other way round."""
    live, shifted = (
        torch.zeros(100_000, dtype=torch.int8, device=device),
        torch.zeros(100_001, dtype=torch.int8, device=device),
    )
    manifest = Manifest("v", (TensorSpec("a", "int8", (100_000,)), TensorSpec("b", "int8", (100_000,))))
    buckets = lay_out(manifest, 1 << 20)
    writing = InPlaceLoader({"a": live, "b": shifted[1:]}, {}, manifest, buckets)
    writing.begin()
    buffer = random_bytes(1 << 20, device).view(torch.uint8)
    writing.load(0, buffer, POOL)
    assert not writing.changed(POOL)
    shifted[7] += 1
    assert writing.changed(POOL).startswith(("b changed", "one of a, b changed"))


def test_tensors_that_are_not_in_one_piece_are_read(device: torch.device) -> None:
    tensors = [torch.zeros(300, 500, device=device).t(), torch.zeros(7, 9, device=device)[:, ::2]]
    rows = rows_of(tensors)
    before = rows.sums(POOL)
    tensors[1][3, 4] = 1
    row = first_change(before, rows.sums(POOL))
    assert row is not None
    assert 1 in rows.at(row)


@pytest.mark.parametrize("sizes", [[10, 20, 30], [ROW, ROW, 1], [ROW - 1, 2, ROW], [5 * ROW, 3]])
def test_a_row_of_copies_has_the_tensors_that_it_was_made_of(sizes: list[int]) -> None:
    rows = rows_of([random_bytes(size, torch.device("cpu")) for size in sizes])
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    for row in range(-(-len(owners) // ROW)):
        assert rows.at(row) == sorted(set(owners[row * ROW : (row + 1) * ROW]))


def test_the_host_copies_and_a_gpu_need_not(device: torch.device) -> None:
    assert reads_in_place(device) == (device.type == "cuda")
