"""Export maps: names, types, experts and fp8."""

from collections.abc import Mapping
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.manifest import TensorSpec
from stretto.weights.regions import Region, whole
from stretto.weights.sources.export import BLOCK, Export
from stretto.weights.sources.shard import Shard, Source


def read(source: Source) -> dict[str, Tensor]:
    """Whole tensors, put together from their boxes; every element must be there once."""
    made: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for part in source.held():
        entry, value = part.entry, part.read()
        place = tuple(slice(*edge) for edge in part.box)
        target = made.setdefault(entry.name, torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype)))
        assert value.dtype == target.dtype
        assert value.shape == target[place].shape
        target[place] = value
        times.setdefault(entry.name, torch.zeros(entry.shape))[place] += 1
    assert all((count == 1).all() for count in times.values())
    return made


class Parts:
    """A rank's boxes of whole tensors."""

    everywhere = False

    def __init__(self, tensors: Mapping[str, tuple[Tensor, list[Region]]]) -> None:
        self.tensors, self.reads = tensors, 0

    def held(self) -> list[Shard]:
        return [self._part(name, tensor, box) for name, (tensor, boxes) in self.tensors.items() for box in boxes]

    def _part(self, name: str, tensor: Tensor, box: Region) -> Shard:
        def count_and_read() -> Tensor:
            self.reads += 1
            return tensor[tuple(slice(*edge) for edge in box)]

        entry = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        return Shard(entry, box, count_and_read)


def names(source: Source) -> list[str]:
    return [part.entry.name for part in source.held()]


# Names and types.

PLAIN = {"module.a.weight": torch.ones(2), "module.b.weight": torch.zeros(3), "step": torch.tensor(7)}


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ((), ["module.a.weight", "module.b.weight", "step"]),
        ({"step": None, "module.a.weight": "x"}, ["x", "module.b.weight"]),
        ([(r"^module\.", ""), (r"^(.)\.(weight)$", r"\2.\1"), ("step", None)], ["weight.a", "weight.b"]),
        (lambda name: None if name == "step" else name.upper(), ["MODULE.A.WEIGHT", "MODULE.B.WEIGHT"]),
    ],
)
def test_tensors_are_renamed_or_left_out(rename: Any, expected: list[str]) -> None:
    source = Export(rename=rename)(PLAIN)
    assert names(source) == expected
    assert [part.read().data_ptr() for part in source.held()] == [
        tensor.data_ptr() for tensor in list(PLAIN.values())[: len(expected)]
    ]


def test_an_export_is_of_as_many_ranks_as_its_source_and_can_be_exported_again() -> None:
    source = Parts({"a": (torch.ones(1), [((0, 1),)])})
    once = Export(rename={"a": "b"})(source)
    assert not once.everywhere
    source.everywhere = True
    assert Export()(source).everywhere
    assert names(Export(rename={"b": "c"})(once)) == ["c"]
    assert source.reads == 0


