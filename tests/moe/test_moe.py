"""Routing, order and experts by themselves: every token arrives, and gradients are those of a loop over experts."""

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.moe import Experts, RoutedExperts, Router
from stretto.moe.grouped_linear import grouped_linear, grouped_outer
from stretto.moe.permutation import Permutation, combine, dispatch
from stretto.moe.weighting import weigh

WIDTH = 6
Case = tuple[int, Tensor]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A number of experts, and for each token those that it goes to: none left out, all to one, or as it comes."""
    experts, tokens = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    top_k = draw(st.integers(1, experts))
    rows = [draw(st.permutations(range(experts)))[:top_k] for _ in range(tokens)]
    if draw(st.booleans()):
        rows = [rows[0]] * tokens if rows else rows
    return experts, torch.tensor(rows, dtype=torch.int64).view(tokens, top_k)


@settings(max_examples=200)
@given(cases())
def test_rows_are_sorted_by_expert_and_no_token_is_lost(case: Case) -> None:
    experts, indices = case
    order = Permutation.by_expert(indices, experts=experts)
    flat = indices.flatten()
    assert flat[order.source_R].tolist() == sorted(flat.tolist())
    assert order.target_R[order.source_R].tolist() == list(range(len(flat)))
    assert order.counts_E.tolist() == [int((flat == expert).sum()) for expert in range(experts)]


@settings(max_examples=100)
@given(cases(), st.integers(0, 99))
def test_experts_are_those_of_a_loop(case: Case, seed: int) -> None:
    count, indices = case
    torch.manual_seed(seed)
    experts = RoutedExperts(count, WIDTH, 4).double()
    x = torch.randn(len(indices), WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(indices.shape, dtype=torch.float64, requires_grad=True)
    parameters = [x, weights, experts.gate_up_proj, experts.down_proj]
    out = experts(x, indices, weights)
    terms = []
    for token, row in enumerate(indices.tolist()):
        for k, expert in enumerate(row):
            gate, up = (experts.gate_up_proj[expert] @ x[token]).chunk(2)
            terms.append((token, weights[token, k] * (experts.down_proj[expert] @ (F.silu(gate) * up))))
    expected = torch.stack(
        [sum((term for at, term in terms if at == token), torch.zeros(WIDTH).double()) for token in range(len(indices))]
        or [torch.zeros(WIDTH).double()]
    )[: len(indices)]
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-13)
    weighing = torch.randn_like(out)
    mine = torch.autograd.grad((out * weighing).sum(), parameters, allow_unused=True)
    theirs = torch.autograd.grad((expected * weighing).sum(), parameters, allow_unused=True) if terms else mine
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, torch.zeros_like(one) if other is None else other, rtol=1e-10, atol=1e-12)


def test_backwards_of_dispatch_and_combine_are_their_derivatives() -> None:
    indices = torch.tensor([[2, 0], [2, 1], [0, 2]])
    order = Permutation.by_expert(indices, experts=4)
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor) -> Tensor:
        return combine(dispatch(x, order).sin(), order, tokens=3)

    assert torch.autograd.gradcheck(there_and_back, (x,))
    assert torch.autograd.gradgradcheck(there_and_back, (x,))


def test_the_backward_of_weighing_is_its_derivative() -> None:
    rows = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(weigh, (rows, weights))
    assert torch.autograd.gradgradcheck(weigh, (rows, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_outputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    """After 256, seven times 1 would not change a sum in bfloat16, and 263 is no number of it."""
    rows = torch.tensor([[256.0], *[[1.0]] * 7], dtype=torch.bfloat16)
    order = Permutation.by_expert(torch.arange(8)[None], experts=8)
    assert float(combine(rows, order, tokens=1, dtype=dtype)) == (264 if dtype == torch.bfloat16 else 263)


@settings(max_examples=100)
@given(
    st.integers(0, 4),
    st.integers(0, 5),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.integers(0, 99),
)
def test_weighed_rows_are_rounded_once(
    rows: int, features: int, dtype: torch.dtype, of_weights: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, grad = (torch.randn(2, rows, features).to(dtype)).unbind()
    x, weights = x.requires_grad_(), torch.rand(rows).to(of_weights).requires_grad_()
    out = weigh(x, weights)
    x_grad, weights_grad = torch.autograd.grad(out, (x, weights), grad)
    exact, exact_grad, factors = (tensor.detach().double() for tensor in (x, grad, weights))
    as_one = partial(torch.allclose, rtol=1e-7 if torch.float64 not in (dtype, of_weights) else 1e-12, atol=0)
    if dtype.itemsize == 2:
        as_one = torch.equal
    assert out.dtype == x_grad.dtype == dtype
    assert as_one(out, (exact * factors[:, None]).to(dtype))
    assert as_one(x_grad, (exact_grad * factors[:, None]).to(dtype))
    assert weights_grad.dtype == of_weights
    expected = (exact * exact_grad).sum(1).to(of_weights)
    assert torch.allclose(weights_grad, expected, rtol=1e-2 if of_weights == torch.bfloat16 else 1e-5, atol=1e-6)


def test_only_gradients_that_are_needed_are_computed() -> None:
    rows, weights = torch.ones(2, 3, requires_grad=True), torch.ones(2)
    weigh(rows, weights).sum().backward()
    assert weights.grad is None
    assert rows.grad is not None
    weigh(rows.detach(), weights.requires_grad_()).sum().backward()
    assert weights.grad.tolist() == [3, 3]


@settings(max_examples=50)
@given(cases(), st.integers(0, 99))
def test_rows_with_weights_are_outputs_times_weights(case: Case, seed: int) -> None:
    count, indices = case
    torch.manual_seed(seed)
    experts = Experts(count, WIDTH, 4).double()
    order = Permutation.by_expert(indices, experts=count)
    x, weights = torch.randn(indices.numel(), WIDTH).double(), torch.randn(indices.numel()).double()
    out = experts(x, order.counts_E, weights)
    assert torch.allclose(out, experts(x, order.counts_E) * weights[:, None], rtol=1e-12, atol=1e-15)


def test_weights_of_rows_have_32_bits() -> None:
    """Those of 16 bits would be rounded by policies that store the inputs of sites in float8."""
    experts, indices = RoutedExperts(2, WIDTH, 4), torch.tensor([[0], [1], [1]])
    x, weights = torch.randn(3, WIDTH).bfloat16(), torch.rand(3, 1).bfloat16().requires_grad_()
    weights_R = experts.dispatch(x, weights, experts.sizes(experts.count(indices))).weights_R
    assert weights_R.dtype == torch.float32
    assert torch.equal(weights_R.bfloat16(), weights[:, 0])
    weights_R.sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == torch.bfloat16


def test_nothing_saves_what_experts_return() -> None:
    """Rows at experts are as many as tokens times experts: what is saved of them counts."""
    experts, tokens, top_k = RoutedExperts(4, 64, 8), 10, 3
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, indices = torch.randn(tokens, 64, requires_grad=True), torch.rand(tokens, 4).topk(top_k).indices
    weights = torch.rand(tokens, top_k, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = experts(x, indices, weights)
    wide = [size for size in saved.values() if size == tokens * top_k * 64 * 4]
    assert len(wide) == 1  # what has come to the experts, and not what they return
    out.sum().backward()


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 99))
def test_grouped_products_are_those_of_each_group(counts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    x, grad = (torch.randn(sum(counts), size, dtype=torch.float64) for size in (3, 5))
    weight = torch.randn(len(counts), 5, 3, dtype=torch.float64)
    parts = list(zip(x.split(counts), grad.split(counts), weight, strict=True))
    out = grouped_linear(x, weight, torch.tensor(counts))
    assert torch.allclose(out, torch.cat([rows @ matrix.T for rows, _, matrix in parts]), rtol=1e-12)
    outer = grouped_outer(grad, x, torch.tensor(counts))
    assert torch.allclose(outer, torch.stack([g.T @ rows for rows, g, _ in parts]), rtol=1e-12)


def test_experts_under_autocast_compute_in_bfloat16() -> None:
    experts = Experts(2, 8, 16)
    x, counts = torch.randn(5, 8), torch.tensor([2, 3])
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(x, counts)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), experts(x, counts), rtol=0.1, atol=1e-3)


def _router(**options: int) -> Router:
    torch.manual_seed(0)
    return Router(WIDTH, 8, top_k=2, **options)


def test_the_bias_follows_the_load_and_changes_no_weight() -> None:
    router = _router()
    x = torch.randn(50, WIDTH)
    before = router(x)
    router.count(torch.tensor([10, 0, 5, 5, 5, 5, 5, 5]))
    router.update_bias(0.5)
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0, 0]
    assert int(router.counts_E.sum()) == 0
    after = router(x)
    assert (after.indices_TK == 0).sum() < (before.indices_TK == 0).sum()
    assert (after.indices_TK == 1).sum() > (before.indices_TK == 1).sum()
    scores = after.scores_TE.gather(1, after.indices_TK)
    assert torch.allclose(after.weights_TK, scores / scores.sum(-1, keepdim=True))


def test_evaluation_counts_nothing() -> None:
    router = _router().eval()
    router.count(torch.ones(8, dtype=torch.int64))
    assert int(router.counts_E.sum()) == 0


def test_no_tokens_are_routed_nowhere() -> None:
    assert _router(groups=4, top_groups=2)(torch.randn(0, WIDTH)).indices_TK.shape == (0, 2)


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    router = _router(groups=4, top_groups=1)
    routing = router(torch.randn(40, WIDTH))
    groups = routing.indices_TK // 2
    assert torch.equal(groups[:, 0], groups[:, 1])
    best = routing.scores_TE.view(-1, 4, 2).sum(-1).argmax(-1)
    assert torch.equal(groups[:, 0], best)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_bias_is_never_cast_to_less_than_float32(dtype: torch.dtype) -> None:
    router = _router()
    router.e_score_correction_bias.fill_(0.1001)
    kept = router.e_score_correction_bias.clone()
    router.to(dtype)
    assert torch.equal(router.e_score_correction_bias.float(), kept)
    assert router.e_score_correction_bias.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_router_made_on_the_meta_device_counts_from_zero() -> None:
    with torch.device("meta"):
        router = Router(WIDTH, 8, top_k=2)
    assert int(router.to_empty(device="cpu").counts_E.abs().sum()) == 0


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_cuda
@pytest.mark.parametrize("counts", [[5, 0, 17, 2], [0, 0, 0, 24], [0, 0, 0, 0], [1, 0, 0, 0]])
def test_the_gpus_kernel_gives_the_same_products(counts: list[int]) -> None:
    torch.manual_seed(0)
    x, grad = (torch.randn(sum(counts), size).bfloat16() for size in (32, 64))
    weight = torch.randn(len(counts), 64, 32).bfloat16()
    groups = torch.tensor(counts)
    for product, arguments in ((grouped_linear, (x, weight)), (grouped_outer, (grad, x))):
        exact = product(*(tensor.double() for tensor in arguments), groups)
        out = product(*(tensor.cuda() for tensor in arguments), groups.cuda())
        assert out.dtype == torch.bfloat16
        assert torch.allclose(out.cpu().double(), exact, rtol=1e-2, atol=1e-1)


@needs_cuda
def test_the_gpu_combines_in_float32() -> None:
    torch.manual_seed(0)
    order = Permutation.by_expert(torch.stack([torch.randperm(16)[:8] for _ in range(30)]), experts=16)
    inputs = torch.randn(240, 64).bfloat16(), torch.rand(240)
    grad = torch.randn(30, 64).bfloat16()
    exact_inputs = [tensor.double().requires_grad_() for tensor in inputs]
    weighed = weigh(*exact_inputs)
    exact = combine(weighed + (weighed.bfloat16() - weighed).detach(), order, tokens=30)
    found_inputs = [tensor.cuda().requires_grad_() for tensor in inputs]
    found = combine(weigh(*found_inputs), Permutation(*(tensor.cuda() for tensor in order)), tokens=30)
    assert (found.cpu() == exact.bfloat16()).float().mean() > 0.99
    exact_grads = torch.autograd.grad(exact, exact_inputs, grad.double())
    found_grads = torch.autograd.grad(found, found_inputs, grad.cuda())
    assert torch.equal(found_grads[0].cpu(), exact_grads[0].bfloat16())
    assert torch.allclose(found_grads[1].cpu().double(), exact_grads[1], rtol=1e-4, atol=1e-4)


@needs_cuda
def test_the_kernels_backward_takes_gradients_of_any_layout() -> None:
    counts = torch.tensor([3, 5])
    grads = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        torch.manual_seed(0)
        x, weight = torch.randn(8, 32).bfloat16(), torch.randn(2, 16, 32).bfloat16()
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (x, weight)]
        grads.append(torch.autograd.grad(grouped_linear(*inputs, counts.to(device)).sum(), inputs))
    for exact, found in zip(*grads, strict=True):
        assert torch.allclose(found.cpu().double(), exact, rtol=1e-2, atol=1e-1)


@needs_cuda
def test_the_kernels_gradients_have_gradients() -> None:
    counts = torch.tensor([3, 0, 5])
    seconds = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        torch.manual_seed(0)
        x, weight, grad = (
            torch.randn(8, 32).bfloat16(),
            torch.randn(3, 16, 32).bfloat16(),
            torch.randn(8, 16).bfloat16(),
        )
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (x, weight, grad)]
        out = grouped_linear(inputs[0], inputs[1], counts.to(device))
        firsts = torch.autograd.grad(out, inputs[:2], inputs[2], create_graph=True)
        seconds.append(torch.autograd.grad([first.sum() for first in firsts], inputs))
    for exact, found in zip(*seconds, strict=True):
        assert torch.allclose(found.cpu().double(), exact, rtol=1e-2, atol=1e-1)


@needs_cuda
@pytest.mark.parametrize("index", [-1, 4])
def test_the_gpu_refuses_experts_that_do_not_exist(index: int) -> None:
    program = f"""
import torch
from stretto.moe import RoutedExperts
torch.set_default_device("cuda")
RoutedExperts(4, 8, 8)(torch.ones(3, 8), torch.tensor([[0], [{index}], [3]]), torch.ones(3, 1))
torch.cuda.synchronize()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode != 0
    assert "tokens are routed to experts that do not exist" in ended.stderr


@needs_cuda
def test_experts_never_wait_for_the_device() -> None:
    """From tokens to gradients, without any read on the host."""
    router, experts = Router(32, 8, top_k=2).cuda().bfloat16(), RoutedExperts(8, 32, 64).cuda().bfloat16()
    x = torch.randn(50, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        routing = router(x)
        experts(x, routing.indices_TK, routing.weights_TK).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None
    assert router.weight.grad is not None
