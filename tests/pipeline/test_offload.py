"""Saved tensors that leave for host memory and come back: to the bit, each memory once, and really gone meanwhile."""

import copy
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from stretto.ir.errors import PipelineError
from stretto.memory import ACTIONS, Action, Memory
from stretto.pipeline.host_pool import HostPool, _container_bytes
from stretto.pipeline.memory_sites import Decisions, PartSites, find_sites, not_found, unknown, unused
from stretto.pipeline.module_buffers import ModuleBuffers
from stretto.pipeline.offload import Away, packed_bytes, within
from stretto.pipeline.pytree import storage_of
from stretto.pipeline.rng import Generators
from stretto.pipeline.saving import SavedPass, Saving

WIDTH = 6
CPU = torch.device("cpu")


class Mlp(nn.Module):
    """Something of everything: views, a tensor that is saved twice, an output that is saved, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        y = F.dropout(torch.sigmoid(gate) * up, 0.3)
        return x + self.down(y) * self.scale + x.transpose(0, 1).sigmoid().transpose(0, 1) * x


class Pass:
    """One forward and backward of a module by a policy, in one process."""

    def __init__(self, module: nn.Module, policy: Memory, *, seed: int = 0) -> None:
        self.module, self.seed = module, seed
        self.sites = find_sites(Decisions(policy), {0: module}, in_phases=False)
        self.saving = Saving(self.sites, Generators(CPU))
        held = {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self.saved = SavedPass(CPU, 0, held, leaves=True)
        assert self.saved.away is not None
        self.away = self.saved.away
        self._function = partial(self.saving.run, (0, 0), "layer 0", module, buffers=ModuleBuffers("layer 0", module))

    def forward(self, x: Tensor, *, overriding: bool = True) -> Tensor:
        torch.manual_seed(self.seed)
        with self.saving.overrides if overriding else nullcontext(), self.saving.into(self.saved):
            return self._function(value=x)  # type: ignore[no-any-return]

    def leave(self) -> None:
        chosen = self.away.candidates()
        self.away.leave(chosen, torch.empty(packed_bytes(chosen), dtype=torch.uint8))
        self.away.release()

    def come_back(self) -> None:
        self.away.come_back(partial(torch.empty, dtype=torch.uint8))

    def backward(self, out: Tensor, grad: Tensor, *, overriding: bool = True) -> None:
        with (
            self.saving.overrides if overriding else nullcontext(),
            self.saving.into(SavedPass(CPU, 0, (), leaves=False)),
        ):
            out.backward(grad)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    for tensor in (x, *module.parameters()):
        tensor.grad = None
    assert all(grad is not None for grad in found)
    return found  # type: ignore[return-value]


def plain(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    out = module(x)
    out.backward(grad)
    return out.detach(), gradients(module, x)


POLICIES: list[dict[str, Action]] = [
    {"*": "offload"},
    {"*": "recompute"},
    {"*": "recompute+offload"},
    {"*.norm": "recompute", "*": "offload"},
    {"*.up": "keep", "*": "recompute"},
    {"*.up": "offload", "*": "recompute"},
    {"*.norm": "recompute+offload"},
    {"*.down": "keep", "*": "offload"},
]


@pytest.mark.parametrize("sites", POLICIES, ids=str)
@pytest.mark.parametrize("makes", [Mlp, lambda: nn.Sequential(Mlp(), nn.Dropout(0.4), Mlp())])
def test_gradients_are_to_the_bit_those_without_a_policy(sites: dict[str, Action], makes: Any) -> None:
    module = makes()
    x, grad = torch.randn(3, 3, WIDTH, requires_grad=True), torch.randn(3, 3, WIDTH)
    expected, expected_grads = plain(module, x, grad)
    one = Pass(module, Memory(sites=sites))
    out = one.forward(x)
    assert torch.equal(out, expected)
    one.leave()
    one.come_back()
    one.backward(out, grad)
    for ours, theirs in zip(gradients(module, x), expected_grads, strict=True):
        assert torch.equal(ours, theirs)


def storages_saved(one: Pass, x: Tensor) -> tuple[Tensor, dict[int, Any], int]:
    """The output, the storages of all saved tensors but parameters, and how many tensors were saved."""
    found: dict[int, Any] = {}
    count = [0]

    def note(what: str, _label: str, saved: Tensor, *_: Any) -> None:
        if what == "offload":
            count[0] += 1
            storage: Any = saved.untyped_storage()
            found[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    one.saving.noted = note
    out = one.forward(x)
    return out, found, count[0]


def test_each_memory_leaves_once_however_many_tensors_view_it_and_is_gone() -> None:
    module, x = Mlp(), torch.randn(3, 3, WIDTH)
    one = Pass(module, Memory(sites={"*": "offload"}))
    x.requires_grad_()
    out, storages, count = storages_saved(one, x.clone())  # the clone is held by nobody else
    candidates = one.away.candidates()
    assert len(candidates) == len(storages) < count
    del candidates
    one.leave()
    gc.collect()
    alive = [key for key, reference in storages.items() if not reference.expired() and key != storage_of(out)]
    assert alive == []
    one.come_back()
    one.backward(out, torch.ones_like(out))


def test_parameters_and_buffers_and_what_others_hold_stay() -> None:
    module, x = Mlp(), torch.randn(3, 3, WIDTH, requires_grad=True)
    one = Pass(module, Memory(sites={"*": "offload"}))
    one.saved.hold([x])
    _, storages, _ = storages_saved(one, x)
    own = {storage_of(tensor) for tensor in (x, *module.parameters(), *module.buffers())}
    assert storages
    assert not own & storages.keys()


class Writes(nn.Module):
    """Changes in place what the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        self.kept = y
        return y * 2


