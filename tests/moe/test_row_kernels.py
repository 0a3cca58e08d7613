"""The GPU's kernels that move and sum rows give what plain operations give.

Where there is no GPU, they run in Triton's interpreter, if Triton is installed. It cuts bits off where it should round
to bfloat16, so bfloat16 is tested on GPUs only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.moe import all_to_all, permutation, weighting
from stretto.moe.kernels import has_kernels
from stretto.moe.permutation import Permutation, combine, dispatch
from stretto.moe.weighting import weigh

pytest.importorskip("triton")

from stretto.moe import row_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]

needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


class Case(NamedTuple):
    """Whole numbers whose products and sums are exact in float32, but not in half precision."""

    rows_RD: Tensor
    weights_R: Tensor
    grad_RD: Tensor
    order: Permutation
    tokens: int
    contiguous: bool

    def on_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        tensor = tensor.to(DEVICE, dtype)
        return tensor if self.contiguous else torch.stack([tensor, tensor], -1)[..., 0]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens, chosen = draw(st.integers(0, 4)), draw(st.sampled_from([1, 2, 3, 8, 9, 17]))
    features = draw(st.sampled_from([1, 5, 64, 1024, 1025, 2100]))
    torch.manual_seed(draw(st.integers(0, 999)))
    indices_TK = torch.rand(tokens, chosen + 2).argsort(1)[:, :chosen]
    return Case(
        rows_RD=torch.randint(-200, 201, (tokens * chosen, features)).double(),
        weights_R=torch.randint(0, 64, (tokens * chosen,)).double() / 8,
        grad_RD=torch.randint(-3, 4, (tokens * chosen, features)).double(),
        order=Permutation.by_expert(indices_TK, experts=chosen + 2),
        tokens=tokens,
        contiguous=draw(st.booleans()),
    )


dtypes = st.sampled_from(DTYPES)


@settings(max_examples=60)
@given(cases(), dtypes, dtypes)
def test_sums_are_rounded_once(case: Case, of_rows: Any, of_out: Any) -> None:
    rows, target_R = case.on_device(case.rows_RD, of_rows), case.order.target_R.to(DEVICE)
    out = row_kernels.gather_sum(rows, target_R, tokens=case.tokens, dtype=of_out)
    expected = combine(case.rows_RD, case.order, tokens=case.tokens)
    assert torch.equal(out.cpu(), expected.to(of_out))


@pytest.mark.parametrize("chosen", [2, 8, 19])
def test_a_tokens_experts_are_summed_in_their_order(chosen: int) -> None:
    torch.manual_seed(chosen)
    order = Permutation.by_expert(torch.rand(5, chosen).argsort(1), experts=chosen)
    rows = torch.randn(5 * chosen, 7)
    out = row_kernels.gather_sum(rows.to(DEVICE), order.target_R.to(DEVICE), tokens=5, dtype=rows.dtype)
    expected = torch.zeros(5, 7)
    for k in range(chosen):
        expected += rows[order.target_R.view(5, chosen)[:, k]]
    assert torch.equal(out.cpu(), expected)


@settings(max_examples=60)
@given(cases(), dtypes, dtypes, dtypes, st.tuples(st.booleans(), st.booleans()))
def test_gradients_of_rows_and_weights_are_rounded_once(
    case: Case, of_grad: Any, of_rows: Any, of_weights: Any, needs: tuple[bool, bool]
) -> None:
    small = (case.rows_RD % 5).requires_grad_()  # so that products are below the largest float16
    exact_weights = case.weights_R.clone().requires_grad_()
    expected = torch.autograd.grad(weigh(small, exact_weights), (small, exact_weights), case.grad_RD)
    grad, rows, weights = (
        case.on_device(tensor.detach(), dtype)
        for tensor, dtype in ((case.grad_RD, of_grad), (small, of_rows), (exact_weights, of_weights))
    )
    found = row_kernels.weigh_backward(grad, rows, weights, needs=needs)
    for one, other, needed, dtype in zip(found, expected, needs, (of_rows, of_weights), strict=True):
        assert one is None if not needed else torch.equal(one.cpu(), other.to(dtype))


def test_gradients_of_weights_do_not_depend_on_where_rows_lie() -> None:
    torch.manual_seed(0)
    rows, grad, weights = torch.randn(6, 1000), torch.randn(6, 1000), torch.rand(6, device=DEVICE)
    found = []
    for offset in (0, 1):
        parts = [torch.empty(part.numel() + offset, device=DEVICE)[offset:].view_as(part) for part in (grad, rows)]
        inputs = [part.copy_(numbers) for part, numbers in zip(parts, (grad, rows), strict=True)]
        _, weights_grad = row_kernels.weigh_backward(*inputs, weights, needs=(False, True))
        assert weights_grad is not None
        found.append(weights_grad)
    assert found[0].any()
    assert torch.equal(*found)


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 4, 1500]), st.integers(0, 99))
def test_blocks_change_places_as_with_plain_operations(ranks: int, experts: int, most: int, seed: int) -> None:
    torch.manual_seed(seed)
    counts_ne = torch.randint(0, most + 1, (ranks, 1 + experts))[:, 1:]
    rows = int(counts_ne.sum())
    expected = all_to_all._transposed(counts_ne, rows=rows)
    source_R, target_R = row_kernels.transpose(_sliced(counts_ne.to(DEVICE)), rows=rows)
    assert torch.equal(source_R.cpu(), expected.source_R)
    assert torch.equal(target_R.cpu(), expected.target_R)


def _sliced(counts_ne: Tensor) -> Tensor:
    """The same numbers in a wider tensor."""
    return torch.cat([counts_ne[:, :1] + 7, counts_ne], dim=1)[:, 1:]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels have run. They run on CPUs too."""
    names: list[str] = []
    has_kernels(torch.ones(1, device=DEVICE))  # which tries a kernel

    def noting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: (names.append(name), run(*given, **named))[1]

    for name in ("gather_sum", "weigh_backward"):
        monkeypatch.setattr(row_kernels, name, noting(name, getattr(row_kernels, name)))
    if DEVICE.type == "cpu":
        for module in (permutation, weighting):
            monkeypatch.setattr(module, "has_kernels", lambda x, *_, **__: x.dtype != torch.float64)
    return names


