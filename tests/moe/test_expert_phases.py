"""The phases of layers with experts compute what each token's experts would, one by one."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from loop_jobs import trained
from ranks import Ranks
from stretto.layers import EXPERT_PARALLEL_MOE, MOE, Phase
from stretto.moe import Experts, Routed, RoutedExperts, expert_phases


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.stop()


class Block(nn.Module):
    """A layer with experts, and with or without something that every token goes through."""

    def __init__(self, experts: int, top_k: int, *, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(experts)
        self.router, self.top_k = nn.Linear(4, experts), top_k
        self.experts, self.shared = Experts(experts, features=4, hidden=3), nn.Linear(4, 4) if shared else None
        self.counts: list[Tensor] = []
        self.double()

    def phases(self) -> list[tuple[Phase, Callable[[Any], Any]]]:
        meanwhile = self.through_shared if self.shared is not None else None
        count = self.counts.append
        return expert_phases(self.experts, route=self.route, meanwhile=meanwhile, finish=torch.add, count=count)

    def forward(self, x_TD: Tensor) -> Tensor:
        for _, run in self.phases():
            x_TD = run(x_TD)
        return x_TD

    def route(self, x_TD: Tensor) -> Routed:
        best, indices_TK = self.router(x_TD).topk(self.top_k)
        return Routed(2 * x_TD, indices_TK, best.softmax(-1), rest=x_TD)

    def through_shared(self, rest: Tensor, x_TD: Tensor) -> Tensor:
        assert self.shared is not None
        return rest + self.shared(x_TD)

    def slowly(self, x_TD: Tensor) -> Tensor:
        """The same, expert by expert for every token."""
        routed = self.route(x_TD)
        out_TD = x_TD if self.shared is None else self.through_shared(x_TD, routed.x_TD)
        shares_TE = torch.zeros(len(x_TD), self.experts.total, dtype=x_TD.dtype)
        shares_TE = shares_TE.scatter(1, routed.indices_TK, routed.weights_TK)
        for expert, (gate_up, down) in enumerate(zip(*self.experts.parameters(), strict=True)):
            gate, up = (routed.x_TD @ gate_up.T).chunk(2, -1)
            out_TD = out_TD + shares_TE[:, expert, None] * ((F.silu(gate) * up) @ down.T)
        return out_TD


@given(experts=st.integers(1, 5), tokens=st.integers(0, 6), shared=st.booleans(), data=st.data())
def test_outputs_and_gradients_are_those_of_each_expert_by_itself(
    experts: int, tokens: int, shared: bool, data: st.DataObject
) -> None:
    block = Block(experts, data.draw(st.integers(1, experts)), shared=shared)
    x_TD = torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True)
    leaves = [x_TD, *block.parameters()]
    fast, slow = block(x_TD), block.slowly(x_TD)
    torch.testing.assert_close(fast, slow)
    one, other = (torch.autograd.grad(out.square().sum(), leaves) for out in (fast, slow))
    for gradient, expected in zip(one, other, strict=True):
        torch.testing.assert_close(gradient, expected)


class Biased(Experts):
    """Adds to each expert's outputs, after the last product."""

    def forward(self, *arguments: Any) -> Tensor:
        return super().forward(*arguments) + 1


class Clamped(Experts):
    """Changes each expert's outputs, and would pass on weights without a thought."""

    def run_sorted(self, *arguments: Any, **named: Any) -> Tensor:
        return Experts.run_sorted(self, *arguments, **named).clamp(max=0)


class ClampedAtOnce(RoutedExperts):
    run_sorted = Clamped.run_sorted


def test_what_is_added_to_outputs_of_experts_is_weighed_too() -> None:
    torch.manual_seed(0)
    x_TD, indices_TK, weights_TK = (
        torch.randn(5, 4).double(),
        torch.rand(5, 3).topk(2).indices,
        torch.rand(5, 2).double(),
    )
    every_E = torch.eye(3, dtype=torch.int64)

    def one_by_one(experts: Experts, change: Callable[[Tensor], Tensor]) -> Tensor:
        plain = Experts.of(experts.gate_up_proj, experts.down_proj, activation=F.silu)
        terms = [
            weights_TK[token, k] * change(plain(x_TD[token, None], every_E[indices_TK[token, k]]))[0]
            for token in range(5)
            for k in range(2)
        ]
        return torch.stack(terms).view(5, 2, 4).sum(1)

    def in_phases(experts: Experts) -> Tensor:
        value: Any = x_TD
        route = lambda x: Routed(x, indices_TK, weights_TK, None)  # noqa: E731
        for _, run in expert_phases(experts, route=route, finish=lambda _, out: out):
            value = run(value)
        return value

    hooked, clamped = Experts(3, 4, 2).double(), partial(torch.clamp, max=0)
    hooked.register_forward_hook(lambda _, __, out: out + 1)
    expected = [
        (in_phases(experts), one_by_one(experts, change))
        for experts, change in (
            (Experts(3, 4, 2).double(), lambda out: out),
            (Biased(3, 4, 2).double(), lambda out: out + 1),
            (Clamped(3, 4, 2).double(), clamped),
            (hooked, lambda out: out + 1),
        )
    ]
    whole = ClampedAtOnce(3, 4, 2).double()
    expected.append((whole(x_TD, indices_TK, weights_TK), one_by_one(whole, clamped)))
    for out, other in expected:
        torch.testing.assert_close(out, other, rtol=1e-12, atol=1e-15)


def test_rows_of_each_expert_are_counted() -> None:
    block = Block(4, 2, shared=False)
    x_TD = torch.randn(7, 4, dtype=torch.float64)
    block(x_TD)
    chosen = block.route(x_TD).indices_TK.flatten()
    assert [counts.tolist() for counts in block.counts] == [torch.bincount(chosen, minlength=4).tolist()]


def test_a_layer_learns_of_other_ranks_by_its_experts() -> None:
    block = Block(4, 2, shared=False)
    assert tuple(phase for phase, _ in block.phases()) == MOE.phases
    block.experts.shard(1, 2)
    assert tuple(phase for phase, _ in block.phases()) == EXPERT_PARALLEL_MOE.phases


@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_layers_of_a_user_are_trained_on_a_mesh_as_by_one_process(ranks: Ranks, sizes: dict[str, int]) -> None:
    count = 4 if len(sizes) == 2 else 2
    assert ranks.run(trained, count, sizes) == [[]] * count
