"""Pushes from real sender processes into receivers of this one."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pushes
from pushes import same, tensors_of, until
from ranks import Ranks
from stretto.ir.errors import StrettoError
from stretto.program.task import Kind
from stretto.weights.manifest import ITEM_BYTES, TensorSpec
from stretto.weights.receive.receiver import Receiver
from stretto.weights.receive.state import Hooks

DEVICE = os.environ.get("STRETTO_TEST_DEVICE", "cpu")  # "cuda" runs all of this on a GPU, under MPS
SPEC = [("float32", (64, 33)), ("bfloat16", (7,)), ("int8", (5, 5, 5)), ("float8_e4m3fn", (300, 40)), ("int64", ())]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4, backend="gloo" if DEVICE == "cpu" else "onegpu", device=DEVICE)
    yield made
    made.stop()


class Keeper:
    """A loader that keeps copies of all it was given, in order."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.order: list[str] = []
        self.events: list[str] = []

    def __call__(self, tensors: Any) -> list[str]:
        for name, tensor in tensors:
            self.loaded[name] = tensor.to("cpu", copy=True)
            self.order.append(name)
        return [name for name, _ in tensors]

    @property
    def hooks(self) -> Hooks:
        said = self.events.append
        return Hooks(
            pause=lambda how: said(f"pause {how}"),
            begin=lambda: said("begin"),
            finish=lambda: said("finish"),
            flush_cache=lambda: said("flush"),
            resume=lambda: said("resume"),
        )


def live(seed: int = 0) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor, device=DEVICE) for name, tensor in tensors_of(SPEC, seed).items()}


def shapes() -> Any:
    return st.one_of(
        st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(0, 9), st.integers(0, 9)), st.just((2, 3, 4))
    )