def test_what_was_changed_before_it_left_is_refused_as_autograd_does() -> None:
    module, x = Writes(), torch.randn(3, WIDTH, requires_grad=True)
    for leaves in (False, True):
        one = Pass(module, Memory(sites={"*": "offload"}))
        out = one.forward(x)
        with torch.no_grad():
            module.kept.add_(1)
        if leaves:
            one.leave()
            one.come_back()
        with pytest.raises(PipelineError, match="a tensor that the backward needs was changed in place"):
            one.backward(out, torch.ones_like(out))


class Scratch(torch.autograd.Function):
    """A square whose backward computes in the memory of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(grad)  # type: ignore[no-any-return]


class Scratching(nn.Module):
    """The backward of the sine runs after that of the square, and needs the same tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        return h.sin() + Scratch.apply(h)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("action", ["keep", "offload", "recompute", "fp8", "fp8+offload"])
def test_what_a_backward_changes_that_another_needs_is_refused(action: Action) -> None:
    x = torch.randn(3, 128, dtype=torch.bfloat16).requires_grad_()
    one = Pass(Scratching(), Memory(sites={"*": action}))
    out = one.forward(x)
    one.leave()
    one.come_back()
    refuses = pytest.raises((PipelineError, RuntimeError), match=r"changed in place|modified by an inplace")
    with nullcontext() if "fp8" in action else refuses:
        one.backward(out, torch.ones_like(out))
    if "fp8" in action:  # the sine gets numbers that are unpacked anew
        assert x.grad is not None
        h = 2 * x.detach().double()
        expected = 2 * (h.cos() + 2 * h)
        assert (x.grad - expected).norm() < 0.1 * expected.norm()


def test_what_becomes_small_in_float8_leaves() -> None:
    """`min_bytes` is about the tensor as it is: 768 bytes, and 396 in float8."""
    one = Pass(Scratching(), Memory(sites={"*": "fp8+offload"}))
    one.saved._min_bytes = 600
    out = one.forward(torch.randn(3, 128, dtype=torch.bfloat16).requires_grad_())
    assert out.requires_grad  # it keeps what was saved
    assert [stored.nbytes for stored in one.away.candidates()] == [396]


def test_what_was_changed_while_it_was_copied_is_refused() -> None:
    module, x = Writes(), torch.randn(3, WIDTH, requires_grad=True)
    one = Pass(module, Memory(sites={"*": "offload"}))
    out = one.forward(x)
    chosen = one.away.candidates()
    one.away.leave(chosen, torch.empty(packed_bytes(chosen), dtype=torch.uint8))
    with torch.no_grad():
        module.kept.add_(1)
    one.away.release()
    one.come_back()
    with pytest.raises(PipelineError, match="a tensor that the backward needs was changed in place"):
        one.backward(out, torch.ones_like(out))


