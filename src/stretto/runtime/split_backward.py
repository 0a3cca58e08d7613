"""Weight gradients put off: a backward yields input gradients, and closures that yield the weights' later."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.runtime.grouped import GroupedLinear, grouped_linear, grouped_outer

Closure = Callable[[], None]


class Deferral:
    """Makes the layers of a module put their weight gradients off, into the list that `into` names.

    Each layer that is known runs through a function of ours, by an override of its own `forward`: its backward
    computes the input gradient, and leaves a closure for the rest. Outside of `into`, or where nothing needs gradients,
    layers run as they always did. Parameters of all other layers get their gradients in the backward itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self._closures: list[Closure] | None = None
        self._anchor = torch.zeros(
            (), requires_grad=True
        )  # by it our backward runs even where no input needs a gradient
        self.layers: list[nn.Module] = []
        """Those that put their weight gradients off."""
        inside: set[nn.Module] = set()
        for layer in module.modules():
            run = None if layer in inside or "forward" in vars(layer) else self._run(layer)
            if run is not None:
                layer.forward = run
                inside.update(layer.modules())
                self.layers.append(layer)

    def into(self, closures: list[Closure]) -> "_Into":
        """Put weight gradients off into this list, of forwards, backwards and recomputations within."""
        return _Into(self, closures)

    def add(self, closure: Closure) -> None:
        assert self._closures is not None, "a backward outside of `into`"
        self._closures.append(closure)

    @property
    def _active(self) -> bool:
        return self._closures is not None and torch.is_grad_enabled()

    def _run(self, layer: nn.Module) -> Callable[..., Any] | None:
        """How a layer is to run instead, None for one that we do not know."""
        known = type(layer).forward
        if known is nn.Linear.forward and isinstance(layer, nn.Linear):
            return self._linear(layer) if _owns(layer, "weight") else None
        if known is nn.Embedding.forward and isinstance(layer, nn.Embedding):
            plain = not layer.sparse and layer.max_norm is None and not layer.scale_grad_by_freq
            return self._embedding(layer) if plain and _owns(layer, "weight") else None
        if known is GroupedLinear.forward and isinstance(layer, GroupedLinear):
            return self._grouped(layer) if _owns(layer, "weight") else None
        if known is nn.MultiheadAttention.forward and isinstance(layer, nn.MultiheadAttention):
            plain = layer.bias_k is None and layer.bias_v is None and not layer.add_zero_attn
            return self._attention(layer) if plain and _owns(layer, "in_proj_weight") else None
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: slice | None = None) -> Tensor:
        """x Wᵀ + b with these rows of W and b, their gradients put off."""
        w, b = weight.detach(), None if bias is None else bias.detach()
        if rows is not None:
            w, b = w[rows], None if b is None else b[rows]
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)

        def put_off(x: Tensor, grad: Tensor) -> None:
            def add() -> None:
                flat = grad.reshape(-1, grad.shape[-1])
                accumulate(weight, flat.T @ x.reshape(-1, x.shape[-1]), rows)
                if bias is not None:
                    accumulate(bias, flat.sum(0), rows)

            self.add(add)

        return _linear(self._anchor, x, w, b, put_off)

    def _linear(self, layer: nn.Linear) -> Callable[..., Any]:
        usual = layer.forward

        def forward(input: Tensor) -> Tensor:
            if not self._active or not layer.weight.requires_grad:
                return usual(input)
            return self.linear(input, layer.weight, layer.bias)

        return forward

    def _embedding(self, layer: nn.Embedding) -> Callable[..., Any]:
        usual = layer.forward

        def forward(input: Tensor) -> Tensor:
            if not self._active or not layer.weight.requires_grad:
                return usual(input)

            def put_off(grad: Tensor) -> None:
                def add() -> None:
                    padding = -1 if layer.padding_idx is None else layer.padding_idx
                    # autograd's own: the same bits every time, which index_add_ on CUDA does not give
                    made = torch.ops.aten.embedding_dense_backward(grad, input, layer.num_embeddings, padding, False)
                    accumulate(layer.weight, made)

                self.add(add)

            return _embedding(self._anchor, input, layer.weight.detach(), put_off)

        return forward

    def _grouped(self, layer: GroupedLinear) -> Callable[..., Any]:
        usual = layer.forward

        def forward(x: Tensor, counts: Tensor) -> Tensor:
            if not self._active or not layer.weight.requires_grad:
                return usual(x, counts)
            weight = layer.weight.detach()
            if torch.is_autocast_enabled(x.device.type):
                dtype = torch.get_autocast_dtype(x.device.type)
                x, weight = x.to(dtype), weight.to(dtype)

            def put_off(x: Tensor, grad: Tensor) -> None:
                self.add(lambda: accumulate(layer.weight, grouped_outer(grad, x, counts)))

            return _grouped(self._anchor, x, weight, counts, put_off)

        return forward

    def _attention(self, layer: nn.MultiheadAttention) -> Callable[..., Any]:
        usual = layer.forward

        def forward(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Any:
            options = {**dict(zip(_ATTENTION_OPTIONS, arguments, strict=False)), **named}
            weights = options.pop("need_weights", True)
            if not self._active or weights or query.dim() != 3 or not layer.in_proj_weight.requires_grad:
                return usual(query, key, value, *arguments, **named)
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
        average_attn_weights: bool = True,  # noqa: ARG002  (of weights that are not asked for)
        is_causal: bool = False,
    ) -> Tensor:
        """What nn.MultiheadAttention computes, its projections through `linear`. N batch, T and S tokens, H heads."""
        width, heads = layer.embed_dim, layer.num_heads
        parts = [slice(k * width, (k + 1) * width) for k in range(3)]
        if query is key and key is value:
            q, k, v = self.linear(query, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
        else:
            q, k, v = (
                self.linear(x, layer.in_proj_weight, layer.in_proj_bias, rows)
                for x, rows in zip((query, key, value), parts, strict=True)
            )
        if not layer.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q_NHTd, k_NHSd, v_NHSd = (x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2) for x in (q, k, v))
        mask = _attention_mask(attn_mask, key_padding_mask, q_NHTd, k_NHSd)
        causal = is_causal and key_padding_mask is None and attn_mask is None
        dropout = layer.dropout if layer.training else 0.0
        out = F.scaled_dot_product_attention(q_NHTd, k_NHSd, v_NHSd, mask, dropout, causal)
        out = out.transpose(1, 2).flatten(2)
        out = self.linear(out, layer.out_proj.weight, layer.out_proj.bias)
        return out if layer.batch_first else out.transpose(0, 1)