@given(
    spec=st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes()), min_size=1, max_size=12),
    huge=st.booleans(),
    senders=st.integers(1, 4),
    kinds=st.lists(st.booleans(), min_size=1, max_size=4),
    bucket=st.sampled_from([256, 1024, 1 << 16]),
)
@settings(max_examples=25)
def test_every_bit_arrives(
    ranks: Ranks, tmp_path_factory: Any, spec: Any, huge: bool, senders: int, kinds: list[bool], bucket: int
) -> None:
    spec = [*spec, ("uint8", (5000,))] if huge else spec
    expected = tensors_of(spec, 2)
    split = all(kinds)
    if not split:
        bucket = max(bucket, -(-max(tensor.nbytes for tensor in expected.values()) // 256) * 256)
    folder = tmp_path_factory.mktemp("sockets")
    folder.chmod(0o700)
    receivers, results = [], []
    for number, in_place in enumerate(kinds):
        address = f"unix://{folder}/{number}"
        target: Any = (
            {name: torch.zeros_like(it, device=DEVICE) for name, it in expected.items()} if in_place else Keeper()
        )
        receivers.append(Receiver(address, **({"into": target} if in_place else {"load": target})).start())
        results.append(target if in_place else target.loaded)
    try:
        options = {"sender": {"bucket_bytes": bucket, "split": split}, "on": DEVICE}
        told = ranks.run(pushes.push, senders, spec, [1, 2], [str(it.address) for it in receivers], options)
        for report in (report for rank in told for report in rank):
            assert not isinstance(report, str), report
            assert report.receivers == {
                str(it.address): "verified" if in_place else "delivered"
                for it, in_place in zip(receivers, kinds, strict=True)
            }
        for found in results:
            assert found.keys() == expected.keys()
            assert all(same(found[name], tensor) for name, tensor in expected.items())
        assert {receiver.ensure_serving() for receiver in receivers} == {"v2"}
    finally:
        for receiver in receivers:
            receiver.close()


def test_thousands_of_tiny_tensors_and_a_huge_one(ranks: Ranks, folder: Path) -> None:
    spec = [*[("bfloat16", (k % 7,)) for k in range(3000)], ("uint8", (3 << 20,))]
    keeper = Keeper()
    with Receiver(f"unix://{folder}/r", keeper, device=DEVICE) as receiver:
        receiver.start()
        told = ranks.run(pushes.push, 2, spec, [1, 2], [str(receiver.address)], {})
    assert [report.receivers for report in told[0]] == [{str(receiver.address): "delivered"}] * 2
    assert all(same(keeper.loaded[name], tensor) for name, tensor in tensors_of(spec, 2).items())


@pytest.mark.parametrize("mode", ["serial", "overlap_reload", "overlap_all"])
@pytest.mark.parametrize("senders", [1, 3])
def test_the_measured_timeline_keeps_the_programs_order(ranks: Ranks, folder: Path, mode: str, senders: int) -> None:
    target = live()
    with Receiver(f"unix://{folder}/r", into=target) as receiver:
        receiver.start()
        options = {"sender": {"bucket_bytes": 1024, "split": True}, "push": {"record": True, "mode": mode}}
        report = ranks.run(pushes.push, senders, SPEC, [1], [str(receiver.address)], options)[0][0]
    assert all(same(target[name], tensor) for name, tensor in tensors_of(SPEC, 1).items())
    timeline, program = report.timeline, report.timeline.program
    assert report.mode == mode
    assert report.buckets > 8
    needing = program.needing
    here = program.device[needing] == program.device[program.need]
    assert (timeline.start[needing[here]] >= timeline.end[program.need[here]]).all()
    for lane in range(len(program.lanes)):  # and so for every buffer, which one lane fills and one empties
        tasks = np.flatnonzero(program.lane == lane)
        assert (np.diff(timeline.start[tasks]) >= 0).all()
    assert (program.work.kind == Kind.RELOAD).sum() == senders * report.buckets


def test_a_receiver_is_led_through_its_states_in_order(ranks: Ranks, folder: Path) -> None:
    keeper = Keeper()
    with Receiver(f"unix://{folder}/r", keeper, hooks=keeper.hooks) as receiver:
        receiver.start()
        assert receiver.status.version == "initial"
        options = {"push": {"in_flight": "abort"}}
        ranks.run(pushes.push, 1, SPEC, [1], [str(receiver.address)], options)
        assert keeper.events == ["pause abort", "begin", "finish", "flush", "resume"]
        assert keeper.order == list(tensors_of(SPEC, 1))
        assert receiver.ensure_serving() == "v1"


def test_slices_are_written_where_they_belong_and_other_buckets_are_skipped(ranks: Ranks, folder: Path) -> None:
    expected = tensors_of(SPEC, 1)
    cut = {"t0": (slice(10, 20), slice(3, 30)), "t3": (slice(None), slice(20, None))}
    into = {name: torch.zeros_like(expected[name][index], device=DEVICE) for name, index in cut.items()}
    addresses = [data.data_ptr() for data in into.values()]
    with Receiver(f"unix://{folder}/r", into=into, slices=cut) as receiver:
        receiver.start()
        options = {"sender": {"bucket_bytes": 512, "split": True}}
        report = ranks.run(pushes.push, 3, SPEC, [1], [str(receiver.address)], options)[0][0]
    assert not isinstance(report, str), report
    assert all(same(into[name], expected[name][index]) for name, index in cut.items())
    assert [data.data_ptr() for data in into.values()] == addresses


def test_one_that_joins_is_served_without_touching_the_others(ranks: Ranks, folder: Path) -> None:
    old, new = Keeper(), Keeper()
    with (
        Receiver(f"unix://{folder}/old", old, hooks=old.hooks) as first,
        Receiver(f"unix://{folder}/new", new) as second,
    ):
        first.start(), second.start()
        ranks.run(pushes.push, 3, SPEC, [1], [str(first.address)], {})
        before = list(old.events)
        ranks.run(pushes.push, 3, SPEC, [1], [str(second.address)], {"sender": {"bucket_bytes": 1 << 14}})
        assert second.ensure_serving() == first.ensure_serving() == "v1"
    assert old.events == before
    assert all(same(new.loaded[name], tensor) for name, tensor in tensors_of(SPEC, 1).items())


def test_a_loader_that_cannot_say_is_reported_unaccounted(ranks: Ranks, folder: Path) -> None:
    with Receiver(f"unix://{folder}/r", lambda _: None) as receiver:
        receiver.start()
        report = ranks.run(pushes.push, 1, SPEC, [1], [str(receiver.address)], {})[0][0]
        assert report.receivers == {str(receiver.address): "unaccounted"}
        assert receiver.status.assurance == "unaccounted"


def test_what_a_loader_keeps_is_its_own_if_it_says_so(ranks: Ranks, folder: Path) -> None:
    kept: dict[str, Tensor] = {}
    with Receiver(f"unix://{folder}/r", lambda tensors: kept.update(tensors) or list(kept), retains=True) as receiver:
        receiver.start()
        ranks.run(pushes.push, 2, SPEC, [1], [str(receiver.address)], {"sender": {"bucket_bytes": 1 << 14}})
        assert all(same(kept[name], tensor) for name, tensor in tensors_of(SPEC, 1).items())


class Trouble(Keeper):
    """A loader with something wrong about it, the first time."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __call__(self, tensors: Any) -> list[str]:
        names = super().__call__(tensors)
        what, self.what = (self.what, "") if "t3" in names else ("", self.what)
        match what:
            case "raises":
                raise KeyError("layer 3")
            case "drops":
                return [name for name in names if name != "t3"]
            case "scribbles":
                tensors[0][1].view(torch.uint8).bitwise_xor_(1)
        return names


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raises", "the loader failed at bucket 1 (t3): KeyError: 'layer 3'"),
        ("drops", "the loader did not account for t3"),
        ("scribbles", "bucket 1 (t3) "),
    ],
)
@pytest.mark.parametrize("senders", [1, 3])
def test_what_goes_wrong_in_a_loader_is_named_and_the_next_push_repairs_it(
    ranks: Ranks, folder: Path, what: str, said: str, senders: int
) -> None:
    trouble, fine = Trouble(what), Keeper()
    with Receiver(f"unix://{folder}/a", trouble) as first, Receiver(f"unix://{folder}/b", fine) as second:
        first.start(), second.start()
        addresses = [str(first.address), str(second.address)]
        options = {"sender": {"bucket_bytes": 12032}}
        told = ranks.run(pushes.push, senders, SPEC, [1, 2], addresses, options)
        for failed, report in told:
            assert said in failed
            assert f"unix://{folder}/" in failed  # either's, where both look at the same buffer
            assert not isinstance(report, str)
        assert first.ensure_serving() == second.ensure_serving() == "v2"
    for keeper in (trouble, fine):
        assert all(same(keeper.loaded[name], tensor) for name, tensor in tensors_of(SPEC, 2).items())


def test_receivers_of_a_failed_push_are_dirty_and_refuse_to_serve(ranks: Ranks, folder: Path) -> None:
    trouble, fine = Trouble("raises"), Keeper()
    with Receiver(f"unix://{folder}/a", trouble) as first, Receiver(f"unix://{folder}/b", fine) as second:
        first.start(), second.start()
        ranks.run(pushes.push, 2, SPEC, [1], [str(first.address), str(second.address)], {})
        for receiver in (first, second):
            until(lambda it=receiver: it.status.state == "dirty", 60)
            assert "KeyError" in receiver.status.error
            with pytest.raises(StrettoError, match=r"not serving: dirty: .*KeyError"):
                receiver.ensure_serving()


@pytest.mark.parametrize(
    ("into", "said"),
    [
        ({"t9": torch.zeros(1, device=DEVICE)}, "t9 is not in what is pushed"),
        (
            {"t0": torch.zeros(64, 33, dtype=torch.float64, device=DEVICE)},
            "t0 is pushed as float32, and is float64 here",
        ),
        ({"t0": torch.zeros(64, 34, device=DEVICE)}, "t0 is pushed with shape (64, 33), and it does not fit (64, 34)"),
    ],
)
def test_a_version_that_does_not_fit_is_refused_before_anybody_pauses(
    ranks: Ranks, folder: Path, into: dict[str, Tensor], said: str
) -> None:
    keeper = Keeper()
    with (
        Receiver(f"unix://{folder}/a", into=into) as first,
        Receiver(f"unix://{folder}/b", keeper, hooks=keeper.hooks) as second,
    ):
        first.start(), second.start()
        told = ranks.run(pushes.push, 2, SPEC, [1], [str(first.address), str(second.address)], {})
        assert all(f"{first.address}: {said}" in failed for (failed,) in told)
        assert first.ensure_serving() == second.ensure_serving() == "initial"
    assert keeper.events == []


def test_a_loader_says_what_it_expects(ranks: Ranks, folder: Path) -> None:
    expects = [TensorSpec("t0", "float32", (64, 33)), TensorSpec("t1", "float16", (7,)), TensorSpec("q", "int8", ())]
    with Receiver(f"unix://{folder}/a", Keeper(), expects=expects) as receiver:
        receiver.start()
        (failed,) = ranks.run(pushes.push, 1, SPEC, [1], [str(receiver.address)], {})[0]
    assert (
        failed
        == f"{receiver.address}: t1 is pushed as bfloat16[7], and float16[7] is expected; q is not in what is pushed"
    )