def test_what_is_changed_after_it_left_does_no_harm() -> None:
    module, x = Writes(), torch.randn(3, WIDTH, requires_grad=True)
    grad = torch.ones(3, WIDTH)
    _, expected = plain(module, x, grad)
    one = Pass(module, Memory(sites={"*": "offload"}))
    out = one.forward(x)
    one.leave()
    with torch.no_grad():
        module.kept.add_(1)
    one.come_back()
    one.backward(out, grad)
    for ours, theirs in zip(gradients(module, x), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_copies_back_come_after_all_memory_for_them_was_made() -> None:
    module, x = Mlp(), torch.randn(3, WIDTH, requires_grad=True)
    one = Pass(module, Memory(sites={"*": "offload"}))
    out = one.forward(x)
    one.leave()
    made: list[Tensor] = []

    def empty(nbytes: int) -> Tensor:
        made.append(torch.zeros(nbytes, dtype=torch.uint8))
        return made[-1]

    def ready() -> None:
        assert made
        assert not any(memory.any() for memory in made)

    one.away.come_back(empty, ready)
    assert any(memory.any() for memory in made)
    one.backward(out, torch.ones_like(out))


def test_what_the_graph_has_let_go_of_does_not_leave() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(y.exp().sum(), y)
            return x * slope

    x = torch.randn(3, WIDTH, requires_grad=True)
    one = Pass(Inside(), Memory(sites={"*": "offload"}))
    out = one.forward(x)
    assert len(one.away.candidates()) == 1  # the slope
    one.leave()
    one.come_back()
    one.backward(out, torch.ones_like(out))
    assert torch.equal(x.grad, x.detach().exp())  # type: ignore[arg-type]


class Counted(nn.Module):
    """Runs a module and counts how often."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._counts = SimpleNamespace(runs=0)  # a recomputation leaves attributes as they were, but not objects

    @property
    def runs(self) -> int:
        return self._counts.runs  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        self._counts.runs += 1
        return self.inner(x)  # type: ignore[no-any-return]


def test_what_is_kept_within_something_recomputed_is_not_run_again() -> None:
    first, second = Counted(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))), Counted(nn.Dropout(0.5))
    module = nn.Sequential(nn.Tanh(), first, second, nn.Tanh())
    x, grad = torch.randn(4, WIDTH, requires_grad=True), torch.randn(4, WIDTH)
    expected, expected_grads = plain(module, x, grad)
    for action in ("keep", "offload"):
        first._counts.runs = 0
        second._counts.runs = 0
        one = Pass(module, Memory(sites={"0.1": action, "*": "recompute"}))  # type: ignore[dict-item]
        out = one.forward(x)
        assert torch.equal(out, expected)
        one.leave()
        one.come_back()
        one.backward(out, grad)
        assert (first.runs, second.runs) == (1, 2)
        for ours, theirs in zip(gradients(module, x), expected_grads, strict=True):
            assert torch.equal(ours, theirs)


def test_a_recomputation_ends_once_it_has_made_what_is_needed() -> None:
    last = Counted(nn.Identity())
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), last)
    x = torch.randn(4, WIDTH, requires_grad=True)
    one = Pass(module, Memory(sites={"*": "recompute"}))
    one.backward(one.forward(x), torch.ones(4, WIDTH))
    assert last.runs == 1


# Odd modules: exact, or refused in words.


class Around(nn.Module):
    """A layer around a module `inner`, which is kept while the layer is recomputed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.run(torch.tanh(self.before(x)))))  # type: ignore[no-any-return]

    def run(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Checkpointing(Around):
    def run(self, x: Tensor) -> Tensor:
        return checkpoint(self._inside, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _inside(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(torch.sigmoid(x)))


class WithoutGradients(Around):
    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = self.inner(x)
        return self.inner(x) * first


class Differentiating(Around):
    def run(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(y).square().sum(), y)
        return self.inner(x) * slope


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class WritingInput(Around):
    def run(self, x: Tensor) -> Tensor:
        y = x * 1
        self.inner(y)
        return y


class Remembers(nn.Module):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach() * 2
        return x * 3


class ReadsWhatWasRemembered(Around):
    def run(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.last


class Boxed(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(x=torch.exp(x))


class Opening(Around):
    def run(self, x: Tensor) -> Tensor:
        return self.inner(x).x  # type: ignore[no-any-return]


class Appends(nn.Module):
    """Appends to a list that it is given, or to one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log = [torch.ones(())]

    def forward(self, x: Tensor, log: list[Tensor] | None = None) -> Tensor:
        (self.log if log is None else log).append(x.detach().mean() + 2)
        return torch.exp(x)


class GivesList(Around):
    def run(self, x: Tensor) -> Tensor:
        log: list[Tensor] = []
        y = self.inner(x, log)
        return y * (log[0] if log else 1)  # type: ignore[no-any-return]


class ReadsList(Around):
    def run(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.log[-1]


class SetsOfParent(nn.Module):
    parent: tuple["ReadsOwn"]

    def forward(self, x: Tensor) -> Tensor:
        self.parent[0].scale = float(x.detach().mean()) + 2
        return torch.exp(x)


class ReadsOwn(Around):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__(SetsOfParent())
        self.inner.parent = (self,)  # type: ignore[assignment]

    def run(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale  # type: ignore[no-any-return]


class DrawsToo(Around):
    """Draws from the generator of the module within it."""

    def run(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.rand(x.shape, generator=self.inner.generator)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Settings:
    scale: float
    shape: torch.Size
    steps: range = range(2)


class TakesConstants(nn.Module):
    def forward(self, x: Tensor, settings: Settings, act: Any) -> Tensor:
        return act(x) * settings.scale  # type: ignore[no-any-return]


class GivesConstants(Around):
    def run(self, x: Tensor) -> Tensor:
        return self.inner(x, Settings(2.0, x.shape), act=torch.exp)  # type: ignore[no-any-return]


class SetsItsContext(nn.Module):
    def forward(self, x: Tensor, context: "Context") -> Tensor:
        context.scale = 3.0
        return torch.exp(x)


class ReadsItsContext(Around):
    def run(self, x: Tensor) -> Tensor:
        context = Context()
        y = self.inner(x, context)
        return y * context.scale  # type: ignore[no-any-return]


KEPT: dict[str, tuple[Any, str]] = {
    "a checkpoint of the user's": (lambda: Checkpointing(nn.Linear(WIDTH, WIDTH)), ""),
    "without gradients first": (lambda: WithoutGradients(nn.Linear(WIDTH, WIDTH)), ""),
    "differentiated within": (
        lambda: Differentiating(nn.Linear(WIDTH, WIDTH)),
        "layer 0 cannot be recomputed without a module within it (",
    ),
    "in place": (
        lambda: WritingInput(InPlace()),
        "0.inner changes what it is given in place, so layer 0 cannot be recomputed without it",
    ),
    "an attribute that is set": (
        lambda: ReadsWhatWasRemembered(Remembers()),
        "0.inner changes 'last' when it runs, which layer 0 may read when it is recomputed; recompute 0.inner with it",
    ),
    "a box": (
        lambda: Opening(Boxed()),
        "a module within layer 0 is not recomputed with it, and returns a types.SimpleNamespace, which may have",
    ),
    "a list that it is given": (
        lambda: GivesList(Appends()),
        "0.inner changes what it is given in place, so layer 0 cannot be recomputed without it",
    ),
    "a list of its own": (
        lambda: ReadsList(Appends()),
        "0.inner changes 'log' when it runs, which layer 0 may read when it is recomputed; recompute 0.inner with it",
    ),
    "an attribute of its parent": (ReadsOwn, "0.inner changes 'scale' when it runs, which layer 0 may read"),
    "a generator": (lambda: DrawsToo(Draws()), "0.inner changes 'generator' when it runs, which layer 0 may read"),
    "an object that it is given": (
        lambda: ReadsItsContext(SetsItsContext()),
        "Context, which it may change, so layer 0 cannot be recomputed without it; recompute both",
    ),
    "a frozen object and a function": (lambda: GivesConstants(TakesConstants()), ""),
}


@pytest.mark.parametrize("action", ["keep", "offload"])
@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept_within_something_recomputed_is_exact_or_refused(case: str, action: Action) -> None:
    makes, says = KEPT[case]
    assert_exact_or_refused(makes(), {"*.inner": action, "*": "recompute"}, says)


def assert_exact_or_refused(module: nn.Module, sites: dict[str, Action], says: str) -> None:
    """Two microbatches, whose forwards run before their backwards."""
    xs, grads = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    expected = copy.deepcopy(module)
    outs = []
    for x in xs:
        torch.manual_seed(0)
        outs.append(expected(x))
    for out, grad in zip(outs, grads, strict=True):
        out.backward(grad)
    try:
        passes = [Pass(module, Memory(sites=sites)) for _ in xs]
        with passes[0].saving.overrides:
            found = [one.forward(x, overriding=False) for one, x in zip(passes, xs, strict=True)]
            for one, out, grad in zip(passes, found, grads, strict=True):
                one.leave()
                one.come_back()
                one.backward(out, grad, overriding=False)
    except PipelineError as error:
        assert says, error
        assert says in str(error)
        return
    assert not says
    assert all(map(torch.equal, found, outs))
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


class Context:
    def __init__(self) -> None:
        self.scale = 2.0


class Scaled(nn.Module):
    def forward(self, x: Tensor, context: Context) -> Tensor:
        return torch.exp(x * context.scale)


class ChangesItsContext(Around):
    def run(self, x: Tensor) -> Tensor:
        context = Context()
        y = self.inner(x, context)
        context.scale = 3.0
        return y  # type: ignore[no-any-return]


class Averages(nn.Module):
    """Changes a tensor that is an attribute, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.5)
        return torch.exp(x + self.average)


class Lazy(nn.Module):
    """Its state begins as None, or is not there yet."""

    average: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.average = torch.ones(WIDTH) if self.average is None else self.average * 0.5
        self.calls = getattr(self, "calls", 0) + 1
        return torch.exp(x * self.average) * self.calls


class InContainers(nn.Module):
    """Its state is in a dict and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.averages, self.scales = {"x": torch.ones(WIDTH)}, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        self.averages["x"] = self.averages["x"] * 0.5
        self.scales.append(self.scales[-1] * 2)
        return torch.exp(x * self.averages["x"]) * self.scales[-1]


class Grows(nn.Module):
    """Appends to a container, nested or not."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.held = make()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.held
        while isinstance(inner, tuple):
            inner = inner[0]
        size = len(inner)
        if isinstance(inner, dict):
            inner[size] = size
        elif isinstance(inner, set):
            inner.add(size)
        else:
            inner.append(size)
        return torch.exp(x / (1 + size))


class Remembering(list[Any]):
    """A list with an attribute, whose own methods are not to be called."""

    def __init__(self) -> None:
        super().__init__()
        self.other = [0]

    def append(self, value: Any) -> None:
        super().append(value)
        self.other.append(value)

    def __len__(self) -> int:
        return len(self.other)

    def clear(self) -> None:
        raise NotImplementedError


class ChangesHeld(nn.Module):
    """Changes a tensor in a list, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [{"average": torch.ones(WIDTH)}]

    def forward(self, x: Tensor) -> Tensor:
        factor = self.held[0]["average"].clone()
        self.held[0]["average"].mul_(0.5)
        return torch.exp(x * factor)


class DrawsHeld(nn.Module):
    """Draws from a generator in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"generator": torch.Generator().manual_seed(3)}

    def __deepcopy__(self, memo: Any) -> "DrawsHeld":
        return DrawsHeld()

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x * torch.rand(x.shape, generator=self.held["generator"]))


class Draws(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def __deepcopy__(self, memo: Any) -> "Draws":
        return Draws()

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x * torch.rand(x.shape, generator=self.generator))


class SetByParent(Around):
    calls = 0

    def run(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.inner.scale = 1.0 / self.calls
        return self.inner(x)  # type: ignore[no-any-return]


class Reads(nn.Module):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x * self.scale)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(WIDTH).to_sparse(), x.T).T