def test_a_type_is_for_floating_point_and_the_first_glob_counts() -> None:
    tensors = {
        "a.weight": torch.randn(3),
        "a.bias": torch.randn(3),
        "half": torch.randn(3).half(),
        "count": torch.arange(3),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
    }
    kinds = {name: tensor.dtype for name, tensor in read(Export(dtype=torch.bfloat16)(tensors)).items()}
    assert [kinds[name] for name in ("a.weight", "a.bias", "half")] == [torch.bfloat16] * 3
    assert (kinds["count"], kinds["fp8"]) == (torch.int64, torch.float8_e4m3fn)
    chosen = read(Export(dtype={"*.bias": torch.float64, "a.*": torch.bfloat16})(tensors))
    assert torch.equal(chosen["a.weight"], tensors["a.weight"].bfloat16())
    assert torch.equal(chosen["a.bias"], tensors["a.bias"].double())
    assert chosen["half"].dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rename": {"a": "b"}}, "a and b would both be called b"),
        ({"rename": lambda _: "x"}, "a and b would both be called x"),
        ({"rename": [("a", r"\3")]}, "cannot be filled in: invalid group reference"),
        ({"unstack": {"*": "{5}.{expert}"}}, "cannot be filled in"),
        ({"unstack": {"?": "t{expert}"}}, r"a\[0\] and b\[0\] would both be called t0"),
        ({"unstack": {"a": "b{expert}", "scalar": "s{expert}"}}, "scalar has no dimension of experts"),
        ({"split": {"a": ("x", "{0}")}}, "cannot be filled in"),
        ({"split": {"a": ("x", "x")}}, r"a\[0:1\] and a\[1:2\] would both be called x"),
        ({"split": {"a": ("b", "c")}}, r"a\[0:1\] and b would both be called b"),
        ({"split": {"a": ("x", "y", "z")}}, r"a has the shape \(2,\), and cannot be split into 3 equal parts"),
        ({"split": {"scalar": ("x", "y")}}, r"scalar has the shape \(\), and cannot be split into 2 equal parts"),
        ({"stack": {r"e\.(?P<expert>.*)": "{0}"}}, "cannot be filled in"),
        ({"stack": {"(?P<expert>a)": "x"}}, "a has 'a' where .* expects an expert's number"),
        ({"stack": {r"e\.(?P<expert>.*)": "a"}}, r"a and e\\..* would both be called a"),
        ({"stack": {r"f\.(?P<expert>.*)": ("a", 2)}}, r"a and f\\..* would both be called a"),
        ({"stack": {r"e\.(?P<expert>.*)": ("x", 1)}}, "x is said to have 1 experts, and here is number 1"),
        ({"stack": {r"[ef]\.(?P<expert>.*)": ("x", 9)}}, r"e\.1 and f\.1 would both be called x"),
        ({"stack": {r"f\.(?P<expert>.*)": "x"}}, "expert 0 of x is not here.*give the number of experts"),
        ({"stack": {r"g\.(?P<expert>.*)": "x"}}, r"g\.[01] and g\.[01] differ in type or shape"),
        ({"fp8": ["a"]}, r"a is float32\[2\]; only matrices"),
        ({"fp8": ["whole"]}, r"whole is int64\[2, 2\]; only matrices"),
        ({"fp8": ["m"]}, "m and m_scale_inv would both be called m_scale_inv"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(options: dict[str, Any], says: str) -> None:
    tensors = {"a": torch.zeros(2), "b": torch.ones(2), "scalar": torch.tensor(1.0), "whole": torch.ones(2, 2).long()}
    tensors |= {name: torch.ones(3) for name in ("e.0", "e.1", "f.1", "g.1")} | {"g.0": torch.ones(2)}
    tensors |= {"m": torch.ones(2, 2), "m_scale_inv": torch.ones(1, 1)}
    with pytest.raises(WeightsError, match=says):
        Export(**options)(tensors).held()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"unstack": {"*": "{0}"}}, "names all experts alike"),
        ({"split": {"*": "{0}.gate"}}, "split is a tuple of names for each glob"),
        ({"split": {"*": ()}}, "split is a tuple of names for each glob"),
        ({"stack": {"x": "y"}}, "has no group"),
        ({"stack": {"(": "y"}}, "is no regular expression"),
        ({"dtype": torch.quint8}, "dtype is one that can be pushed, such as torch.bfloat16"),
        ({"dtype": {"*": "bfloat16"}}, "dtype is one that can be pushed, such as torch.bfloat16"),
        ({"fp8": "*.weight"}, "fp8 is a list"),
    ],
)
def test_a_map_that_makes_no_sense_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        Export(**options)


# Experts.

UNSTACK = Export(unstack={"layers.*.experts.*": "layers.{0}.experts.{expert}.{1}"})
STACK = Export(stack={r"layers\.(\d+)\.experts\.(?P<expert>\d+)\.(.*)": "layers.{0}.experts.{1}"})


def test_unstacked_experts_are_views() -> None:
    stacked = torch.randn(3, 4, 5)
    held = list(UNSTACK({"layers.7.experts.up": stacked, "norm": torch.ones(2)}).held())
    assert [part.entry.name for part in held] == [*(f"layers.7.experts.{expert}.up" for expert in range(3)), "norm"]
    assert [part.read().data_ptr() for part in held[:3]] == [stacked[expert].data_ptr() for expert in range(3)]


def test_stacked_experts_are_views_in_the_place_of_the_first() -> None:
    pairs = [f"{expert}.{part}" for expert in range(11) for part in ("up", "down")]
    tensors = {f"layers.0.experts.{pair}": torch.randn(2, 2) for pair in pairs}
    held = list(STACK({"first": torch.ones(1), **tensors, "last": torch.ones(1)}).held())
    assert list(dict.fromkeys(part.entry.name for part in held)) == [
        "first",
        "layers.0.experts.up",
        "layers.0.experts.down",
        "last",
    ]
    assert held[3].entry.shape == (11, 2, 2)
    assert [part.box[0] for part in held[1:12]] == [(expert, expert + 1) for expert in range(11)]
    assert held[3].read().data_ptr() == tensors["layers.0.experts.2.up"].data_ptr()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(lambda shape: shape[0] > 0))
