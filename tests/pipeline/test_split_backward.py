"""Weight gradients that are put off: right, complete, nothing computed twice, nothing kept that is not needed."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from alive import Alive
from stretto.ir.errors import PipelineError
from stretto.moe.grouped_linear import GroupedLinear
from stretto.pipeline.gradient_buffers import Sum
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.pytree import LEAF, Tree
from stretto.pipeline.segments import Segment, run_segment
from stretto.pipeline.split_backward import Deferral
from stretto.pipeline.weight_gradients import add_together

WIDTH = 16


class Rotary(nn.Module):
    """A decoder block as Hugging Face writes them: separate projections, RMSNorm, SwiGLU, residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class HuggingFace(nn.Module):
    """A decoder layer of transformers, with the rotary embeddings that its model would hand it."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_bias=bias,
            mlp_bias=bias,
            attn_implementation="sdpa",
        )
        self.layer, self.rotary = LlamaDecoderLayer(config, layer_idx=0), LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        turns = self.rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
        return self.layer(x, position_embeddings=turns)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Rows sorted by expert, each expert an MLP; one of them gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = GroupedLinear(3, WIDTH, 32), GroupedLinear(3, 32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        counts = torch.tensor([5, 0, len(flat) - 5])
        return self.down(F.silu(self.up(flat, counts)), counts).view_as(x)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.runs = inner, 0

    def _count(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._count, x, use_reentrant=False)  # type: ignore[no-any-return]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, WIDTH)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True),
    "encoder layer, sequence first": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0),
    "encoder layer without bias": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True, bias=False),
    "decoder block": Rotary,
    "Hugging Face decoder layer": lambda: HuggingFace(bias=False),
    "Hugging Face decoder layer with bias": lambda: HuggingFace(bias=True),
    "experts": Experts,
    "one layer twice": lambda: (lambda it: nn.Sequential(it, nn.Tanh(), it))(nn.Linear(WIDTH, WIDTH)),
}


def split(module: nn.Module, x: Tensor, grad: Tensor, *, differentiable: bool = True) -> tuple[Any, list[Any], Any]:
    """Forward and input part: the output, the closures that are owed, and the input's gradient."""
    deferral = Deferral(module, gradients := Gradients())
    closures: list[Any] = []
    with deferral.overrides, deferral.into(closures):
        anchor = torch.zeros((), requires_grad=True)
        out, segment = run_segment(module, tree(x, differentiable=differentiable), anchor)
        (arrived,) = segment.backward([grad])
    closures.append(gradients.give_out)
    return out.value(), closures, arrived


def tree(x: Tensor, *, differentiable: bool = True) -> Tree:
    return Tree([x], LEAF, [differentiable])


