"""Recompute sites: the same gradients, outputs that are not kept, each computed twice and never more."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alive import Alive
from stretto.ir.errors import PipelineError
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.memory_sites import ModuleSite, PartSites
from stretto.pipeline.module_buffers import ModuleBuffers
from stretto.pipeline.pytree import LEAF, Tree
from stretto.pipeline.rng import Generators
from stretto.pipeline.run_parameters import RunParameters
from stretto.pipeline.saving import SavedPass, Saving
from stretto.pipeline.segments import run_segment
from stretto.pipeline.split_backward import Deferral
from stretto.pipeline.weight_gradients import add_together

WIDTH, HIDDEN = 8, 24


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._counts = SimpleNamespace(runs=0)  # a recomputation leaves attributes as they were, but not objects

    @property
    def runs(self) -> int:
        return self._counts.runs  # type: ignore[no-any-return]

    def forward(self, *given: Any) -> Any:
        self._counts.runs += 1
        return self.compute(*given)

    def compute(self, *given: Any) -> Any:
        raise NotImplementedError


class Norm(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def compute(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.scale)


class SwiGLU(Counted):
    def compute(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = Norm(), SwiGLU()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.act(self.gate(y), self.up(y)))

    @property
    def sites(self) -> dict[str, nn.Module]:
        return {"norm": self.norm, "act": self.act}


def twins(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain, ours = make().to(dtype), make().to(dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def saved_pass() -> SavedPass:
    return SavedPass(torch.device("cpu"), 0, (), leaves=False)


def forward(module: nn.Module, sites: dict[str, nn.Module], x: Tensor, closures: list[Any]) -> tuple[Any, Any, Any]:
    modules = {id(site): ModuleSite(name, name, site, "recompute", at) for at, (name, site) in enumerate(sites.items())}
    made = Saving({(0, 0): PartSites("all", "keep", modules)}, Generators(x.device))
    deferral, buffers = Deferral(module, gradients := Gradients()), ModuleBuffers("layer 0", module)
    with (
        deferral.overrides,
        made.overrides,
        deferral.into(closures),
        made.into(saved_pass()),
    ):
        function = partial(made.run, (0, 0), "layer 0", module, buffers=buffers)
        out, segment = run_segment(function, Tree([x], LEAF, [True]), torch.zeros((), requires_grad=True))
    return out.value(), segment, (deferral, made, gradients)


def backward(segment: Any, overriding: Any, grad: Tensor, closures: list[Any]) -> Tensor:
    deferral, made, gradients = overriding
    with (
        deferral.overrides,
        made.overrides,
        deferral.into(closures),
        made.into(saved_pass()),
    ):
        (arrived,) = segment.backward([grad])
    with torch.no_grad():
        add_together([closures])
    gradients.give_out()
    assert arrived is not None
    return arrived  # type: ignore[no-any-return]


def assert_same(ours: nn.Module, plain: nn.Module, sites: dict[str, nn.Module]) -> None:
    x, grad = torch.randn(2, 5, WIDTH).double(), torch.randn(2, 5, WIDTH).double()
    leaf = x.clone().requires_grad_()
    expected = plain(leaf)
    expected.backward(grad)
    closures: list[Any] = []
    out, segment, deferral = forward(ours, sites, x, closures)
    arrived = backward(segment, deferral, grad, closures)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(arrived, leaf.grad, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_gradients_are_those_of_plain_autograd_and_each_site_runs_twice() -> None:
    plain, ours = twins(lambda: nn.Sequential(Block(), Block(), Block()))
    sites = {f"{k}.{name}": site for k, block in enumerate(ours) for name, site in block.sites.items()}
    assert_same(ours, plain, sites)
    assert {site.runs for site in sites.values()} == {2}


def test_what_was_recomputed_is_freed() -> None:
    """The recomputation's own graph must not keep itself alive."""
    block, x, grad = Block(), torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)
    with Alive() as alive:
        closures: list[Any] = []
        out, segment, overriding = forward(block, block.sites, x, closures)
        arrived = backward(segment, overriding, grad, closures)
        del out, segment, overriding, closures
    assert alive.bytes(block, [x, grad, arrived, *(p.grad for p in block.parameters())]) == 0


def test_only_inputs_of_sites_and_of_what_is_no_site_are_kept() -> None:
    block, x = Block(), torch.randn(2, 5, WIDTH)
    with Alive() as alive:
        out, segment, _ = forward(block, block.sites, x, [])
        del out
        rows, anchors = 2 * 5 * 4, 2 * 4
        # Gate, up and the block's input. Without sites there would be the outputs of norm, silu and SwiGLU too.
        assert alive.bytes(but=block) == 2 * rows * HIDDEN + rows * WIDTH + anchors
    assert segment is not None


def test_sites_one_after_the_other_and_within_one_another() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = Norm(), Norm(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.first(x))
            return self.out(y) * y  # type: ignore[no-any-return]

    plain, ours = twins(Chain)
    assert_same(ours, plain, {"first": ours.first, "second": ours.second})
    assert (ours.first.runs, ours.second.runs) == (2, 2)