def test_stacking_what_was_unstacked_gives_the_same_and_the_other_way_round(shape: list[int]) -> None:
    stacked = {"layers.0.experts.up": torch.randn(shape), "layers.12.experts.up": torch.randn(shape)}
    apart = read(UNSTACK(stacked))
    assert len(apart) == 2 * shape[0]
    again = read(STACK(UNSTACK(stacked)))
    assert again.keys() == stacked.keys()
    assert all(torch.equal(again[name], stacked[name]) for name in stacked)
    back = read(UNSTACK(STACK(apart)))
    assert back.keys() == apart.keys()
    assert all(torch.equal(back[name], apart[name]) for name in apart)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], step: int = 1) -> list[Region]:
    """Boxes that tile a shape, cut at multiples of a step."""
    edges = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, max(1, (size - 1) // step)).map(lambda k: k * step), max_size=2))
        cuts = [0, *sorted(cut for cut in inner if 0 < cut < size), size]
        edges.append(list(pairwise(cuts)))
    boxes: list[Region] = [()]
    for dimension in edges:
        boxes = [(*box, edge) for box in boxes for edge in dimension]
    return boxes


@given(st.data())
def test_experts_cut_in_any_way_are_unstacked_and_stacked_rightly(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    stacked = torch.randn(shape)
    source = Parts({"layers.1.experts.up": (stacked, data.draw(tilings(shape)))})
    apart = read(UNSTACK(source))
    assert list(apart) == sorted(apart)
    assert all(torch.equal(apart[f"layers.1.experts.{expert}.up"], stacked[expert]) for expert in range(shape[0]))
    assert torch.equal(read(STACK(UNSTACK(source)))["layers.1.experts.up"], stacked)


SPLIT = Export(split={"*.gate_up": ("{0}.gate", "{0}.up")})


def test_the_parts_of_a_split_tensor_are_views() -> None:
    joined = torch.randn(6, 5)
    gate, up, norm = SPLIT({"a.gate_up": joined, "norm": torch.ones(2)}).held()
    assert [part.entry.name for part in (gate, up, norm)] == ["a.gate", "a.up", "norm"]
    assert [part.read().data_ptr() for part in (gate, up)] == [joined.data_ptr(), joined[3:].data_ptr()]


@given(st.data())
def test_tensors_cut_in_any_way_are_split_rightly(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 4))
    each, *rest = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    joined = torch.randn(parts * each, *rest)
    source = Parts({"a": (joined, data.draw(tilings(tuple(joined.shape))))})
    apart = read(Export(split={"a": [f"part{number}" for number in range(parts)]})(source))
    assert sorted(apart) == [f"part{number}" for number in range(parts)]
    for number in range(parts):
        assert torch.equal(apart[f"part{number}"], joined[number * each : (number + 1) * each])


def test_ranks_with_some_experts_each_make_one_tensor() -> None:
    export = Export(stack={r"e\.(?P<expert>\d+)": ("e", 4)})
    ranks = [export({f"e.{expert}": torch.full((2,), expert) for expert in mine}) for mine in ((0, 3), (2, 1))]
    parts = [part for rank in ranks for part in rank.held()]
    assert {part.entry for part in parts} == {TensorSpec("e", "int64", (4, 2))}
    assert sorted((part.box[0][0], part.read().tolist()) for part in parts) == [(e, [[e, e]]) for e in range(4)]


def test_all_steps_apply_in_their_order() -> None:
    export = Export(
        rename=[("^model.", "")],
        unstack={"*.experts": "{0}.experts.{expert}.weight"},
        split={"*.heads": ("{0}.heads.0", "{0}.heads.1"), "*.experts.0.weight": ("{0}.first", "{0}.second")},
        stack={r"(.*)\.heads\.(?P<expert>\d+)": "{0}.heads"},
        fp8=["*.experts.*.weight"],
        dtype=torch.bfloat16,
    )
    weight = torch.randn(2, 130, 5)
    made = export({"model.a.experts": weight, "model.a.heads": torch.ones(6)})
    assert {part.entry for part in made.held()} == {
        TensorSpec("a.first", "bfloat16", (65, 5)),
        TensorSpec("a.second", "bfloat16", (65, 5)),
        TensorSpec("a.experts.1.weight", "float8_e4m3fn", (130, 5)),
        TensorSpec("a.experts.1.weight_scale_inv", "float32", (2, 1)),
        TensorSpec("a.heads", "bfloat16", (2, 3)),
    }
    found = read(made)
    scale = found["a.experts.1.weight_scale_inv"]
    assert scale[0, 0] == weight[1, :128].abs().max() / 448  # of float32, not of bfloat16


# fp8.


def slowly(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The format, block by block."""
    rows, columns = weight.shape
    scales = torch.ones(ceil(rows / BLOCK), ceil(columns / BLOCK))
    made = torch.zeros(rows, columns).to(torch.float8_e4m3fn)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            place = slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK)
            block = weight[place].float()
            largest = float(block.abs().max())
            if largest:
                scales[r, c] = max(torch.tensor(largest) / 448, torch.tensor(2.0**-126))
            made[place] = (block / scales[r, c]).to(torch.float8_e4m3fn)
    return made, scales


def matrix(seed: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Values of very different size, with blocks of zeros and tiny ones."""
    torch.manual_seed(seed)
    made = torch.randn(rows, columns) * torch.exp2(torch.randint(-12, 6, (rows, columns)))
    for start in range(0, rows, BLOCK):
        made[start : start + BLOCK] *= (1.0, 0.0, 1e-42, 1e30)[int(torch.randint(4, ()))]
    return made.to(dtype)


SIZES = st.sampled_from([1, 5, 127, 128, 129, 256, 300])
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@settings(max_examples=40)
@given(st.data(), SIZES, SIZES, KINDS)
def test_fp8_is_what_the_format_says_however_it_is_cut(
    data: st.DataObject, rows: int, columns: int, dtype: torch.dtype
) -> None:
    weight = matrix(data.draw(st.integers(0, 99)), rows, columns, dtype)
    boxes = data.draw(tilings((rows, columns), BLOCK))
    found = read(Export(fp8=["*.weight"])(Parts({"a.weight": (weight, boxes)})))
    values, scales = slowly(weight)
    assert found.keys() == {"a.weight", "a.weight_scale_inv"}
    assert torch.equal(found["a.weight"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found["a.weight_scale_inv"], scales)


@settings(max_examples=40)
@given(st.integers(0, 9999), SIZES, SIZES, KINDS)
def test_fp8_times_its_scale_is_the_weight_within_rounding(
    seed: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    """Three bits after the leading one: off by 2⁻⁴ of a normal value at most, and by half of the least step, 2⁻⁹, of a
    smaller one, in units of the scale. The largest of a block is 448, where steps are 32: 16 ÷ 448 of it at most.
    """
    weight = matrix(seed, rows, columns, dtype)
    found = read(Export(fp8=["weight"])({"weight": weight}))
    scales = found["weight_scale_inv"].double()
    scales = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    exact = weight.double()
    off = (found["weight"].double() * scales - exact).abs()
    slack = 1 + 2.0**-20  # division in float32
    assert (off <= torch.maximum(exact.abs() * 2**-4, scales * 2**-10) * slack).all()
    assert (off <= scales * 16 * slack).all()


def test_a_weight_and_its_scales_are_made_from_one_read() -> None:
    weight = torch.randn(128, 128)
    source = Parts({"w": (weight, [whole((128, 128))])})
    values, scales = Export(fp8=["w"])(source).held()
    assert source.reads == 0
    values.read()
    first = scales.read().clone()
    assert source.reads == 1
    weight *= 2  # the next version: nothing old is kept
    assert torch.equal(scales.read(), first * 2)
    values.read()
    assert torch.equal(scales.read(), first * 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_cannot_become_fp8(bad: float) -> None:
    weight = torch.ones(130, 130)
    weight[129, 129] = bad
    for part in Export(fp8=["layer.weight"])({"layer.weight": weight}).held():
        with pytest.raises(WeightsError, match=r"layer\.weight has values that are not finite"):
            part.read()


@pytest.mark.parametrize("box", [((0, 64), (0, 300)), ((64, 300), (0, 300)), ((0, 300), (128, 200))])
def test_a_shard_that_cuts_through_blocks_cannot_become_fp8(box: Region) -> None:
    source = Parts({"w": (torch.ones(300, 300), [box])})
    with pytest.raises(WeightsError, match=r"of 300 rows or columns of w, which cuts through blocks of 128; shard"):
        Export(fp8=["w"])(source).held()


def test_a_transposed_and_an_empty_matrix_become_fp8() -> None:
    weight = torch.randn(128, 256).t()
    found = read(Export(fp8=["*"])({"w": weight, "e": torch.ones(0, 3)}))
    assert torch.equal(found["w"].view(torch.uint8), slowly(weight)[0].view(torch.uint8))
    assert found["e"].shape == (0, 3)
    assert found["e_scale_inv"].shape == (0, 1)
