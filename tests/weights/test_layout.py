"""Buckets, boxes and sums, against plain loops."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.ir.errors import WeightsError
from stretto.weights.layout import ALIGNMENT, lay_out, least_bucket
from stretto.weights.manifest import ITEM_BYTES, Manifest, TensorSpec, differences
from stretto.weights.regions import common, extent, runs, slices_box, whole

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
models = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), min_size=1, max_size=30).map(
    lambda found: Manifest("v", tuple(TensorSpec(f"t{k}", dtype, shape) for k, (dtype, shape) in enumerate(found)))
)


@given(models, st.integers(1, 8), st.booleans())
def test_every_byte_is_in_one_bucket_in_model_order(model: Manifest, size: int, split: bool) -> None:
    most = ALIGNMENT * size if split else max(ALIGNMENT * size, least_bucket(model))
    buckets = lay_out(model, most, split=split)
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    assert [piece.entry for piece in pieces] == sorted(piece.entry for piece in pieces)
    for number, nbytes in enumerate(model.sizes):
        mine = [piece for piece in pieces if piece.entry == number]
        assert sum(piece.nbytes for piece in mine) == nbytes
        assert [piece.start for piece in mine] == list(np.cumsum([0, *(p.nbytes for p in mine[:-1])]))
        assert len(mine) == 1 or nbytes > most
    for bucket in buckets:
        assert bucket.nbytes <= most
        assert bucket.nbytes % ALIGNMENT == 0
        ends = [0, *(piece.offset + piece.nbytes for piece in bucket.pieces)]
        assert all(
            piece.offset % ALIGNMENT == 0 and piece.offset >= end
            for piece, end in zip(bucket.pieces, ends, strict=False)
        )


@given(models)
def test_no_two_neighbouring_buckets_would_fit_one(model: Manifest) -> None:
    most = max(2048, least_bucket(model))
    buckets = lay_out(model, most)
    for before, after in pairwise(buckets):
        assert before.nbytes + after.pieces[0].nbytes > most


def test_a_tensor_that_does_not_fit_is_named_with_the_way_out() -> None:
    model = Manifest("v", (TensorSpec("big", "float32", (1000,)),))
    with pytest.raises(
        WeightsError, match=r"big has 4,000 bytes, more than a bucket of 512; in parts \(split=True, --split\) only"
    ):
        lay_out(model, 512)
    assert [len(bucket.pieces) for bucket in lay_out(model, 512, split=True)] == [1] * 8


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_runs_are_contiguous_and_cover_exactly(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = int(np.prod(shape))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = np.arange(count).reshape(shape)
    seen: list[int] = []
    for first, box in runs(shape, start, stop):
        part = numbers[tuple(slice(a, b) for a, b in box)].reshape(-1).tolist()
        assert part == list(range(first, first + len(part)))
        seen += part
    assert seen == list(range(start, stop))
    assert len(list(runs(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_common_is_what_both_index(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    numbers = np.arange(int(np.prod(shape))).reshape(shape)

    def box() -> tuple[tuple[int, int], ...]:
        return tuple(
            (a, b) for a, b in (sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
        )

    one, other = box(), box()
    both = set.intersection(
        *({*numbers[tuple(slice(a, b) for a, b in it)].reshape(-1).tolist()} for it in (one, other))
    )
    shared = common(one, other)
    found = set() if shared is None else {*numbers[tuple(slice(a, b) for a, b in shared)].reshape(-1).tolist()}
    assert found == both
    assert extent(slices_box(shape, (slice(None),))) == extent(whole(shape))


def test_versions_of_one_structure_have_one_digest_and_others_do_not() -> None:
    entries = (TensorSpec("a", "float32", (2,)), TensorSpec("b", "int8", ()))
    digest = Manifest("v1", entries).digest
    assert Manifest("v2", entries).digest == digest
    for other in (entries[::-1], entries[:1], (TensorSpec("a", "float32", (3,)), entries[1])):
        assert Manifest("v1", other).digest != digest


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((), "v has no tensors"),
        ((TensorSpec("a", "float3", ()),), "a has type 'float3', which cannot be pushed"),
        ((TensorSpec("a", "int8", (-1,)),), r"a has shape \(-1,\)"),
        ((TensorSpec("a", "int8", ()), TensorSpec("b", "int8", ()), TensorSpec("a", "int8", ())), "a is there twice"),
        ((TensorSpec("a", "int8", (1 << 60,)),), "a is larger than any memory"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(entries: tuple[TensorSpec, ...], said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        Manifest("v", entries).check()


def test_differences_are_told_in_words() -> None:
    given_ = Manifest("v", (TensorSpec("a", "float32", (2, 2)), TensorSpec("b", "int8", ())))
    wanted = [TensorSpec("a", "float32", (2, 3)), TensorSpec("c", "int8", ()), TensorSpec("b", "int8", ())]
    assert differences(wanted, given_) == [
        "a is pushed as float32[2, 2], and float32[2, 3] is expected",
        "c is not in what is pushed",
    ]