def _there_and_back(dtype: torch.dtype, *, create_graph: bool) -> list[Tensor]:
    torch.manual_seed(0)
    indices_TK = torch.rand(6, 5).argsort(1)[:, :3]
    order = Permutation(*(one.to(DEVICE) for one in Permutation.by_expert(indices_TK, experts=5)))
    values = torch.randn(6, 40), torch.rand(18), torch.randn(6, 40)
    x, weights, grad = (value.to(DEVICE, dtype).requires_grad_() for value in values)
    out = combine(weigh(dispatch(x, order).sin(), weights), order, tokens=6)
    grads = torch.autograd.grad(out, (x, weights), grad, create_graph=create_graph)
    if create_graph:
        grads += torch.autograd.grad([one.square().sum() for one in grads], (x, weights, grad))
    return [out, *grads]


@pytest.mark.parametrize("create_graph", [False, True])
def test_rows_go_through_the_kernels(ran: list[str], create_graph: bool) -> None:
    expected = _there_and_back(torch.float64, create_graph=create_graph)
    assert ran == []
    found = _there_and_back(torch.float32, create_graph=create_graph)
    # to combine, then back to weigh and to dispatch; with create_graph, autograd must know how gradients are weighed
    first = ["gather_sum", *([] if create_graph else ["weigh_backward"]), "gather_sum"]
    assert ran[: len(first)] == first
    assert len(ran) > len(first) if create_graph else len(ran) == len(first)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-5)


def test_kernels_run_on_plain_tensors_on_gpus() -> None:
    assert not has_kernels(torch.ones(1))
    if DEVICE.type == "cuda":
        x = torch.ones(1, device=DEVICE)
        assert has_kernels(x, x.bfloat16(), x.half(), x.long(), dtype=torch.bfloat16)
        assert not has_kernels(x, x.double())
        assert not has_kernels(x, x.cfloat())
        assert not has_kernels(x, dtype=torch.float64)


@needs_cuda
def test_rows_may_have_more_elements_than_32_bits_count() -> None:
    rows, features = (1 << 21) + 1, 1024
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB")
    x = torch.zeros(rows, features, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.arange(features)
    order = torch.arange(rows, device="cuda")
    weights = torch.full((rows,), 2.0, device="cuda")
    out = row_kernels.gather_sum(x, order, tokens=rows, dtype=x.dtype)
    assert torch.equal(out[-1], x[-1])
    assert not out[:-1].any()
    del out
    rows_grad, weights_grad = row_kernels.weigh_backward(x, x, weights, needs=(True, True))
    assert rows_grad is not None
    assert weights_grad is not None
    assert torch.equal(rows_grad[-1], 2 * x[-1])
    assert float(weights_grad[-1]) == pytest.approx(float(x[-1].double().square().sum()))
    assert not rows_grad[:-1].any()
    assert not weights_grad[:-1].any()


@pytest.mark.parametrize("count", [0, 1, 1024, 3000])
def test_numbers_are_copied_to_pinned_memory(count: int) -> None:
    numbers = torch.arange(3 * count, device=DEVICE).view(3, count).T + 2**40  # not contiguous
    host = torch.zeros(count, 3, dtype=torch.int64, pin_memory=DEVICE.type == "cuda")
    row_kernels.copy_to(host, numbers)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host, numbers.cpu())


@needs_cuda
def test_numbers_do_not_wait_for_large_copies() -> None:
    """A copy of a second, in another stream, is not over when the numbers have arrived."""
    large, pinned = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE), torch.empty(4 << 30, dtype=torch.uint8)
    pinned, numbers = pinned.pin_memory(), torch.arange(8, device=DEVICE)
    host = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    row_kernels.copy_to(host, numbers)  # compiles
    torch.cuda.synchronize()
    away, copied = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(away):
        for _ in range(10):
            pinned.copy_(large, non_blocking=True)
        copied.record()
    row_kernels.copy_to(host, numbers)
    torch.cuda.current_stream().synchronize()
    assert not copied.query()
    assert host.tolist() == list(range(8))
    torch.cuda.synchronize()