def settle(closures: list[Any]) -> None:
    with torch.no_grad():
        add_together([closures[:-1]])
        closures[-1]()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_gradients_are_those_of_plain_autograd(name: str) -> None:
    torch.manual_seed(0)
    plain, ours = (MODULES[name]().double() for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    x, grad = torch.randn(3, 4, WIDTH).double(), torch.randn(3, 4, WIDTH).double()
    leaf = x.clone().requires_grad_()
    expected = plain(leaf)
    expected.backward(grad)
    out, closures, arrived = split(ours, x, grad)
    late = [p for p in ours.parameters() if p.grad is None]
    assert late
    settle(closures)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(arrived, leaf.grad, rtol=1e-12, atol=1e-12)
    for (key, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=key)
        assert not p.grad.requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize("padding", [None, 3])
def test_embeddings(padding: int | None) -> None:
    plain, ours = (nn.Embedding(10, WIDTH, padding_idx=padding).double() for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    rows, grad = torch.randint(10, (4, 5)), torch.randn(4, 5, WIDTH).double()
    plain(rows).backward(grad)
    _, closures, _ = split(ours, rows, grad, differentiable=False)
    assert ours.weight.grad is None
    settle(closures)
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


def test_the_first_layer_of_the_first_stage_splits_too() -> None:
    module, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    _, closures, arrived = split(module, x, torch.ones(2, WIDTH), differentiable=False)
    assert arrived is None
    assert module.weight.grad is None
    settle(closures)
    torch.testing.assert_close(module.weight.grad, torch.ones(2, WIDTH).T @ x)


@pytest.mark.parametrize("name", ["mlp", "encoder layer", "decoder block", "Hugging Face decoder layer", "experts"])
def test_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    plain, ours = (MODULES[name]() for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    x, grad = torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(leaf)
        deferral, closures = Deferral(ours, gradients := Gradients()), list[Any]()
        with deferral.overrides:
            out = (made := run_segment(ours, tree(x), torch.zeros((), requires_grad=True)))[0].value()
            segment = made[1]
    assert out.dtype == expected.dtype
    expected.backward(grad.to(expected.dtype))
    with deferral.into(closures):
        (arrived,) = segment.backward([grad.to(out.dtype)])
    settle([*closures, gradients.give_out])
    torch.testing.assert_close(arrived, leaf.grad, rtol=0.02, atol=0.02)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.03, atol=0.06)


def test_other_parameters_get_their_gradients_in_the_backward() -> None:
    module = MODULES["mlp"]()
    _, closures, _ = split(module, torch.randn(2, WIDTH), torch.ones(2, WIDTH))
    assert {name for name, p in module.named_parameters() if p.grad is not None} == {"2.weight", "2.bias"}
    settle(closures)
    assert all(p.grad is not None for p in module.parameters())


def test_attention_that_is_asked_for_its_weights_runs_as_ever() -> None:
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    deferral = Deferral(attention, Gradients())
    x = torch.randn(2, 3, WIDTH)
    expected = attention(x, x, x)
    with deferral.overrides, deferral.into([]):
        out, weights = attention(x, x, x)
    torch.testing.assert_close(out, expected[0])
    assert weights.shape == (2, 3, 3)


@pytest.mark.parametrize("masks", [("attn_mask",), ("key_padding_mask",), ("attn_mask", "key_padding_mask")])
def test_attention_with_masks(masks: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()
    x, y = torch.randn(2, 3, WIDTH).double(), torch.randn(2, 4, WIDTH).double()
    made = {
        "attn_mask": torch.rand(3, 4) > 0.7,
        "key_padding_mask": torch.tensor([[False] * 4, [False] * 2 + [True] * 2]),
    }
    given = {name: made[name] for name in masks}
    expected = attention(x, y, y, need_weights=False, **given)[0]
    deferral = Deferral(attention, Gradients())
    with deferral.overrides, deferral.into([]):
        out = attention(x, y, y, need_weights=False, **given)[0]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


class Matmuls(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).split(".")[1]
        if name in ("mm", "addmm", "bmm"):
            self.count["matmul"] += 1
        return function(*args, **(kwargs or {}))


def test_no_matrix_product_is_done_twice() -> None:
    plain, ours = MODULES["mlp"](), MODULES["mlp"]()
    x, grad = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with Matmuls() as usual:
        plain(x.clone().requires_grad_()).backward(grad)
    with Matmuls() as forward_and_input:
        _, closures, _ = split(ours, x, grad)
    with Matmuls() as weight:
        settle(closures)
    assert (forward_and_input.count["matmul"], weight.count["matmul"]) == (4, 2)
    assert usual.count["matmul"] == 6


def test_a_checkpointed_block_is_recomputed_once() -> None:
    module = nn.Sequential(*(Checkpointed(MODULES["mlp"]()) for _ in range(3)))
    _, closures, _ = split(module, torch.randn(2, WIDTH), torch.ones(2, WIDTH))
    settle(closures)
    assert [block.runs for block in module] == [2, 2, 2]
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("name", ["mlp", "decoder block"])
def test_after_the_input_part_only_inputs_and_output_gradients_of_layers_live(name: str) -> None:
    module, x = MODULES[name](), torch.randn(3, 4, WIDTH)
    given = {x.untyped_storage().data_ptr(): x.nbytes}  # this test itself holds the input
    grads = 0

    def look(_: nn.Module, inputs: Any, out: Tensor) -> None:
        nonlocal grads
        storage = inputs[0].untyped_storage()
        kept.append(inputs[0])
        given[storage.data_ptr()] = storage.nbytes()
        grads += out.numel() * out.element_size()

    kept: list[Tensor] = []
    hooks = [layer.register_forward_hook(look) for layer in module.modules() if isinstance(layer, nn.Linear)]
    module(x)
    for hook in hooks:
        hook.remove()
    with Alive() as alive:
        out, closures, arrived = split(module, x, torch.ones(3, 4, WIDTH))
        del out, arrived
    done = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    assert alive.bytes(but=module) == sum(given.values()) + grads + done
    settle(closures)
    del closures
    assert alive.bytes(but=module) <= sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["mlp", "encoder layer", "decoder block", "Hugging Face decoder layer", "experts"])
def test_less_is_held_after_the_input_part_than_by_pytorch(name: str) -> None:
    ours, theirs = MODULES[name](), MODULES[name]()
    x, grad = torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)
    with Alive() as alive:
        held = split(ours, x, grad)[1]
    with Alive() as other:
        leaf = x.clone().requires_grad_()
        out = theirs(leaf).clone()  # PyTorch's cannot take a view
        groups = stage_backward_input([out], [grad], [leaf], theirs.parameters())[1]
        del out, leaf

    def early(module: nn.Module) -> int:
        return sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)

    mine, their = alive.bytes(but=ours) - early(ours), other.bytes(but=theirs) - early(theirs)
    assert held
    assert groups
    assert 0 < mine < their


