"""Experts that are divided among ranks give the outputs and gradients of whole ones."""

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from devices import device_ranks
from exchange_jobs import (
    Case,
    blocks,
    deserted,
    in_fp8,
    in_half,
    noted_outputs,
    on_streams,
    refused,
    remains,
    routed,
    running_others,
    second_order,
    without_gradients,
)
from moe_jobs import CONFIG, DEVICE
from ranks import Ranks
from stretto.ir.errors import PipelineError
from stretto.layers import EXPERT_PARALLEL_MOE, MOE
from stretto.model.blocks import MoeBlock
from stretto.moe import AllToAll, ExpertRanks, Experts, Routed, RoutedExperts, expert_phases
from stretto.moe.all_to_all import Counting
from stretto.moe.exchange import Local, validate_exchange

_NO_EXPERT = (
    "1 of 2 indices of experts are below 0 or above 5, and there are 6 experts; route each token to experts that exist"
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = device_ranks(4)
    yield started
    started.stop()


@st.composite
def cases(draw: st.DrawFn, count: int) -> Case:
    each = draw(st.integers(1, 3))
    return Case(
        tokens=tuple(draw(st.integers(0, 5)) for _ in range(count)),
        each=each,
        top_k=draw(st.integers(1, each * count)),
        favourite=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("name", ["all-to-all", "tokens"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_divided_experts_are_whole_experts(ranks: Ranks, count: int, name: str) -> None:
    @settings(max_examples=4)
    @given(st.lists(cases(count), min_size=10, max_size=10))
    def divided(several: list[Case]) -> None:
        assert ranks.run(routed, count, several, name) == [[]] * count

    divided()


@pytest.mark.parametrize("name", ["all-to-all", "tokens"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_of_gradients_are_those_of_whole_experts(ranks: Ranks, count: int, name: str) -> None:
    assert ranks.run(second_order, count, name) == [[]] * count


@pytest.mark.parametrize("count", [2, 4])
def test_divided_experts_can_be_recomputed(ranks: Ranks, count: int) -> None:
    several = [Case((3, 0, 2, 1)[:count], 2, 2, favourite, 0) for favourite in (False, True)]
    assert ranks.run(routed, count, several, "all-to-all", True) == [[]] * count


@pytest.mark.parametrize("tokens", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 7), (5, 5, 5, 5)])
def test_no_tokens_one_token_and_all_tokens_to_one_expert(ranks: Ranks, tokens: tuple[int, ...]) -> None:
    case = Case(tokens, each=2, top_k=1, favourite=True, seed=0)
    assert ranks.run(routed, 4, [case], "all-to-all") == [[]] * 4


@pytest.mark.parametrize("name", ["all-to-all", "tokens"])
@pytest.mark.parametrize(
    ("what", "expected"), [("inputs", [False, False, True]), ("experts", [True, True, False]), ("all", [False] * 3)]
)
def test_a_rank_that_needs_no_gradients_takes_part_in_the_backward(
    ranks: Ranks, what: str, expected: list[bool], name: str
) -> None:
    assert ranks.run(without_gradients, 2, what, name) == [expected, [True] * 3]


@pytest.mark.parametrize("name", ["all-to-all", "tokens"])
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "in phases"])
@pytest.mark.parametrize("sequences", [(2, 1), (1, 2, 0, 1)], ids=str)
def test_a_block_of_divided_experts_is_the_whole_block(
    ranks: Ranks, sequences: tuple[int, ...], apart: bool, name: str
) -> None:
    for frozen in (False, True):
        assert ranks.run(blocks, len(sequences), sequences, name, apart, frozen) == [[]] * len(sequences)


def test_forwards_in_bfloat16_are_equal_to_the_bit(ranks: Ranks) -> None:
    assert ranks.run(in_half, 4) == [[]] * 4


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: STRETTO_TEST_DEVICE=cuda")
@pytest.mark.parametrize("fp8", [False, True])
def test_only_sizes_make_the_host_wait_and_streams_change_nothing(ranks: Ranks, fp8: bool) -> None:
    assert ranks.run(on_streams, 2, fp8) == [[], []]


@pytest.mark.parametrize("what", ["counts", "sums"])
def test_numbers_of_a_group_that_has_failed_are_not_used(ranks: Ranks, what: str) -> None:
    _, said = ranks.run(deserted, 2, what)
    assert "rank 1 was waiting for " in said
    assert DEVICE.type != "cuda" or "rank 0 gave up" in said


class _Alone:
    """One rank by itself, which waits for nothing."""

    rank, size = 0, 1

    def mark(self) -> int:
        return 7

    def all_to_all(self, taken: torch.Tensor, sent: torch.Tensor) -> None:
        taken.copy_(sent)

    def wait(self) -> None: ...

    def validate(self, marks: list[int]) -> None: ...


def test_memory_that_the_device_writes_numbers_to_is_kept_until_the_host_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Phases hand on detached tensors, as `sizes` gets them here."""
    written: list[torch.Tensor] = []
    exchange = AllToAll(cast("ExpertRanks", _Alone()))

    def written_by_a_kernel(numbers: torch.Tensor) -> torch.Tensor:
        written.append(numbers.clone())
        return exchange._kept(written[-1])

    monkeypatch.setattr(exchange, "_to_host", written_by_a_kernel)
    counted, other = (exchange.count(torch.tensor([[0, 1], [1, 2]]), 4) for _ in range(2))
    del written[:]
    assert len(exchange._on_the_way) == 2
    order, arriving_ne, host = counted.state
    assert exchange.sizes(counted._replace(state=Counting(order, arriving_ne, host.detach()))).sent == [4]
    assert list(exchange._on_the_way) == [other.state.host.data_ptr()]


def test_only_tokens_travel_in_fp8(ranks: Ranks) -> None:
    for far, grad_far in ranks.run(in_fp8, 2):
        assert 0 < far < 0.2
        assert 0 < grad_far < 0.2  # since the experts have computed with other numbers


@pytest.mark.parametrize("name", ["all-to-all", "tokens"])
@pytest.mark.parametrize("what", ["experts", "turn", "gradients"])
def test_ranks_that_run_different_experts_are_told(ranks: Ranks, what: str, name: str) -> None:
    says = (
        "rank {} of the expert-parallel ranks runs other experts at this point than this rank ({}); every rank must "
        "run the same experts in the same order, whatever its data"
    )
    assert ranks.run(running_others, 2, what, name) == [says.format(1, 0), says.format(0, 1)]
    assert ranks.run(running_others, 2, "nothing", name) == ["", ""]


@given(st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple), st.integers(0, 1 << 20), st.booleans())
def test_a_mark_says_what_runs(turn: tuple[int, ...], current: int, gradients: bool) -> None:
    ranks = ExpertRanks.__new__(ExpertRanks)

    def mark(turn: tuple[int, ...], current: int, gradients: bool) -> int:
        ranks.turn, ranks.current = turn, current
        with torch.set_grad_enabled(gradients):
            return ranks.mark()

    own = mark(turn, current, gradients)
    assert 0 <= own < 1 << 62
    assert own == mark(turn, current, gradients)
    others = (
        mark((*turn, 0), current, gradients),
        mark(turn, current + 1, gradients),
        mark(turn, current, not gradients),
    )
    assert own not in others


def test_experts_note_the_outputs_whose_backward_must_run(ranks: Ranks) -> None:
    assert ranks.run(noted_outputs, 2) == [[True] * 4] * 2


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("below", [_NO_EXPERT] * 2),
        ("above", [_NO_EXPERT] * 2),
        ("uneven", ["5 experts cannot be divided among 2 ranks; use a divisor of 5"] * 2),
        (
            "alone",
            [
                f"this module holds experts {held} of 6; run it in the Pipeline that has sharded it"
                for held in ("0 to 2", "3 to 5")
            ],
        ),
    ],
)
def test_refusals(ranks: Ranks, what: str, says: list[str]) -> None:
    assert ranks.run(refused, 2, what) == says


@pytest.mark.parametrize("index", [-1, 4])
def test_a_rank_with_all_experts_refuses_others(index: int) -> None:
    with pytest.raises(PipelineError, match="1 of 3 indices of experts are below 0 or above 3"):
        RoutedExperts(4, 2, 3)(torch.ones(3, 2), torch.tensor([[0], [index], [3]]), torch.ones(3, 1))


def test_a_share_is_part_of_the_whole_parameters_memory() -> None:
    experts = Experts(6, 4, 3)
    experts.down_proj.requires_grad_(False)
    whole = dict(experts.named_parameters())
    experts.shard(1, 3)
    assert (experts.first, experts.total, experts.ranks, len(experts.down_proj)) == (2, 6, 3, 2)
    for name, parameter in experts.named_parameters():
        assert parameter.data_ptr() == whole[name][2].data_ptr()
        assert parameter.requires_grad == whole[name].requires_grad
    assert experts.extra_repr() == "experts=2 of 6, features=4, hidden=3"
    experts.shard(1, 3)
    assert len(experts.down_proj) == 2
    with pytest.raises(PipelineError, match="are share 1 of 3 already, and cannot become share 0 of 2"):
        experts.shard(0, 2)


def test_a_share_on_a_device_leaves_the_others_memory_free() -> None:
    experts = Experts(6, 4, 3).to("meta")
    experts.shard(1, 3)
    for parameter in experts.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_a_share_keeps_its_gradients() -> None:
    experts = Experts(4, 2, 3)
    for parameter in experts.parameters():
        parameter.grad = torch.randn_like(parameter)
    expected = experts.down_proj.grad[2:]  # type: ignore[index]
    experts.shard(1, 2)
    assert experts.down_proj.grad is not None
    assert torch.equal(experts.down_proj.grad, expected)


def test_experts_need_a_count_for_each() -> None:
    with pytest.raises(PipelineError, match=r"4 experts need as many counts of rows \(got 2\)"):
        Experts(4, 2, 3)(torch.ones(3, 2), torch.tensor([1, 2]))


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class _Special(nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("number", "6 experts cannot be divided among 4 ranks; use a divisor of 6"),
        ("parametrized", "experts with parametrizations"),
        ("hook", "down_proj of these experts has hooks"),
        ("after", "down_proj of these experts has hooks"),
        ("special", "down_proj of these experts is a _Special"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_and_stay_whole(what: str, says: str) -> None:
    experts = Experts(6, 4, 3)
    match what:
        case "parametrized":
            parametrize.register_parametrization(experts, "down_proj", _Doubled())
        case "hook":
            experts.down_proj.register_hook(lambda grad: grad)
        case "after":
            experts.down_proj.register_post_accumulate_grad_hook(lambda _: None)
        case "special":
            experts.down_proj = _Special(experts.down_proj.data)
    with pytest.raises(PipelineError, match=says):
        experts.shard(0, 4 if what == "number" else 2)
    assert len(experts.gate_up_proj) == 6


def test_an_exchange_is_no_part_of_copies() -> None:
    experts = RoutedExperts(4, 2, 3)
    experts.shard(1, 2)
    experts.exchange = experts.members = lambda: None  # type: ignore[assignment]  # which cannot be pickled
    experts.number = 5
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts)), copy.copy(experts)):
        assert (other.exchange, other.members, other.number) == (None, None, 0)
        assert (other.first, other.total) == (2, 4)
        assert torch.equal(other.down_proj, experts.down_proj)


class _Half:
    def count(self) -> None: ...

    dispatch = None


def test_an_exchange_without_all_methods_is_refused() -> None:
    says = "an exchange has the methods count, sizes, dispatch, combine, and _Half has no sizes, dispatch, combine"
    with pytest.raises(PipelineError, match=says):
        validate_exchange(_Half())
    validate_exchange(Local())


class _Careless(Local):
    """An exchange of which one method returns something else."""

    def __init__(self, method: str, wrong: Callable[[Any], Any]) -> None:
        setattr(self, method, lambda *given, **named: wrong(getattr(Local, method)(self, *given, **named)))


@pytest.mark.parametrize(
    ("method", "wrong", "says"),
    [
        ("count", tuple, "count must return a stretto.moe.Counted (got a tuple)"),
        (
            "count",
            lambda counted: counted._replace(counts_E=counted.counts_E.float()),
            "count must return a count of rows for each of all 4 experts (got (4,) in torch.float32)",
        ),
        (
            "count",
            lambda counted: counted._replace(counts_E=counted.counts_E[:3]),
            "count must return a count of rows for each of all 4 experts (got (3,) in torch.int64)",
        ),
        ("dispatch", tuple, "dispatch must return a stretto.moe.Dispatched (got a tuple)"),
        (
            "dispatch",
            lambda rows: rows._replace(counts_e=rows.counts_e[:3]),
            "dispatch must return a count of rows for each of this rank's 4 experts (got (3,) in torch.int64)",
        ),
        (
            "dispatch",
            lambda rows: rows._replace(counts_e=[1, 1, 1, 0]),
            "dispatch must return a count of rows for each of this rank's 4 experts (got a list)",
        ),
        (
            "dispatch",
            lambda rows: rows._replace(rows_RD=rows.rows_RD[:, 1:]),
            "dispatch must return rows of 2 features in torch.float32 (got (3, 1) in torch.float32)",
        ),
        (
            "dispatch",
            lambda rows: rows._replace(rows_RD=rows.rows_RD.detach()),
            "the rows that _Careless.dispatch returns must require gradients",
        ),
        (
            "dispatch",
            lambda rows: rows._replace(weights_R=rows.weights_R[:, None]),
            "dispatch must return a weight in torch.float32 for each of 3 rows (got (3, 1) in torch.float32)",
        ),
        (
            "dispatch",
            lambda rows: rows._replace(weights_R=None),
            "dispatch must return a weight in torch.float32 for each of 3 rows (got a NoneType)",
        ),
        (
            "dispatch",
            lambda rows: rows._replace(weights_R=rows.weights_R.long()),
            "dispatch must return a weight in torch.float32 for each of 3 rows (got (3,) in torch.int64)",
        ),
        (
            "dispatch",
            lambda rows: rows._replace(weights_R=rows.weights_R.detach()),
            "the weights that _Careless.dispatch returns must require gradients",
        ),
        ("combine", torch.detach, "what _Careless.combine returns must require gradients"),
        (
            "combine",
            lambda _: None,
            "combine must return tokens × features (3, 2) in torch.float32 (got a NoneType)",
        ),
        (
            "combine",
            lambda out: out.double(),
            "combine must return tokens × features (3, 2) in torch.float32 (got (3, 2) in torch.float64)",
        ),
        (
            "combine",
            lambda out: out[1:],
            "combine must return tokens × features (3, 2) in torch.float32 (got (2, 2) in torch.float32)",
        ),
    ],
)
def test_what_an_exchange_returns_is_checked(method: str, wrong: Callable[[Any], Any], says: str) -> None:
    experts = RoutedExperts(4, 2, 3)
    x, weights = torch.ones(3, 2, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    inputs = x, torch.tensor([[0], [1], [3]]), weights
    experts.exchange = _Careless(method, lambda right: right)
    experts(*inputs)
    experts.exchange = _Careless(method, wrong)
    with pytest.raises(PipelineError, match=re.escape(says if "_Careless" in says else f"_Careless.{says}")):
        experts(*inputs)
    if "gradients" in says:
        with torch.no_grad():
            experts(*inputs)


@pytest.mark.parametrize(
    ("place", "wrong", "says"),
    [
        (
            0,
            torch.ones(1, 3, 2),
            "tokens go to experts as a tensor, tokens × features (got (1, 3, 2) in torch.float32)",
        ),
        (
            0,
            torch.ones(2, 2),
            "the experts of 2 tokens are a tensor of whole numbers, tokens × experts of each (got (3",
        ),
        (1, torch.zeros(3, 1), "the experts of 3 tokens are a tensor of whole numbers"),
        (1, torch.zeros(3, dtype=torch.int64), "the experts of 3 tokens are a tensor of whole numbers"),
        (2, torch.ones(3, 2), "a number for each of their indices, (3, 1) (got (3, 2) in torch.float32)"),
        (2, torch.ones(3, 1, dtype=torch.int64), "the weights of experts are a floating-point tensor"),
        (2, None, "the weights of experts are a floating-point tensor with a number for each of their indices"),
    ],
)
def test_routing_that_cannot_be_is_refused(place: int, wrong: Tensor | None, says: str) -> None:
    inputs: list[Tensor | None] = [torch.ones(3, 2), torch.tensor([[0], [1], [3]]), torch.ones(3, 1)]
    inputs[place] = wrong
    experts = Experts(4, 2, 3)
    x, indices, weights = inputs
    block = expert_phases(experts, route=lambda _: Routed(x, indices, weights, None), finish=lambda _, out: out)  # type: ignore[arg-type]
    for run in (lambda: RoutedExperts(4, 2, 3)(*inputs), lambda: block[1][1](block[0][1](None))):
        with pytest.raises(PipelineError, match=re.escape(says)):
            run()


def test_a_route_that_returns_something_else_is_refused() -> None:
    block = expert_phases(Experts(4, 2, 3), route=lambda x: (x, x, x), finish=torch.add)  # type: ignore[arg-type, return-value]
    with pytest.raises(PipelineError, match=r"route must return a stretto.moe.Routed \(got a tuple\)"):
        block[1][1](block[0][1](torch.ones(1, 2)))


def test_a_block_of_divided_experts_has_the_phases_of_the_exchange() -> None:
    block = MoeBlock(CONFIG)
    assert tuple(phase for phase, _ in block.phases()) == MOE.phases
    block.mlp.experts.shard(0, 2)
    assert tuple(phase for phase, _ in block.phases()) == EXPERT_PARALLEL_MOE.phases


@pytest.mark.parametrize(("policy", "dry"), [("none", True), ("none", False), ({"*": "recompute"}, False)])
def test_nothing_is_left_of_a_pipeline_that_is_gone(ranks: Ranks, policy: Any, dry: bool) -> None:
    """Noted outputs have graphs, and these hold who notes them: a circle that no collector sees."""
    for gone in ranks.run(remains, 2, policy, dry):
        assert gone
        assert all(gone)