def in_a_tuple() -> Any:
    return ((OrderedDict(),),)


def _grows(make: Any) -> nn.Module:
    return Around(Grows(make))


NESTED = (OrderedDict, defaultdict, Remembering, in_a_tuple)

RECOMPUTED: dict[str, tuple[Any, str]] = {
    "an object": (
        lambda: ChangesItsContext(Scaled()),
        "Context, which may be another one when 0.inner is recomputed; recompute what is around it, or register",
    ),
    "an average": (
        lambda: Around(Averages()),
        "the attribute 'average' of 0.inner was changed before it could be recomputed",
    ),
    "state that is made late": (lambda: Around(Lazy()), ""),
    "state in containers": (lambda: Around(InContainers()), ""),
    "a generator of its own": (lambda: Around(Draws()), ""),
    "a generator in a dict": (lambda: Around(DrawsHeld()), ""),
    "a tensor in a list": (
        lambda: Around(ChangesHeld()),
        "the attribute 'held' of 0.inner was changed before it could be recomputed",
    ),
    **{f"a container {make.__name__}": (partial(_grows, make), "") for make in (dict, list, set, deque, *NESTED)},
    "state that the parent sets": (lambda: SetByParent(Reads()), ""),
    "a checkpoint of the user's": (lambda: Checkpointing(nn.RMSNorm(WIDTH)), ""),
    "sparse tensors": (lambda: Around(Sparse()), ""),
    "a script": (lambda: Around(torch.jit.script(nn.Tanh())), ""),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", RECOMPUTED)
def test_recomputed_modules_are_exact_or_refused(case: str, whole: bool) -> None:
    makes, says = RECOMPUTED[case]
    if case == "an object":
        whole = False
    says = says.replace("0.inner", "layer 0") if whole else says
    assert_exact_or_refused(makes(), {"*" if whole else "*.inner": "recompute"}, says)


class OnlyWithoutGradients(Around):
    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x + self.inner(x)


@pytest.mark.parametrize(("kind", "acts"), [(Around, True), (Checkpointing, False), (OnlyWithoutGradients, False)])
def test_sites_are_seen_where_a_policy_can_act(kind: type[Around], acts: bool) -> None:
    for action in ("recompute", "offload"):
        one = Pass(kind(nn.Tanh()), Memory(sites={"*.inner": action}))  # type: ignore[dict-item]
        one.forward(torch.randn(3, WIDTH))
        assert one.saving.seen is not None
        assert (0 in one.saving.seen.patterns) == acts


def test_inference_tensors_may_be_given() -> None:
    module = Around(nn.Tanh())
    with torch.inference_mode():
        x = torch.randn(3, WIDTH)
    out = Pass(module, Memory(sites={"*": "recompute"})).forward(x.clone())
    assert out.requires_grad
    out.sum().backward()


@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_left_of_a_pass(action: Action) -> None:
    module = Mlp()
    counts = []
    for _ in range(3):
        one = Pass(module, Memory(sites={"*": action}))
        out = one.forward(torch.randn(3, 3, WIDTH))
        one.leave()
        one.come_back()
        one.backward(out, torch.ones_like(out))
        del one, out
        gc.collect()
        counts.append(sum(issubclass(type(it), Tensor) for it in gc.get_objects()))
    assert counts[1] == counts[2]


def test_tensors_of_other_devices_stay() -> None:
    saved = SavedPass(torch.device("meta"), 0, (), leaves=True)
    assert not saved.may_change(torch.zeros(3))
    assert saved.may_change(torch.zeros(3, device="meta"))


# How much leaves.


@given(st.lists(st.integers(1, 1000), max_size=12), st.floats(0, 1), st.none() | st.integers(0, 5000))
def test_what_leaves_is_no_more_than_was_allowed_and_the_first_go_first(
    counts: list[int], fraction: float, limit: int | None
) -> None:
    tensors = [torch.zeros(count, dtype=torch.uint8) for count in counts]
    away = Away()
    views = [away.view(tensor, "a") for tensor in tensors]
    candidates = away.candidates()
    chosen = within(candidates, fraction=fraction, limit=limit)
    total = sum(it.nbytes for it in chosen)
    assert total <= fraction * sum(counts) + 1e-9
    assert limit is None or total <= limit
    left = [it for it in candidates if it not in chosen]
    room = min(fraction * sum(counts), float("inf") if limit is None else limit)
    assert all(total + it.nbytes > room for it in left)
    assert views is not None


def test_small_tensors_stay() -> None:
    saved = SavedPass(CPU, 100, (), leaves=True)
    assert not saved.may_change(torch.zeros(99, dtype=torch.uint8))
    assert saved.may_change(torch.zeros(100, dtype=torch.uint8))
    assert not SavedPass(CPU, 0, (), leaves=True).may_change(torch.zeros(0))


# Host memory.


def stored(*counts: int) -> tuple[list[Any], list[Any]]:
    away = Away()
    views = [away.view(torch.zeros(count, dtype=torch.uint8), "a") for count in counts]
    return away.candidates(), views


def test_buffers_grow_and_are_reused() -> None:
    pool = HostPool({0: 0, 1: 0}, CPU, rank=1, limit=None)
    chosen, views = stored(3 << 20)
    memory, fit = pool.take(0, chosen)
    assert fit == chosen
    assert memory.numel() >= 3 << 20
    again, _ = pool.take(0, chosen)
    assert again is memory
    chosen, more = stored(5 << 20)
    larger, fit = pool.take(0, chosen)
    assert (fit, larger.numel() >= 5 << 20) == (chosen, True)
    pool.close()
    assert pool.nbytes == 0
    assert views
    assert more


class Reading:
    """An event of a device that has not got there yet."""

    passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        assert self.passed, "the host waits for a device that may never get there"


def test_the_host_waits_for_no_device_that_still_reads_a_buffer_that_is_too_small() -> None:
    pool, reading = HostPool({0: 0}, CPU, rank=1, limit=None), Reading()
    (small, views), (large, more), (largest, most) = (stored(size << 20) for size in (3, 5, 9))
    pool.take(0, small)
    pool.read(0, reading)
    pool.take(0, large)
    assert pool.nbytes == (4 + 6) << 20, "what is read stays"
    reading.passed = True
    pool.take(0, largest)
    assert pool.nbytes == 12 << 20
    pool.close()
    assert pool.nbytes == 0
    assert all((views, more, most))


def test_what_a_device_still_reads_is_no_reason_to_refuse_for_good(caplog: pytest.LogCaptureFixture) -> None:
    pool, reading = HostPool({0: 0}, CPU, rank=1, limit=18 << 20), Reading()
    (small, views), (large, more), (largest, most) = (stored(size << 20) for size in (3, 5, 9))
    pool.take(0, small)
    pool.read(0, reading)
    pool.take(0, large)
    assert pool.take(0, largest)[1] == [], "there is no room for 12 MiB beside 6 and the 4 that are read"
    assert "some activations stay on the device" in caplog.text
    reading.passed = True
    assert pool.take(0, largest)[1] == largest
    pool.close()
    assert all((views, more, most))


def test_what_leaves_nothing_takes_no_host_memory() -> None:
    pool = HostPool({0: 0}, CPU, rank=1, limit=None)
    assert pool.take(0, [])[1] == []
    assert pool.nbytes == 0


def test_a_containers_memory_is_what_there_is(tmp_path: Path) -> None:
    assert _container_bytes(tmp_path) == sys.maxsize
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "700\n"),
        ("memory.stat", "anon 1\ninactive_file 50\n"),
    ):
        (tmp_path / name).write_text(text)
    assert _container_bytes(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_bytes(tmp_path) == sys.maxsize


def test_what_does_not_fit_a_buffer_that_cannot_grow_stays_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool({0: 0}, CPU, rank=1, limit=8 << 20)
    chosen, _views = stored(3 << 20)
    pool.take(0, chosen)
    chosen, _more = stored(2 << 20, 6 << 20)
    memory, fit = pool.take(0, chosen)
    assert fit == chosen[:1]
    assert memory.numel() < 8 << 20
    assert "some activations stay on the device" in caplog.text


def test_too_little_host_memory_is_said_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, _views = stored(3 << 20)
    says = (
        r"offloading takes 8.39 MB of host memory on rank 1 \(2 buffers of 4.19 MB for passes of stage 2, more for "
        r"stage 3: dry_run\(\) says how much\)"
    )
    with pytest.raises(PipelineError, match=f"{says}; host_bytes allows 6 MB"):
        HostPool({4: 2, 5: 2, 6: 3}, CPU, rank=1, limit=6_000_000).take(4, chosen)
    monkeypatch.setattr("stretto.pipeline.host_pool._available_bytes", lambda: 1_000_000)
    with pytest.raises(PipelineError, match=f"{says}; its machine has 1 MB left"):
        HostPool({4: 2, 5: 2, 6: 3}, CPU, rank=1, limit=None).take(4, chosen)


def test_what_a_rank_needs_in_all_is_said_before_anything_is_allocated() -> None:
    buffers = {4: 2, 5: 2, 6: 3, 7: 5}
    says = (
        r"offloading takes 14.7 MB of host memory on rank 1 \(2 buffers of 4.19 MB for passes of stage 2, 1 buffer of "
        r"6.29 MB for passes of stage 3\); host_bytes allows 14 MB"
    )
    needed = {2: 3 << 20, 3: 5 << 20, 5: 0}
    with pytest.raises(PipelineError, match=says):
        HostPool(buffers, CPU, rank=1, limit=14_000_000).foresee(needed)
    pool = HostPool(buffers, CPU, rank=1, limit=15_000_000)
    assert pool.foresee(needed) == 7 << 21
    pool.take(4, stored(3 << 20)[0])
    assert pool.foresee(needed) == 7 << 21
    with pytest.raises(PipelineError, match=r"takes 25.2 MB .* \(4.19 MB are there already, 1 buffer of 4.19 MB for"):
        pool.foresee({2: 3 << 20, 3: 14 << 20, 5: 0})
    pool.close()


# Sites.


def actions(policy: dict[str, Action], module: nn.Module) -> tuple[Action, dict[str, Action]]:
    (part,) = find_sites(Decisions(Memory(sites=policy)), {0: module}, in_phases=False).values()
    return part.action, {site.name: site.action for site in part.modules.values()}


def test_sites_do_as_what_is_around_them_unless_a_pattern_says_otherwise() -> None:
    stack = nn.Sequential(Mlp(), Mlp())
    assert actions({"*": "offload"}, stack) == ("offload", {})
    within = {f"0.0{name}": "offload" for name in ("", ".norm", ".up", ".down")}
    assert actions({"*.0": "offload"}, stack) == ("keep", within)
    assert actions({"*.norm": "recompute", "0": "offload"}, stack) == (
        "offload",
        {"0.0.norm": "recompute", "0.1.norm": "recompute"},
    )
    assert actions({"0.1.*": "keep", "*": "offload"}, stack) == (
        "offload",
        {"0.1.norm": "keep", "0.1.up": "keep", "0.1.down": "keep"},
    )
    assert actions({"*.0": "recompute", "*": "offload"}, stack) == ("offload", dict.fromkeys(within, "recompute"))
    assert actions({"0": "keep", "*": "offload"}, stack) == ("keep", {})
    assert actions({"sequential.norm": "keep", "sequential": "offload"}, stack)[1].keys() == {"0.0.norm", "0.1.norm"}


def test_the_last_layers_keep_what_they_would_offload() -> None:
    part = PartSites("mlp", "recompute+offload", {}).staying()
    assert part.action == "recompute"
    policy = Memory(sites={"*.norm": "recompute", "*": "offload"})
    (part,) = find_sites(Decisions(policy), {0: Mlp()}, in_phases=False).values()
    assert part.staying().action == "keep"
    assert [site.action for site in part.staying().modules.values()] == ["recompute"]


class Hollow(nn.Module):
    """Calls the modules within a module, which is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp.up(self.mlp.norm(x)).sigmoid()[..., : 2 * WIDTH]
        return x.sigmoid() * self.mlp.down(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "sites",
    [
        {"0.mlp": "keep", "*": "recompute"},
        {"0.mlp": "offload", "*": "recompute"},
        {"*.mlp": "recompute"},
        {"*.mlp": "recompute+offload", "*": "offload"},
        {"*.up": "keep", "*.mlp": "recompute"},
    ],
    ids=str,
)
def test_what_is_said_of_a_module_that_is_not_called_holds_for_those_within(sites: dict[str, Action]) -> None:
    module, x, grad = Hollow(), torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH)
    expected, expected_grads = plain(module, x, grad)
    one, noted = Pass(module, Memory(sites=sites)), set[tuple[str, str]]()
    one.saving.noted = lambda what, label, *_: noted.add((what, label))
    out = one.forward(x)
    (action,) = (action for pattern, action in sites.items() if pattern.endswith("mlp"))
    assert (action.partition("+")[0], "hollow.mlp") in noted
    one.leave()
    one.come_back()
    one.backward(out, grad)
    assert torch.equal(out, expected)
    for ours, theirs in zip(gradients(module, x), expected_grads, strict=True):
        assert torch.equal(ours, theirs)


def test_patterns_that_match_nothing_are_named_with_what_may_be_meant() -> None:
    def wrong(pattern: str) -> str:
        policy = Memory(sites={"*.norm": "recompute", pattern: "recompute"})
        decisions = Decisions(policy)
        find_sites(decisions, {0: Mlp(), 1: Mlp()}, in_phases=False)
        assert unknown(policy, [{}, decisions.reasons]) == pattern
        return not_found(pattern, decisions.near(pattern))

    assert wrong("norm").startswith("memory names 'norm', but no phase or module is called that; near it are '*norm'")
    assert "; near it are 'mlp.down', 'Mlp.mlp.down', 'mlp.norm' (phases have names such as" in wrong("mlp.dwon")
    assert wrong("zebra").startswith("memory names 'zebra', but no phase or module is called that (phases")


def test_patterns_that_decide_nothing_are_named() -> None:
    def wrong(policy: dict[str, Action]) -> str | None:
        decisions = Decisions(Memory(sites=policy))
        find_sites(decisions, {0: Mlp()}, in_phases=False)
        assert unknown(Memory(sites=policy), [{}, decisions.reasons]) is None
        return unused(Memory(sites=policy), [{}, decisions.reasons])

    assert wrong({"*.norm": "recompute", "*": "offload"}) is None
    assert wrong({"*": "offload", "*.norm": "recompute"}) == (
        "'*' decides about all that '*.norm' matches; put the narrower one first"
    )
