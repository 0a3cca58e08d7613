"""Splits the backward: it computes input gradients at once, and defers weight gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from stretto.moe.experts import Experts
from stretto.moe.grouped_linear import GroupedLinear, autocast, grouped_linear
from stretto.pipeline.deferred_functions import deferred_embedding, deferred_grouped, deferred_linear
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.overrides import Forward, Overrides
from stretto.pipeline.weight_gradients import (
    WeightGradient,
)


class Deferral:
    """Makes a module's layers defer their weight gradients to the list passed to `into`. Running these adds them to
    `gradients`.

    While `overrides` is entered, each supported layer runs through an autograd function of its input and parameters. In
    general that function computes all gradients. Only a backward inside `into` that accumulates every parameter's
    gradient defers the weight gradients; `torch.autograd.grad` in a layer does not.
    """

    def __init__(self, module: nn.Module, gradients: Gradients) -> None:
        self._gradients = gradients
        self._deferred: list[WeightGradient] | None = None
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._anchored = get_gradient_edge(self.anchor).node
        self.overrides = Overrides()
        self.noted: Callable[[Tensor | None, Tensor], None] | None = None
        """If set, it is told of each weight gradient that a backward may defer: the input it needs, and the output."""
        self.casts: Callable[[Tensor], None] | None = None
        """If set, it is told of each weight that is cast, as under autocast."""
        self._module = module
        self._known: dict[int, nn.Module] = {}
        inside = _compiled(module)
        for layer in module.modules():
            forward = None if id(layer) in inside else self._forward(layer)
            if forward is not None:
                self._known[id(layer)] = layer
                inside.update(map(id, layer.modules()))
                self.overrides.add(layer, partial(_unless_changed, layer, type(layer).forward, forward))

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that defer their weight gradients."""
        compiled = _compiled(self._module)  # some may have been compiled since
        return [layer for layer in self._known.values() if id(layer) not in compiled]

    def into(self, deferred: list[WeightGradient] | None) -> "_Into":
        """Return a context in which a backward appends its weight gradients to this list; with None, it defers none."""
        return _Into(self, deferred)

    def defer(self, add: Callable[..., None], given: Tensor, grad: Tensor, more: tuple[Any, ...]) -> None:
        """Defer a weight gradient. `add` computes it from the layer's input and output gradient, and adds it."""
        assert self._deferred is not None
        versions = given._version, grad._version
        self._deferred.append(WeightGradient(add, self._gradients.of, given, grad, more, versions))

    @property
    def defers(self) -> bool:
        """Whether the running backward defers weight gradients.

        A backward for chosen inputs (`torch.autograd.grad`) does not: it never executes the node of the anchor, which
        every layer's node leads to. Nor does a backward that is itself differentiated.
        """
        return (
            self._deferred is not None
            and not torch.is_grad_enabled()
            and bool(torch._C._will_engine_execute_node(self._anchored))
        )

    def _runs(self, layer: nn.Module, x: Tensor) -> bool:
        """Return whether a layer may run through the deferring function.

        Not if it is a copy of a known layer, if gradients are off, or under transforms that do not support it.
        """
        return (
            torch.is_grad_enabled()
            and id(layer) in self._known
            and isinstance(x, Tensor)
            and not x.is_complex()
            and x.layout is torch.strided
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
            and forward_ad._current_level < 0
            and F.linear is _LINEAR  # neither patched nor intercepted by a mode
            and (not torch._C._len_torch_function_stack() or _only_default_devices())
        )

    def _forward(self, layer: nn.Module) -> Forward | None:
        """Return the deferring forward of a layer, None if its type is not supported."""
        known = getattr(type(layer), "forward", None)  # a scripted module's class has none
        makers = {
            _FORWARDS[nn.Linear]: self._linear,
            _FORWARDS[nn.Embedding]: self._embedding,
            _FORWARDS[GroupedLinear]: self._grouped,
            _FORWARDS[Experts]: self._experts,
            _FORWARDS[nn.MultiheadAttention]: self._attention,
        }
        return makers[known]() if known in makers and known.__module__ in _MODULES else None

    def linear(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, rows: slice | None = None) -> Tensor:
        """Compute x Wᵀ + b with these rows of W and b, deferring their gradients."""
        w: Tensor = weight if rows is None else weight[rows]
        b: Tensor | None = bias if rows is None or bias is None else bias[rows]
        if torch.is_autocast_enabled(x.device.type):
            x, w, b = autocast(x), self._cast(w), None if b is None else autocast(b)
        if not weight.requires_grad and (bias is None or not bias.requires_grad):
            return F.linear(x, w, b)
        out = deferred_linear(self.anchor, x, w, b, (self, weight, bias, rows))
        return self._noted(x if weight.requires_grad else None, out)

    def _cast(self, weight: Tensor) -> Tensor:
        """Cast a weight as autocast does."""
        cast = autocast(weight)
        if self.casts is not None and cast is not weight:
            self.casts(cast)
        return cast

    def _noted(self, given: Tensor | None, out: Tensor) -> Tensor:
        if self.noted is not None:
            self.noted(given, out)
        return out

    def _linear(self) -> Forward:
        def forward(layer: nn.Linear, input: Tensor) -> Tensor:
            own = layer._parameters
            weight, bias = own.get("weight"), own.get("bias")
            plain = _own(weight) and _own_or_none(bias) and layer.weight is weight and layer.bias is bias
            if not plain or not self._runs(layer, input):
                return type(layer).forward(layer, input)
            assert weight is not None
            return self.linear(input, weight, bias)

        return forward

    def _embedding(self) -> Forward:
        def forward(layer: nn.Embedding, input: Tensor) -> Tensor:
            weight = layer._parameters.get("weight")
            plain = not layer.sparse and layer.max_norm is None and not layer.scale_grad_by_freq
            if not plain or not self._runs(layer, input) or not _own(weight) or layer.weight is not weight:
                return type(layer).forward(layer, input)
            if not weight.requires_grad:
                return type(layer).forward(layer, input)
            padding = -1 if layer.padding_idx is None else layer.padding_idx
            return self._noted(input, deferred_embedding(self.anchor, input, weight, padding, self))

        return forward

    def _grouped(self) -> Forward:
        def forward(layer: GroupedLinear, x: Tensor, counts: Tensor) -> Tensor:
            return self._product(layer)(x, layer.weight, counts)

        return forward

    def _experts(self) -> Forward:
        def forward(layer: Experts, *arguments: Any) -> Tensor:
            return layer.run(self._product(layer), *arguments)

        return forward

    def _product(self, layer: nn.Module) -> Callable[[Tensor, nn.Parameter, Tensor], Tensor]:
        """Return the grouped product of a layer's weights, which defers their gradients."""

        def product(x: Tensor, weight: nn.Parameter, counts: Tensor) -> Tensor:
            registered = any(weight is parameter for parameter in layer._parameters.values())
            w: Tensor = weight
            if torch.is_autocast_enabled(x.device.type):
                x, w = autocast(x), self._cast(w)
            if not registered or not _own(weight) or not weight.requires_grad or not self._runs(layer, x):
                return grouped_linear(x, w, counts)
            return self._noted(x, deferred_grouped(self.anchor, x, w, counts, self, weight))

        return product

    def _attention(self) -> Forward:
        def forward(
            layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any
        ) -> Any:
            options = {**dict(zip(_ATTENTION_OPTIONS, arguments, strict=False)), **named}
            weights = options.pop("need_weights", True)
            hinted = options.get("is_causal", False) and options.get("attn_mask") is None
            if weights or hinted or not self._runs(layer, query) or query.dim() != 3 or not _is_plain(layer):
                return type(layer).forward(layer, query, key, value, *arguments, **named)
            return self._attend(layer, query, key, value, **options), None

        return forward

    def _attend(
        self,
        layer: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: ARG002  (no attention weights are returned)
        is_causal: bool = False,
    ) -> Tensor:
        """Compute nn.MultiheadAttention, with projections through `linear`. N batch, T and S tokens, H heads."""
        width, heads = layer.embed_dim, layer.num_heads
        weight, bias, out_proj = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj
        assert _own(weight) and _own(out_proj.weight)  # noqa: PT018
        parts = [slice(k * width, (k + 1) * width) for k in range(3)]
        if query is key and key is value:
            q, k, v = self.linear(query, weight, bias).chunk(3, dim=-1)
        else:
            q, k, v = (self.linear(x, weight, bias, rows) for x, rows in zip((query, key, value), parts, strict=True))
        if not layer.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q_NHTd, k_NHSd, v_NHSd = (x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2) for x in (q, k, v))
        causal = is_causal and key_padding_mask is None  # the mask is then redundant
        mask = None if causal else _attention_mask(attn_mask, key_padding_mask, q_NHTd, k_NHSd)
        dropout = layer.dropout if layer.training else 0.0
        out = F.scaled_dot_product_attention(q_NHTd, k_NHSd, v_NHSd, mask, dropout, causal)
        out = out.transpose(1, 2).flatten(2)
        out = self.linear(out, out_proj.weight, out_proj.bias)
        return out if layer.batch_first else out.transpose(0, 1)


