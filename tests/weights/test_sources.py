"""A training process's tensors as a source."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from models import Case, pipeline
from ranks import Ranks
from stretto.ir.errors import WeightsError
from stretto.weights.manifest import TensorSpec
from stretto.weights.regions import Region, inside, whole
from stretto.weights.sources.export import Export
from stretto.weights.sources.safetensors import Safetensors
from stretto.weights.sources.shard import Shard, Source
from stretto.weights.sources.tensors import Tensors, _runs, as_source, local_runs, of_module

Status = list[tuple[TensorSpec, Region, Tensor]]
"""What a rank holds, as it can be sent to the test."""


def told(source: Source) -> Status:
    return [(part.entry, part.box, part.read().clone()) for part in source.held()]


def assembled(ranks: Iterable[Status], *, once: bool = True) -> dict[str, Tensor]:
    """The whole tensors; every element must be there, and with `once` on one rank only."""
    made: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for rank in ranks:
        for entry, box, value in rank:
            dtype = getattr(torch, entry.dtype)
            assert value.dtype == dtype
            target = made.setdefault(entry.name, torch.zeros(entry.shape, dtype=dtype))
            assert target.shape == entry.shape
            place = inside(box, whole(entry.shape))
            assert target[place].shape == value.shape
            target[place] = value
            times.setdefault(entry.name, torch.zeros(entry.shape))[place] += 1
    for name, count in times.items():
        assert (count == 1).all() if once else (count >= 1).all(), f"{name}: {count}"
    return made


def entries(ranks: Iterable[Status]) -> dict[str, list[int]]:
    """On which ranks each tensor is."""
    found: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        for name in dict.fromkeys(entry.name for entry, _, _ in rank):
            found.setdefault(name, []).append(number)
    return found


def job(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a name by which other processes can import it."""
    return getattr(import_module("weights.test_sources"), function.__name__)  # type: ignore[no-any-return]


# What a rank has of a dimension.

CUTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), max_size=3)


def chunks(values: Tensor, count: int) -> list[Tensor]:
    """As `torch.chunk`, but always so many."""
    made = list(values.chunk(count)) if len(values) else []
    return made + [values[:0]] * (count - len(made))


@given(st.integers(0, 40), CUTS, st.data())
def test_runs_are_what_cutting_the_numbers_themselves_gives(size: int, cuts: list[Any], data: st.DataObject) -> None:
    values = torch.arange(size)
    made = []
    for count, factor in cuts:
        number = data.draw(st.integers(0, count - 1))
        made.append((count, number, factor))
        values = torch.cat([chunks(group, count)[number] for group in chunks(values, factor)])
    runs = local_runs(size, made)
    assert [index for start, stop in runs for index in range(start, stop)] == values.tolist()
    assert all(start < stop for start, stop in runs)


@given(st.integers(0, 60), CUTS)
def test_all_ranks_together_have_every_index_once(size: int, cuts: list[tuple[int, int]]) -> None:
    found = [
        index
        for rank in range(prod(count for count, _ in cuts))
        for start, stop in local_runs(size, list(_coordinates(rank, cuts)))
        for index in range(start, stop)
    ]
    assert sorted(found) == list(range(size))


def _coordinates(rank: int, cuts: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    for count, factor in cuts:
        yield count, rank % count, factor
        rank //= count


# DTensors of real ranks.

PLACED: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((8, 3), (ShardPlacement(0), ShardPlacement(0))),
    "uneven rows": ((7, 3), (ShardPlacement(0), ShardPlacement(0))),
    "fewer rows than ranks": ((3, 2), (ShardPlacement(0), ShardPlacement(0))),
    "rows and columns": ((5, 7), (ShardPlacement(0), ShardPlacement(1))),
    "columns and rows": ((5, 7), (ShardPlacement(1), ShardPlacement(0))),
    "third dimension": ((2, 3, 9), (Replicate(), ShardPlacement(2))),
    "outer": ((6, 2), (ShardPlacement(0), Replicate())),
    "inner": ((6, 2), (Replicate(), ShardPlacement(1))),
    "everywhere": ((3, 3), (Replicate(), Replicate())),
    "scalar": ((), (Replicate(), Replicate())),
    "nothing": ((0, 4), (ShardPlacement(0), ShardPlacement(1))),
    "nothing whole": ((4, 0), (Replicate(), Replicate())),
    "strided": ((8, 2), (_StridedShard(0, split_factor=2), ShardPlacement(0))),
    "strided alone": ((8, 2), (_StridedShard(0, split_factor=2), Replicate())),
    "strided uneven": ((10, 2), (_StridedShard(0, split_factor=2), ShardPlacement(0))),
    "strided columns": ((3, 12), (ShardPlacement(0), _StridedShard(1, split_factor=3))),
}


