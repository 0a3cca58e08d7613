"""What "verified" means: live tensors hold exactly what was pushed, or the push says so before anybody pauses."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import pushes
from ranks import Ranks
from stretto.ir.errors import WeightsError
from stretto.weights.manifest import TensorSpec
from stretto.weights.receive import loaders as loading
from stretto.weights.receive.memory_layouts import shared, unfit
from stretto.weights.receive.receiver import Receiver
from stretto.weights.receive.rows import first_change
from stretto.weights.receive.state import Hooks
from stretto.weights.send import reshard as spread
from stretto.weights.send.remotes import status
from stretto.weights.send.sender import Sender
from stretto.weights.sources.export import Export
from stretto.weights.sources.shard import Shard


@pytest.fixture
def sender() -> Iterator[Sender]:
    with Sender(device="cpu", bucket_bytes=2048) as made:
        yield made


class Engine:
    """Live tensors, and how often it was paused."""

    def __init__(self, folder: Path, live: Mapping[str, Tensor], **hooks: Any) -> None:
        self.live, self.paused = live, 0
        made = Hooks(pause=self._pause, **hooks)
        self.receiver = Receiver(f"unix://{folder}/r", into=live, hooks=made).start()
        self.address = str(self.receiver.address)

    def _pause(self, _: str) -> None:
        self.paused += 1

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.receiver.close()


def push(sender: Sender, engine: Engine, tensors: Mapping[str, Tensor], version: str = "v") -> str:
    sender.register(version, tensors)
    return sender.push(version, [engine.address]).receivers[engine.address]


# How live tensors lie.


WEIGHT = torch.arange(16.0).view(4, 4)


@pytest.mark.parametrize("how", ["turned", "strided"])
def test_a_layout_that_changed_at_one_address_is_followed_if_it_fits(folder: Path, sender: Sender, how: str) -> None:
    room = torch.zeros(40)
    live = {"w": room[:16].view(4, 4)}
    with Engine(folder, live) as engine:
        assert push(sender, engine, {"w": WEIGHT}) == "verified"
        live["w"].data = live["w"].data.t() if how == "turned" else room.as_strided((4, 4), (9, 2))
        assert push(sender, engine, {"w": WEIGHT + 1}) == "verified"
        assert torch.equal(live["w"], WEIGHT + 1)


ODD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "reshaped": (lambda it: it.view(2, 8), r"w is pushed with shape \(4, 4\), and it does not fit \(2, 8\)"),
    "of another type": (lambda it: it.view(torch.int32), "w is pushed as float32, and is int32 here"),
    "smaller": (lambda it: it[:3], r"w is pushed with shape \(4, 4\), and it does not fit \(3, 4\)"),
    "expanded": (lambda it: it[:, :1].expand(4, 4), r"w is expanded or overlaps itself \(strides \(4, 0\)\)"),
    "overlapping itself": (lambda it: it.view(-1).as_strided((4, 4), (2, 1)), "w is expanded or overlaps itself"),
}


@pytest.mark.parametrize("how", ODD)
def test_a_layout_that_does_not_fit_any_more_is_refused_before_anybody_pauses(
    folder: Path, sender: Sender, how: str
) -> None:
    live = {"w": torch.zeros(4, 4)}
    change, said = ODD[how]
    with Engine(folder, live) as engine:
        assert push(sender, engine, {"w": WEIGHT}) == "verified"
        kept = live["w"]
        live["w"] = change(kept)
        with pytest.raises(WeightsError, match=said):
            push(sender, engine, {"w": WEIGHT + 1})
        assert engine.paused == 1
        assert torch.equal(kept, WEIGHT)
        assert engine.receiver.ensure_serving() == "v"
        live["w"] = kept
        assert push(sender, engine, {"w": WEIGHT + 2}) == "verified"
        assert torch.equal(kept, WEIGHT + 2)


def test_a_meta_tensor_is_no_live_one(folder: Path, sender: Sender) -> None:
    live = {"w": torch.zeros(2), "m": torch.zeros(2, device="meta")}
    with Engine(folder, live) as engine, pytest.raises(WeightsError, match="m is not plain memory"):
        push(sender, engine, {"w": torch.ones(2), "m": torch.ones(2)})


def addresses(tensor: Tensor) -> list[int]:
    """Of all its bytes, one by one."""
    place = np.zeros(tuple(tensor.shape), np.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        place = place + (np.arange(size) * stride).reshape([-1 if k == dim else 1 for k in range(tensor.dim())])
    return [
        tensor.data_ptr() + int(at) * tensor.itemsize + byte
        for at in place.reshape(-1)
        for byte in range(tensor.itemsize)
    ]


ROOM = torch.zeros(64, dtype=torch.float64)
views = st.tuples(
    st.sampled_from([torch.float64, torch.float32, torch.int16]),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=3),
).map(
    lambda it: ROOM.view(it[0]).as_strided([size for size, _ in it[2]], [stride for _, stride in it[2]], it[1])  # type: ignore[no-any-return]
)


@given(st.lists(views, min_size=1, max_size=4))
def test_what_overlaps_is_found(tensors: list[Tensor]) -> None:
    live = {}
    for number, tensor in enumerate(tensors):
        bytes_of = addresses(tensor)
        if unfit(f"t{number}", tensor):
            continue  # it may refuse a few that do not overlap themselves
        assert len(set(bytes_of)) == len(bytes_of)
        live[f"t{number}"] = tensor
    wrong, alike = shared(live, {})
    one = {name: next((k for k, names in enumerate(alike) if name in names), name) for name in live}
    for name, tensor in live.items():
        for other, also in live.items():
            if name < other and one[name] != one[other]:
                overlap = bool(set(addresses(tensor)) & set(addresses(also)))
                firsts = {next(n for n in live if one[n] == one[it]) for it in (name, other)}
                assert any(all(f"{it} " in f"{line} " for it in firsts) for line in wrong) == overlap
    for names in alike:
        assert len({(live[it].data_ptr(), live[it].shape, live[it].stride(), live[it].dtype) for it in names}) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ordinary_tensors_are_not_refused(size: int) -> None:
    whole = torch.zeros(size, 4, 6)
    for tensor in (
        whole,
        whole.transpose(0, 2),
        whole[:, 1:3, ::2],
        whole.permute(1, 2, 0)[:1],
        torch.zeros(()),
        whole[:0],
    ):
        assert not unfit("t", tensor)
    fused = torch.zeros(8, 12)
    columns = {"q": fused[:, :4], "k": fused[:, 4:8], "v": fused[:, 8:], "r": fused[:0]}
    assert shared(columns, {}) == ([], [])


def test_tensors_that_overlap_are_refused_before_anybody_pauses(folder: Path, sender: Sender) -> None:
    room = torch.zeros(10)
    live = {"a": room[:6], "b": room[4:]}
    with Engine(folder, live) as engine:
        with pytest.raises(WeightsError, match="a and b overlap in memory, and are not one and the same tensor"):
            push(sender, engine, {"a": torch.ones(6), "b": torch.ones(6)})
        assert engine.paused == 0


def test_tied_tensors_take_one_value_and_no_two(folder: Path, sender: Sender) -> None:
    tied = torch.zeros(300)
    live = {"embed": tied, "other": torch.zeros(3), "head": tied}
    given = {"embed": torch.arange(300.0), "other": torch.ones(3), "head": torch.arange(300.0)}
    with Engine(folder, live) as engine:
        assert push(sender, engine, given) == "verified"
        given["head"] = given["head"].clone()
        given["head"][150] = -1
        with pytest.raises(WeightsError, match=r"/r: embed and head are one tensor there, and differ in v$"):
            push(sender, engine, given)
        assert engine.paused == 1
        assert torch.equal(tied, torch.arange(300.0))
        given["embed"] = given["head"]
        assert push(sender, engine, given) == "verified"
        assert torch.equal(tied, given["head"])


def test_tied_tensors_that_look_different_are_one(folder: Path, sender: Sender) -> None:
    tied = torch.zeros(1, 2)
    live = {"a": tied, "b": tied[0].unsqueeze(1).t()}
    slices = {"a": (slice(0, 1),), "b": (slice(None), slice(None, 2))}
    with Receiver(f"unix://{folder}/r", into=live, slices=slices) as receiver:
        receiver.start()
        sender.register("v", {"a": torch.ones(4, 3), "b": torch.ones(4, 3)})
        with pytest.raises(WeightsError, match="a is pushed with shape"):
            sender.push("v", [str(receiver.address)])
        sender.register("v", {"a": torch.ones(4, 2), "b": torch.ones(1, 2)})
        with pytest.raises(WeightsError, match="a and b are one tensor there, and differ"):
            sender.push("v", [str(receiver.address)])
        sender.register("v", {"a": torch.ones(1, 2), "b": torch.ones(1, 2)})
        assert set(sender.push("v", [str(receiver.address)]).receivers.values()) == {"verified"}


def test_of_tied_tensors_one_is_enough(folder: Path, sender: Sender) -> None:
    tied = torch.zeros(4)
    with Engine(folder, {"embed": tied, "head": tied}) as engine:
        for name in ("embed", "head"):  # as files of tied models have it
            assert push(sender, engine, {name: torch.ones(4) * len(name)}) == "verified"
            assert torch.equal(tied, torch.ones(4) * len(name))
        with pytest.raises(WeightsError, match="embed is not in what is pushed; head is not in what is pushed"):
            push(sender, engine, {"other": torch.ones(4)})


@pytest.mark.parametrize(
    ("odd", "said"), [(None, "w is a NoneType, not a tensor"), ("sparse", "w is not plain memory")]
)
def test_what_is_no_tensor_any_more_is_refused_by_name(folder: Path, sender: Sender, odd: Any, said: str) -> None:
    live: dict[str, Any] = {"w": torch.zeros(4, 4)}
    with Engine(folder, live) as engine:
        assert push(sender, engine, {"w": WEIGHT}) == "verified"
        live["w"] = WEIGHT.to_sparse() if odd else None
        with pytest.raises(WeightsError, match=said):
            push(sender, engine, {"w": WEIGHT})
        assert engine.paused == 1


def test_tied_tensors_that_take_different_slices_are_refused(folder: Path, sender: Sender) -> None:
    tied = torch.zeros(2)
    slices = {"a": (slice(0, 2),), "b": (slice(2, 4),)}
    with Receiver(f"unix://{folder}/r", into={"a": tied, "b": tied}, slices=slices) as receiver:
        receiver.start()
        sender.register("v", {"a": torch.ones(4), "b": torch.ones(4)})
        with pytest.raises(WeightsError, match="a and b overlap in memory"):
            sender.push("v", [str(receiver.address)])


@pytest.mark.parametrize("split", [False, True])
def test_tied_tensors_of_several_senders_are_compared(ranks: Ranks, folder: Path, split: bool) -> None:
    tied = torch.zeros(600)
    with Engine(folder, {"t0": tied, "t1": torch.zeros(600), "t2": tied}) as engine:
        for equal in (True, False):
            said = ranks.run(pushes.tied, 3, engine.address, equal, split)
            if equal:
                assert said == ["verified"] * 3
            else:
                assert len(set(said)) == 1
                assert said[0].endswith(f"{engine.address}: t0 and t2 are one tensor there, and differ in v")
        assert engine.paused == 1


class Face(torch.Tensor):
    """As quantised tensors are: one type outside, another one in memory."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Face":
        made: Face = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(it.inner.float() if isinstance(it, Face) else it for it in args), **(kwargs or {}))