_ATTENTION_OPTIONS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


class _Into:
    """The context of `into`. A class is cheaper than a generator, and every pass enters it."""

    __slots__ = ("_before", "_deferral", "_deferred")

    def __init__(self, deferral: Deferral, deferred: list[WeightGradient] | None) -> None:
        self._deferral, self._deferred = deferral, deferred

    def __enter__(self) -> None:
        self._before, self._deferral._deferred = self._deferral._deferred, self._deferred

    def __exit__(self, *error: object) -> None:
        self._deferral._deferred = self._before


def _compiled(module: nn.Module) -> set[int]:
    """Return the ids of all modules inside compiled ones, by `torch.compile` or `Module.compile`."""
    # Recognise the name under which torch.compile stores a module: importing its class takes as long as all of torch.
    compiled = (
        part for part in module.modules() if "_orig_mod" in part._modules or part._compiled_call_impl is not None
    )
    return {id(inner) for part in compiled for inner in part.modules()}


def _unless_changed(layer: nn.Module, usual: Forward, forward: Forward, before: Forward | None) -> Forward | None:
    """Return the replacement forward, or None if the user has set a forward on the layer or patched its class."""
    return forward if before is None and type(layer).forward is usual else None


_LINEAR = torch._C._nn.linear
_FORWARDS = {kind: kind.forward for kind in (nn.Linear, nn.Embedding, GroupedLinear, Experts, nn.MultiheadAttention)}
_MODULES = frozenset(kind.__module__ for kind in _FORWARDS)