def test_segments_keep_no_tensor_alive() -> None:
    with Alive() as alive:
        x = torch.randn(4, WIDTH)
        out, segment = run_segment(lambda x: x + 1, tree(x), torch.zeros((), requires_grad=True))
        assert isinstance(segment, Segment)
        before = alive.bytes()
        del x, out
        assert before - alive.bytes() == 2 * 4 * WIDTH * 4
    (arrived,) = segment.backward([torch.ones(4, WIDTH)])
    torch.testing.assert_close(arrived, torch.ones(4, WIDTH))


def test_a_segment_keeps_its_graph_though_its_output_is_gone() -> None:
    """An output made by a function written in Python owns its node; the segment must outlive it."""
    layer = nn.Linear(WIDTH, WIDTH)
    deferral, closures = Deferral(layer, Gradients()), list[Any]()
    with deferral.overrides, deferral.into(closures):
        segment = run_segment(layer, tree(torch.randn(2, WIDTH)), torch.zeros((), requires_grad=True))[1]
        gc.collect()
        (arrived,) = segment.backward([torch.ones(2, WIDTH)])
    torch.testing.assert_close(arrived, torch.ones(2, WIDTH) @ layer.weight.detach())


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def of_microbatches(module: nn.Module, xs: list[Tensor], grads: list[Tensor]) -> tuple[list[list[Any]], Gradients]:
    """What several backwards owe."""
    deferral = Deferral(module, gradients := Gradients())
    gradients.begin({0: list(module.parameters())})
    owed: list[list[Any]] = [[] for _ in xs]
    for x, grad, into in zip(xs, grads, owed, strict=True):
        with deferral.overrides, deferral.into(into):
            _, segment = run_segment(module, tree(x), torch.zeros((), requires_grad=True))
            segment.backward([grad])
        gradients.collect(list(module.parameters()))
    return owed, gradients


@pytest.mark.parametrize("name", sorted(MODULES))
def test_several_microbatches_at_once(name: str) -> None:
    torch.manual_seed(0)
    plain, ours = (MODULES[name]().double() for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    xs = [torch.randn(rows, 4, WIDTH).double() for rows in ((3, 3, 3) if name == "experts" else (3, 1, 2))]
    grads = [torch.randn_like(x) for x in xs]
    for x, grad in zip(xs, grads, strict=True):
        plain(x.clone().requires_grad_()).backward(grad)
    owed, gradients = of_microbatches(ours, xs, grads)
    linear = [it for it in owed[0] if it.key is not None]
    others = sum(it.key is None for of in owed for it in of)
    with torch.no_grad(), Products() as products:
        add_together(owed)
    if not others and name != "one layer twice":
        assert products.count == len(linear)
    assert owed == []
    gradients.give_out()
    for (key, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=key)


def test_float16_is_not_joined() -> None:
    """Each microbatch's product fits into it, and all of them together do not."""
    module = nn.Linear(4, 4, bias=False)
    xs, grads = [torch.full((2, 4), 128.0) for _ in range(4)], [torch.full((2, 4), 100.0) for _ in range(4)]
    with torch.autocast("cpu", torch.float16):
        owed, gradients = of_microbatches(module, xs, [grad.half() for grad in grads])
    with torch.no_grad():
        add_together(owed)
    gradients.give_out()
    assert module.weight.grad is not None
    assert (module.weight.grad == 4 * 2 * 128 * 100).all()


def test_a_tensor_that_changes_while_it_waits_for_others_is_noticed() -> None:
    module, xs = nn.Linear(WIDTH, WIDTH), [torch.randn(2, WIDTH) for _ in range(2)]
    owed, _ = of_microbatches(module, xs, [torch.ones(2, WIDTH) for _ in range(2)])
    xs[0].zero_()
    with torch.no_grad(), pytest.raises(PipelineError, match="changed in place"):
        add_together(owed)


def test_what_is_joined_is_let_go_of_layer_by_layer() -> None:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    owed, _ = of_microbatches(module, [torch.randn(2, WIDTH) for _ in range(2)], [torch.ones(2, WIDTH)] * 2)
    kept = [weakref.ref(it.given) for of in owed for it in of]
    left: list[int] = []
    usual = Sum.add_product

    def add_product(sum_: Any, *given: Any) -> None:
        left.append(sum(it() is not None for it in kept))
        usual(sum_, *given)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sum, "add_product", add_product)
        add_together(owed)
    assert left == [4, 2, 0]