def values(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def hold_placed(_: Any) -> Status:
    mesh = init_device_mesh("cpu", (2, 2))
    pairs = [
        (name, nn.Parameter(distribute_tensor(values(shape), mesh, placements, src_data_rank=None)))
        for name, (shape, placements) in PLACED.items()
    ]
    return told(Tensors(pairs))


def test_boxes_of_all_ranks_tile_every_dtensor(ranks: Ranks) -> None:
    found = ranks.run(job(hold_placed), 4)
    whole = assembled(found)
    assert set(whole) == set(PLACED)
    for name, (shape, _) in PLACED.items():
        assert torch.equal(whole[name], values(shape)), name
    places = entries(found)
    assert places["rows"] == [0, 1, 2, 3]
    assert places["fewer rows than ranks"] == [0, 1, 2]
    assert places["outer"] == [0, 2]
    assert places["inner"] == [0, 1]
    assert places["everywhere"] == places["scalar"] == places["nothing"] == places["nothing whole"] == [0]
    assert all(part[1][0][1] - part[1][0][0] == 2 for part in found[0] if part[0].name == "strided alone")


class Odd(nn.Module):
    """A buffer that is kept, one that is not, a tied weight, a scalar, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)
        self.again = nn.Linear(6, 7)
        self.again.weight = self.up.weight
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("lost", torch.arange(4), persistent=False)

    def get_extra_state(self) -> Any:
        return {"not": "a tensor"}

    def set_extra_state(self, state: Any) -> None: ...


ODD = ["kept", "up.weight", "up.bias", "down.weight", "again.weight", "again.bias"]


def hold_fsdp(_: Any) -> Status:
    module = Odd()
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    assert isinstance(module.up.weight, DTensor)
    return told(as_source(module))


def hold_fsdp_and_tensor_parallel(_: Any, width: int) -> Status:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(6, width), nn.Linear(6, width))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    return told(of_module(module))


def test_an_fsdp_module_is_pushed_from_its_shards(ranks: Ranks) -> None:
    found = ranks.run(job(hold_fsdp), 4)
    for rank in found:
        for entry, box, _ in rank:
            if entry.name == "up.weight":
                assert box[0][1] - box[0][0] < 7
    buffers = {"kept"}  # FSDP leaves them whole on every rank
    whole = assembled([[part for part in rank if part[0].name not in buffers] for rank in found])
    whole |= assembled([[part for part in found[0] if part[0].name in buffers]])
    expected = Odd().state_dict()
    assert sorted(whole) == sorted(ODD)
    assert all(torch.equal(whole[name], expected[name]) for name in ODD)
    assert entries(found)["kept"] == [0, 1, 2, 3]


@pytest.mark.parametrize("width", [8, 10])
def test_fsdp_over_tensor_parallel_is_put_together_rightly(ranks: Ranks, width: int) -> None:
    whole = assembled(ranks.run(job(hold_fsdp_and_tensor_parallel), 4, width))
    torch.manual_seed(4)
    expected = nn.Sequential(nn.Linear(6, width), nn.Linear(6, width)).state_dict()
    assert set(whole) == set(expected)
    assert all(torch.equal(whole[name], expected[name]) for name in whole)


def refusals(_: Any) -> list[str]:
    wide = init_device_mesh("cpu", (4,))
    partly = DTensor.from_local(torch.ones(2), wide, [Partial()])
    uneven = DTensor.from_local(
        torch.ones(1 + wide.get_local_rank()), wide, [ShardPlacement(0)], shape=(10,), stride=(1,)
    )
    said = []
    for name, tensor in {"partly": partly, "uneven": uneven}.items():
        try:
            Tensors([(name, tensor)]).held()
        except WeightsError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_dtensors_that_cannot_be_put_together_are_refused(ranks: Ranks) -> None:
    found = ranks.run(job(refusals), 4)
    for partly, _ in found:
        assert partly.startswith("partly is placed as ")
        assert "Partial" in partly
        assert "redistribute" in partly
    assert [bool(uneven) for _, uneven in found] == [True, True, False, True]
    assert "uneven has shape (1,) on this rank" in found[0][1]
    assert "is (3,)" in found[0][1]


def test_shards_of_which_it_is_not_clear_where_they_lie_are_refused() -> None:
    placements, mesh = (
        (_StridedShard(0, split_factor=2), ShardPlacement(0)),
        (3, 2),
    )  # FSDP over 3 of tensor parallelism over 2
    assert _runs("t", 8, 0, placements, mesh, (2, 0)) == []
    assert _runs("t", 12, 0, placements, mesh, (2, 0)) == [(4, 6)]
    with pytest.raises(WeightsError, match=r"t is 7 long in dimension 0, which .* does not cut evenly enough"):
        _runs("t", 7, 0, placements, mesh, (2, 0))


def hold_part_of_the_mesh(pp: Any) -> Status:
    some = DeviceMesh("cpu", [1, 2])
    pairs = [("t", DTensor.from_local(torch.full((2,), float(pp.get_local_rank())), some, [ShardPlacement(0)]))]
    return told(Tensors(pairs))


def test_a_rank_outside_of_a_tensors_mesh_holds_none_of_it(ranks: Ranks) -> None:
    found = ranks.run(job(hold_part_of_the_mesh), 4)
    assert entries(found) == {"t": [1, 2]}
    assert assembled(found)["t"].tolist() == [1, 1, 2, 2]


def hold_experts(_: Any) -> Status:
    mesh = init_device_mesh("cpu", (2, 2))
    placed = distribute_tensor(values((5, 4, 6)), mesh, (ShardPlacement(0), ShardPlacement(2)), src_data_rank=None)
    export = Export(
        unstack={"*.experts": "{0}.experts.{expert}.gate_up"},
        split={"*.gate_up": ("{0}.gate", "{0}.up")},
    )
    return told(export([("a.experts", placed)]))


def test_experts_of_a_dtensor_are_unstacked_and_split_where_they_are(ranks: Ranks) -> None:
    found = ranks.run(job(hold_experts), 4)
    whole = assembled(found)
    parts = {"gate": slice(0, 2), "up": slice(2, 4)}
    assert whole.keys() == {f"a.experts.{expert}.{part}" for expert in range(5) for part in parts}
    for expert in range(5):
        for part, rows in parts.items():
            assert torch.equal(whole[f"a.experts.{expert}.{part}"], values((5, 4, 6))[expert, rows])
    places = entries(found)
    assert places["a.experts.0.up"] == [0, 1]
    assert places["a.experts.4.gate"] == [2, 3]


def hold_pipeline(mesh: Any, case: Case) -> Status:
    pipe = pipeline(mesh, case)
    try:
        return told(as_source(pipe))
    finally:
        pipe.close()


def test_a_pipelines_stages_are_pushed_from_where_they_are(ranks: Ranks) -> None:
    case = Case("dualpipe", 2, 4, dtype=torch.float32)
    found = ranks.run(job(hold_pipeline), 2, case)
    expected = nn.Sequential(*case.modules()).state_dict()
    whole = assembled(found, once=False)
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in whole)


# Plain tensors, and what else can be a source.


def names(source: Source) -> list[str]:
    return [part.entry.name for part in source.held()]


def test_a_modules_own_names_and_values_are_held() -> None:
    module = Odd()
    held = list(of_module(module).held())
    assert [part.entry.name for part in held] == ODD
    assert all(part.read().data_ptr() == module.state_dict()[part.entry.name].data_ptr() for part in held)
    assert not any(part.read().requires_grad for part in held)


def test_a_module_is_asked_anew_each_time() -> None:
    module = nn.Linear(2, 2)
    source = of_module(module)
    source.held()
    module.weight = nn.Parameter(torch.ones(2, 2))
    assert torch.equal(next(iter(source.held())).read(), torch.ones(2, 2))


def test_an_iterator_of_pairs_can_be_held_twice() -> None:
    source = Tensors((str(number), torch.full((2,), number)) for number in range(3))
    assert names(source) == names(source) == ["0", "1", "2"]
    assert [part.read().tolist() for part in source.held()] == [[0, 0], [1, 1], [2, 2]]


class Other:
    everywhere = True

    def held(self) -> Iterable[Shard]:
        return [Shard.whole("x", torch.zeros(1))]


def test_whatever_can_be_a_source_becomes_one(tmp_path: Path) -> None:
    text = b'{"f":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    for files in (path, str(path), tmp_path, [path], Safetensors(path)):
        source = as_source(files)
        assert isinstance(source, Safetensors)
        assert names(source) == ["f"]
    other = Other()
    assert as_source(other) is other
    pair = ("t", torch.zeros(2))
    for pairs in ([pair], (pair,), iter([pair]), dict([pair])):
        made = as_source(pairs)
        assert not made.everywhere
        assert names(made) == ["t"]
    assert names(as_source(nn.Linear(1, 1))) == ["weight", "bias"]
    assert names(as_source([])) == []


@pytest.mark.parametrize("given", [None, 3, b"path", torch.zeros(3)])
def test_what_cannot_be_a_source_is_named(given: object) -> None:
    with pytest.raises(WeightsError, match=f"{type(given).__name__} is no source of weights; give"):
        as_source(given)


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "a is there twice"),
        ([("a", 3)], "a is a int, not a tensor"),
        ([torch.zeros(1)], r"pairs of a name and a tensor \(got Tensor\)"),
        (["ab", ("a", torch.zeros(1))], r"pairs of a name and a tensor \(got str\)"),
        ([("a", torch.zeros(1, device="meta"))], "a is on the meta device"),
        ([("a", torch.zeros(2).to_sparse())], "a is a torch.sparse_coo tensor"),
        ([("a", torch.zeros(2).to(torch.float8_e4m3fnuz))], "torch.float8_e4m3fnuz, which cannot be pushed"),
    ],
)
def test_pairs_that_cannot_be_pushed_are_named(pairs: list[Any], says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        as_source(pairs).held()