def _only_default_devices() -> bool:
    """Return whether all active function modes only set the default device of new tensors."""
    return all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _own(parameter: Tensor | None) -> TypeGuard[nn.Parameter]:
    """Return whether this is a plain leaf parameter, neither computed from others nor of a special subclass."""
    plain = type(parameter) is nn.Parameter or isinstance(parameter, DTensor)
    return plain and parameter is not None and parameter.is_leaf and not parameter.is_complex()


def _own_or_none(parameter: Tensor | None) -> TypeGuard[nn.Parameter | None]:
    return parameter is None or _own(parameter)


def _is_plain(layer: nn.MultiheadAttention) -> bool:
    """Return whether attention has one input and one output projection, all plain parameters of its own."""
    if layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn:
        return False
    into, out = layer._parameters, layer.out_proj._parameters
    return (
        _own(into.get("in_proj_weight"))
        and _own_or_none(into.get("in_proj_bias"))
        and _own(out.get("weight"))
        and "bias" in out
        and _own_or_none(out["bias"])
    )


def _attention_mask(mask: Tensor | None, padding: Tensor | None, q_NHTd: Tensor, k_NHSd: Tensor) -> Tensor | None:
    """Merge both masks into one additive mask. True in a boolean mask means: do not attend."""
    total: Tensor | None = None
    batch, heads = q_NHTd.shape[:2]
    for part in (mask, padding):
        if part is None:
            continue
        if part is padding:
            shaped = part[:, None, None, :]
        else:
            shaped = part.reshape(batch, heads, *part.shape[1:]) if part.dim() == 3 else part[None, None]
        if shaped.dtype == torch.bool:
            shaped = torch.zeros_like(shaped, dtype=q_NHTd.dtype).masked_fill_(shaped, float("-inf"))
        total = shaped if total is None else total + shaped
    return None if total is None else total.expand(-1, -1, q_NHTd.shape[2], k_NHSd.shape[2])