_ATTENTION_OPTIONS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


class _Into:
    """What `into` opens; a class because it is opened twice for every pass."""

    __slots__ = ("_before", "_closures", "_deferral")

    def __init__(self, deferral: Deferral, closures: list[Closure]) -> None:
        self._deferral, self._closures = deferral, closures

    def __enter__(self) -> None:
        self._before, self._deferral._closures = self._deferral._closures, self._closures

    def __exit__(self, *error: object) -> None:
        self._deferral._closures = self._before


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: Any) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(x, weight)
        ctx.put_off = put_off
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.put_off(x.detach(), grad)  # the input itself would keep the graph behind it
        return None, grad @ weight if ctx.needs_input_grad[1] else None, None, None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, counts: Tensor, put_off: Any) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(x, weight, counts)
        ctx.put_off = put_off
        return grouped_linear(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, counts = ctx.saved_tensors
        ctx.put_off(x.detach(), grad)
        back = grouped_linear(grad, weight.transpose(1, 2), counts) if ctx.needs_input_grad[1] else None
        return None, back, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, weight: Tensor, put_off: Any) -> Tensor:  # noqa: ARG004
        ctx.put_off = put_off
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.put_off(grad)
        return None, None, None, None


_linear: Callable[..., Tensor] = _Linear.apply
_grouped: Callable[..., Tensor] = _Grouped.apply
_embedding: Callable[..., Tensor] = _Embedding.apply


def accumulate(parameter: Tensor, grad: Tensor, rows: slice | None = None) -> None:
    """Add to a parameter's gradient, or to some rows of it."""
    held = parameter.grad
    if held is not None:
        (held if rows is None else held[rows]).add_(grad)
    elif rows is None:
        parameter.grad = grad.to(gradient_dtype(parameter))
    else:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
        parameter.grad[rows].add_(grad)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The type that a parameter's gradient is summed in."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _owns(layer: nn.Module, name: str) -> bool:
    """Whether a layer's weight is a parameter of its own, and not made from others."""
    return isinstance(layer._parameters.get(name), nn.Parameter)


def _attention_mask(mask: Tensor | None, padding: Tensor | None, q_NHTd: Tensor, k_NHSd: Tensor) -> Tensor | None:
    """One additive mask of both; True in either means: do not look."""
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