def test_a_tensor_around_another_one_is_refused(folder: Path, sender: Sender) -> None:
    """What is written into it would be written into a copy, and be read again there."""
    with Engine(folder, {"w": Face(torch.zeros(4, dtype=torch.float16))}) as engine:
        with pytest.raises(WeightsError, match="w is not plain memory"):
            push(sender, engine, {"w": torch.ones(4)})
        assert engine.paused == 0


def test_a_tensor_that_becomes_negative_is_refused(folder: Path, sender: Sender) -> None:
    """Everything else of it is as it was."""
    live = {"w": torch.nn.Parameter(torch.zeros(4), requires_grad=False)}
    with Engine(folder, live) as engine:
        assert push(sender, engine, {"w": torch.ones(4)}) == "verified"
        live["w"].data = torch._neg_view(live["w"].data)
        with pytest.raises(WeightsError, match="w is not plain memory"):
            push(sender, engine, {"w": torch.ones(4)})
        assert engine.paused == 1


def cut(tensor: Tensor) -> None:
    """Less memory, at the same address."""
    storage, before = tensor.untyped_storage(), tensor.data_ptr()
    half = storage.nbytes() // 2
    for number in range(3000):
        storage.resize_(half - 64 * (number % 1000))
        if tensor.data_ptr() == before:
            return
    pytest.skip("the allocator gives other memory every time")