def test_a_site_may_hold_layers_that_put_their_weight_gradients_off() -> None:
    plain, ours = twins(lambda: nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)))
    assert_same(ours, plain, {"0": ours[0]})


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.transpose(0, 1).tanh().transpose(0, 1) * y,
        lambda y: y[..., 1:].square().sum(-1, keepdim=True) + y,
        lambda y: y.mul_(2).exp(),  # written to after the site: what is saved is kept, not recomputed
        lambda y: y.detach() * y + y.clone().relu_(),
    ],
)
def test_whatever_is_made_of_its_output(use: Callable[[Tensor], Tensor]) -> None:
    class Used(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = Norm(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(use(self.norm(x.tanh())))  # type: ignore[no-any-return]

    plain, ours = twins(Used)
    assert_same(ours, plain, {"norm": ours.norm})


def test_a_site_that_returns_its_input() -> None:
    plain, ours = twins(lambda: nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH), nn.Flatten(2), nn.Tanh()))
    assert_same(ours, plain, {"0": ours[0], "2": ours[2]})


def test_under_autocast_it_is_recomputed_as_it_was() -> None:
    plain, ours = twins(Block, torch.float32)
    x, grad = torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)
    leaf, closures = x.clone().requires_grad_(), list[Any]()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(leaf)
        out, segment, deferral = forward(ours, ours.sites, x, closures)
    expected.backward(grad)
    arrived = backward(segment, deferral, grad, closures)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(arrived, leaf.grad, rtol=0.02, atol=0.02)


def test_an_input_that_is_changed_in_place_is_found_out() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm()

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            y = self.norm(x)
            x.add_(5)
            return y.sin()  # type: ignore[no-any-return]

    module, closures = Changed(), list[Any]()
    _, segment, deferral = forward(module, {"norm": module.norm}, torch.randn(1, WIDTH), closures)
    with pytest.raises(PipelineError, match="a tensor that the backward needs was changed in place"):
        backward(segment, deferral, torch.ones(1, WIDTH), closures)


def test_a_site_may_return_several_tensors() -> None:
    class Two(Counted):
        def compute(self, x: Tensor) -> dict[str, Any]:
            return {"a": x.sin(), "b": (x.exp(), None, 3)}

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two, self.out = Two(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            both = self.two(x)
            return self.out(both["a"]) * both["b"][0] ** 2  # type: ignore[no-any-return]

    plain, ours = twins(Sum)
    assert_same(ours, plain, {"two": ours.two})
    assert ours.two.runs == 2


def test_a_site_that_draws_is_recomputed_with_the_same_numbers() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.out = Drop(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.drop(x)) + torch.rand(WIDTH, dtype=x.dtype)  # type: ignore[no-any-return]

    class Drop(Counted):
        def compute(self, x: Tensor) -> Tensor:
            return F.dropout(x.exp(), 0.4)

    plain, ours = twins(Dropped)
    x, grad = torch.randn(2, 5, WIDTH).double(), torch.randn(2, 5, WIDTH).double()
    leaf, closures = x.clone().requires_grad_(), list[Any]()
    torch.manual_seed(3)
    expected = plain(leaf)
    expected.backward(grad)
    torch.manual_seed(3)
    out, segment, overriding = forward(ours, {"drop": ours.drop}, x, closures)
    torch.manual_seed(4)
    arrived = backward(segment, overriding, grad, closures)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(arrived, leaf.grad, rtol=1e-12, atol=1e-12)
    after = torch.rand(1)
    torch.manual_seed(4)
    assert torch.rand(1) == after  # the recomputation has drawn nothing that others see


@pytest.mark.parametrize("second_order", [False, True])
def test_gradients_within_a_forward_may_pass_through_sites(second_order: bool) -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = Norm(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            at = x.detach().requires_grad_() if not second_order else x
            energy = self.out(self.norm(at)).square().sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=second_order)
            return self.out(self.norm(x)) + force.sin()  # type: ignore[no-any-return]

    plain, ours = twins(Force)
    assert_same(ours, plain, {"norm": ours.norm})


def test_what_cannot_be_recomputed_is_refused() -> None:
    act = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
    with pytest.raises(PipelineError, match="act changes what it is given in place, so it cannot be recomputed"):
        forward(act, {"act": act[1]}, torch.randn(1, WIDTH), [])


def test_running_statistics_are_counted_once() -> None:
    plain, ours = twins(lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(WIDTH, WIDTH)))
    assert_same(ours, plain, {"0": ours[0]})
    for (name, mine), theirs in zip(ours.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def test_state_that_a_site_reads_is_that_of_its_first_run() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.scale = self.scale + 1
            return (x * self.scale).sin()  # type: ignore[no-any-return]

    plain, ours = twins(lambda: nn.Sequential(Moving(), nn.Linear(WIDTH, WIDTH)))
    assert_same(ours, plain, {"0": ours[0]})
    assert ours[0].scale == plain[0].scale == 2


def test_parameters_that_the_first_forward_makes_are_refused() -> None:
    with pytest.raises(PipelineError, match="layer 0 makes its 'weight' in its first forward"):
        RunParameters("layer 0", [nn.LazyLinear(3)])
