"""How tensors lie: every change is seen, and nothing else is taken for one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.weights.receive import memory_layouts as live
from stretto.weights.receive.memory_layouts import Layouts, layout_of


def assign(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def act(tensor: Tensor) -> None:
        tensor.data = change(tensor.data)

    return act


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "moved": assign(torch.clone),
    "turned": assign(torch.t),
    "another shape": assign(lambda it: it.view(2, 8)),
    "another type": assign(lambda it: it.view(torch.int32)),
    "negative": assign(torch._neg_view),
    "smaller": assign(lambda it: it[:2]),
    "later": assign(lambda it: it[1:]),
    "spread": assign(lambda it: it.as_strided((2, 2), (8, 1))),
    "without memory": lambda it: it.untyped_storage().resize_(0),
}
NO_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "values": lambda it: it.fill_(3.0),
    "gradients wanted": lambda it: it.requires_grad_(),
    "again": lambda it: it.set_(it.untyped_storage(), 0, (4, 4), (4, 1)),
}


@pytest.fixture(params=["quick", "slow"], autouse=True)
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch does not promise may be gone one day."""
    if request.param == "quick":
        there = torch.zeros(4)
        assert live._quick_look([there])(there)
    else:
        monkeypatch.setattr(live, "_quick_look", lambda _: lambda *_: False)


def laid() -> tuple[list[Tensor], Layouts]:
    tensors = [torch.zeros(4, 4) for _ in range(600)]
    return tensors, Layouts(tensors, [layout_of(it) for it in tensors])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [0, 255, 256, 599])
def test_a_change_is_seen_wherever_it_is(change: str, place: int) -> None:
    tensors, layouts = laid()
    assert layouts.hold(tensors)
    CHANGES[change](tensors[place])
    assert not layouts.hold(tensors)
    assert not layouts.are_same(tensors)


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_is_no_change_is_not_taken_for_one(change: str) -> None:
    tensors, layouts = laid()
    NO_CHANGES[change](tensors[300])
    assert layouts.hold(tensors)


def test_tensors_that_are_missing_or_exchanged_are_seen() -> None:
    tensors, layouts = laid()
    assert not layouts.hold(tensors[:-1])
    assert not layouts.hold([*tensors, tensors[0]])
    assert not layouts.hold([*tensors[1:], tensors[0]])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_in_any_mode(mode: Callable[[], Any]) -> None:
    tensors, layouts = laid()
    tensors[7].data = tensors[7].data.t()
    with mode():
        assert not layouts.hold(tensors)
        tensors[7].data = tensors[7].data.t()
        assert layouts.hold(tensors)
    assert layouts.hold(tensors)


def test_one_tensor_under_two_names() -> None:
    one = torch.zeros(4)
    layouts = Layouts([one, one], [layout_of(one)] * 2)
    assert layouts.hold([one, one])