def test_a_tensor_whose_memory_was_cut_where_it_lies_is_refused(folder: Path) -> None:
    for _ in range(3):  # so that no more memory is taken from the system
        torch.zeros(1 << 20)
    live, _ = {"w": torch.zeros(1 << 16)}, torch.zeros(1 << 14)
    with Engine(folder, live) as engine, Sender(device="cpu") as sender:
        assert push(sender, engine, {"w": torch.ones(1 << 16)}) == "verified"
        cut(live["w"])
        with pytest.raises(WeightsError, match="w has no memory of its size any more"):
            push(sender, engine, {"w": torch.ones(1 << 16)})
        assert engine.paused == 1


@pytest.mark.parametrize("size", [0, 100])
def test_a_tensor_whose_memory_is_cut_while_others_are_loaded_is_not_written(
    folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, load = {name: torch.zeros(60) for name in ("a", "b")}, loading.InPlaceLoader.load

    def disturbed(writing: Any, number: int, *given: Any) -> None:
        if number == 1:
            live["b"].untyped_storage().resize_(size)
        load(writing, number, *given)

    monkeypatch.setattr(loading.InPlaceLoader, "load", disturbed)
    with Engine(folder, live) as engine, Sender(device="cpu", bucket_bytes=256) as sender:
        with pytest.raises(WeightsError, match=r"bucket 1 \(b\): b was replaced, or its memory cut"):
            push(sender, engine, {name: torch.ones(60) for name in live})
        assert engine.receiver.status.state == "dirty"


# What they hold afterwards.


def test_a_tensor_that_does_not_hold_what_was_written_is_found(
    folder: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, live = torch._foreach_copy_, {f"t{k}": torch.zeros(5) for k in range(4)}

    def forgetful(targets: list[Tensor], sources: list[Tensor], **how: Any) -> None:
        copy(targets[:2] + targets[3:], sources[:2] + sources[3:], **how)

    given = {name: torch.ones(5) for name in live}
    with Engine(folder, live) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", forgetful)
            with pytest.raises(WeightsError, match=r"bucket 0 \(t0 … t3\): t2 does not hold what was written into it"):
                push(sender, engine, given)
        assert engine.receiver.status.state == "dirty"
        assert engine.receiver.status.assurance is None
        assert engine.receiver.status.content == ""  # it holds no version's values
        assert push(sender, engine, given) == "verified"


def test_a_tensor_that_is_replaced_while_it_is_loaded_is_found(
    folder: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {"w": torch.zeros(4, 4)}

    def swapping(before: Tensor, after: Tensor) -> int | None:
        live["w"] = live["w"].t() if live["w"].is_contiguous() else live["w"]
        return first_change(before, after)

    with Engine(folder, live) as engine:
        monkeypatch.setattr(loading, "first_change", swapping)
        with pytest.raises(WeightsError, match="w was replaced after it was loaded"):
            push(sender, engine, {"w": WEIGHT})
        assert engine.receiver.status.state == "dirty"


@pytest.mark.parametrize("how", ["changed", "was replaced"])
@pytest.mark.parametrize("hooks", [{}, {"finish": lambda: None}])
def test_a_tensor_that_changes_while_others_are_loaded_is_found(
    folder: Path, how: str, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {name: torch.zeros(60) for name in ("a", "b")}
    load = loading.InPlaceLoader.load

    def disturbed(writing: Any, number: int, *given: Any) -> None:
        if number == 1 and how == "changed":
            live["a"][7] = 5
        elif number == 1:
            live["a"] = live["a"].clone()
        load(writing, number, *given)

    with Engine(folder, live, **hooks) as engine, Sender(device="cpu", bucket_bytes=256) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(loading.InPlaceLoader, "load", disturbed)
            with pytest.raises(WeightsError, match=f"a {how} after it was loaded"):
                push(sender, engine, {name: torch.ones(60) for name in live})
        assert engine.receiver.status.state == "dirty"
        assert push(sender, engine, {name: torch.ones(60) for name in live}) == "verified"


def test_a_tensor_that_is_to_be_read_in_another_way_is_refused(folder: Path, sender: Sender) -> None:
    live = {"w": torch.zeros(4, dtype=torch.complex64)}
    with Engine(folder, live) as engine:
        assert push(sender, engine, {"w": torch.ones(4) * (1 + 2j)}) == "verified"
        live["w"] = live["w"].conj()
        with pytest.raises(WeightsError, match="w is not plain memory"):
            push(sender, engine, {"w": torch.ones(4) * (1 + 2j)})


def test_a_tensor_whose_memory_was_given_back_is_refused(folder: Path, sender: Sender) -> None:
    live = {"w": torch.zeros(400)}
    with Engine(folder, live) as engine:
        assert push(sender, engine, {"w": torch.ones(400)}) == "verified"
        live["w"].untyped_storage().resize_(0)
        with pytest.raises(WeightsError, match="w has no memory of its size any more"):
            push(sender, engine, {"w": torch.ones(400)})
        assert engine.paused == 1


def test_neither_side_makes_memory_that_cannot_be_resized(folder: Path, sender: Sender) -> None:
    live, given = {"w": torch.zeros(40)}, {"w": torch.ones(40), "x": torch.ones(200, 2)}
    with Engine(folder, live, finish=lambda: None) as engine:
        assert push(sender, engine, given) == "verified"
    for tensor in (*live.values(), *given.values()):
        tensor.untyped_storage().resize_(0)


def test_one_element_may_have_any_stride(folder: Path, sender: Sender) -> None:
    fused = torch.arange(8.0).view(1, 8)
    live = {"x": torch.zeros(1, 8)[:, 3], "y": torch.zeros(9)[::9]}
    with Engine(folder, live, finish=lambda: None) as engine:
        assert push(sender, engine, {"x": fused[:, 3], "y": torch.ones(16)[::16]}) == "verified"
    assert [it.item() for it in live.values()] == [3.0, 1.0]


def test_inference_mode_around_a_sender_leaves_nothing_of_it(folder: Path, sender: Sender) -> None:
    live = {"w": torch.zeros(3)}
    with Engine(folder, live) as engine:
        with torch.inference_mode():
            assert push(sender, engine, {"w": torch.ones(3)}) == "verified"
        assert push(sender, engine, {"w": torch.ones(3) * 2}) == "verified"


def test_values_that_are_lazily_conjugate_are_pushed_as_they_read(folder: Path, sender: Sender) -> None:
    value = torch.ones(3) * (1 + 2j)
    live = {"w": torch.zeros(3, dtype=torch.complex64), "x": torch.zeros(3)}
    with Engine(folder, live) as engine:
        assert push(sender, engine, {"w": value.conj(), "x": value.conj().imag}) == "verified"
    assert live["w"].tolist() == [1 - 2j] * 3
    assert live["x"].tolist() == [-2.0] * 3


class Odd:
    """A source whose parts are not where they should be."""

    everywhere = False

    def __init__(self, *starts: int) -> None:
        self._starts = starts

    def held(self) -> list[Shard]:
        entry = TensorSpec("w", "float32", (4,))
        return [Shard(entry, ((at, at + 2),), lambda: torch.ones(2)) for at in self._starts]


@pytest.mark.parametrize("starts", [(0, 4), (-1, 2), (0, 3)])
def test_parts_outside_of_a_tensor_are_refused(sender: Sender, starts: tuple[int, int]) -> None:
    with pytest.raises(WeightsError, match=r"and a rank holds \(\(.*\),\) of it|parts are missing or overlap"):
        sender.register("v", Odd(*starts))
    sender.register("v", Odd(0, 2))


def test_many_columns_of_one_tensor_are_compared_quickly() -> None:
    fused = torch.zeros(50, 3000, dtype=torch.bfloat16)
    columns = {str(k): fused[:, k] for k in range(3000)}
    begun = time.monotonic()
    assert shared(columns, {}) == ([], [])
    columns["late"] = fused[3:5, 2990:2995]
    wrong, _ = shared(columns, {})
    assert [line.partition(" overlap")[0] for line in wrong] == [f"{k} and late" for k in range(2990, 2995)]
    assert time.monotonic() - begun < 60


KINDS = [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.int16, torch.uint16, torch.bfloat16, torch.float32]
KINDS += [torch.uint64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5)], ids=str)
def test_every_type_is_read_again_as_it_lies(folder: Path, sender: Sender, dtype: torch.dtype, shape: Any) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    value = raw.view(dtype).view(shape)  # not a number among them, and zeros of both signs
    room = torch.zeros(2, *shape, dtype=dtype)
    live = {"plain": room[0], "turned": torch.zeros(shape[::-1], dtype=dtype).mT if len(shape) == 2 else room[1]}
    with Engine(folder, live) as engine:
        assert push(sender, engine, {"plain": value, "turned": value}) == "verified"
    assert all(pushes.same(it.contiguous(), value) for it in live.values())


@pytest.mark.parametrize("how", ["nothing", "negates", "replaces", "turns"])
@pytest.mark.parametrize("hook", ["finish", "flush_cache"])
def test_what_an_engine_makes_of_live_tensors_is_delivered_and_not_verified(
    folder: Path, sender: Sender, how: str, hook: str
) -> None:
    live = {name: torch.zeros(4, 4) for name in ("a", "b")}

    def finish() -> None:
        match how:
            case "negates":
                live["b"].neg_()
            case "replaces":
                live["b"] = live["b"].clone()
            case "turns":
                live["b"].data = live["b"].data.t()

    with Engine(folder, live, **{hook: finish}) as engine:
        for _ in range(2):
            told = push(sender, engine, {"a": WEIGHT, "b": WEIGHT})
            assert told == ("verified" if how == "nothing" else "delivered")
            assert engine.receiver.status.assurance == told


@pytest.mark.parametrize("names", ["w", True])
def test_a_loader_that_says_something_else_than_names_is_told(folder: Path, sender: Sender, names: Any) -> None:
    with Receiver(f"unix://{folder}/r", lambda _: names) as receiver:
        receiver.start()
        sender.register("v", {"w": torch.ones(2)})
        with pytest.raises(WeightsError, match="a loader returns the names that it took, or None"):
            sender.push("v", [str(receiver.address)])


def test_a_loader_that_says_later_what_it_took_has_accounted_for_it(folder: Path) -> None:
    seen: list[str] = []

    def load(tensors: Any) -> list[str] | None:
        seen.extend(name for name, _ in tensors)
        return seen if len(seen) == 3 else None

    with Receiver(f"unix://{folder}/r", load) as receiver, Sender(device="cpu", bucket_bytes=256) as sender:
        receiver.start()
        sender.register("v", {f"t{k}": torch.ones(60) for k in range(3)})
        assert sender.push("v", [str(receiver.address)]).receivers == {str(receiver.address): "delivered"}


# What a version holds.


def test_a_version_is_told_by_its_content(folder: Path, sender: Sender) -> None:
    live = {"a": torch.zeros(40), "b": torch.zeros(300)}
    given = {"a": torch.ones(40), "b": torch.arange(300.0)}
    changed = {**given, "b": given["b"].clone()}
    changed["b"][7] += 1
    first = sender.register("v", given)
    assert sender.register("w", given) == first  # whatever it is called
    others = [changed, {"b": given["b"], "a": given["a"]}, {"a": given["a"]}, {**given, "c": given["a"]}]
    others += [{**given, "a": given["a"].view(5, 8)}, {**given, "a": given["a"].view(torch.int32)}]
    assert len({first, *(sender.register("v", it) for it in others)}) == 1 + len(others)
    with Engine(folder, live) as engine:
        assert status(engine.address).content == ""
        for tensors in (given, changed):
            content = sender.register("v", tensors)
            report = sender.push("v", [engine.address])
            assert report.content == content == status(engine.address).content == engine.receiver.status.content
            assert f"({content[:8]})" in str(report)


# What is registered is of one piece.


def test_a_file_that_is_rewritten_under_another_name_is_seen(
    tmp_path: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other"
    save_file({"w": torch.ones(200)}, path)
    other.hardlink_to(path)
    copy = spread.copy_in_parallel

    def late(*given: Any) -> None:
        path.unlink(missing_ok=True)
        copy(*given)
        time.sleep(0.03)
        with other.open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"late")

    monkeypatch.setattr(spread, "copy_in_parallel", late)
    with pytest.raises(WeightsError, match="has changed since it was opened"):
        sender.register("v", path)


def test_a_file_that_is_rewritten_while_it_is_copied_is_refused(
    tmp_path: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(200), "x": torch.ones(200)}, path)
    copy = spread.copy_in_parallel

    def late(*given: Any) -> None:
        copy(*given)
        with path.open("r+b") as file:  # after the last look, and before it is all there
            file.seek(-4, 2)
            file.write(b"late")

    monkeypatch.setattr(spread, "copy_in_parallel", late)
    for source in (path, Export(dtype=torch.bfloat16)(path)):
        with pytest.raises(WeightsError, match="has changed since it was opened"):
            sender.register("v", source)
    monkeypatch.undo()
    sender.register("v", path)


@pytest.mark.parametrize("exported", [False, True])
def test_ranks_that_read_different_files_are_told_which_tensor_differs(
    ranks: Ranks, tmp_path: Path, exported: bool
) -> None:
    paths = [str(tmp_path / f"{number}.safetensors") for number in range(3)]
    tensors = {f"t{k:02}": torch.full((500,), float(k)) for k in range(40)}
    for number, path in enumerate(paths):
        save_file({**tensors, "t17": tensors["t17"] + (torch.arange(500) == 250) * (number == 2)}, path)
    same = [paths[0], paths[1], paths[0], paths[1]]
    assert len(set(ranks.run(pushes.read, 4, same, exported))) == 1
    for files in ([*paths, paths[0]], paths[::-1] + paths[:1], [paths[2], *paths]):
        said = ranks.run(pushes.read, 4, files, exported)
        assert len(set(said)) == 1
        assert "read different values of t17 for v" in said[0]


def test_an_export_that_differs_by_rank_is_found(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file({name: torch.full((500,), float(k)) for k, name in enumerate("abcd")}, path)
    said = ranks.run(pushes.renamed, 2, path)
    assert said == ["rank 1 registers another version, or other tensors, than rank 0"] * 2
