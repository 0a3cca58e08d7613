"""One rank's part of the model, as an engine holds it: fused, stacked, quantised, and always at the same addresses.

The letters of shapes are those of the model; X is 1 + E, the MLP of all tokens and the experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.model import REAL, Config, attention, entries, normed, quantise, rotated, routed
from stretto.ir.errors import WeightsError

Sum = Callable[[Tensor], Tensor]
"""Adds up a tensor over all ranks."""
BeforeLoad = Callable[[str], bool | None]
"""Is called with a tensor's name before it is loaded; False has it dropped."""
_MOST = 512  # prefixes kept


@dataclass(frozen=True, slots=True)
class Layer:
    """As loaded, then the forms that are computed with. The first of X is the MLP of all tokens; down is transposed."""

    norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    router: Tensor
    loaded_gate_up: Tensor  # X × 2f × D, as are the whole numbers below
    loaded_down: Tensor  # X × f × D

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What was computed for a prefix: keys and values of each layer, and the token that follows."""

    kv: list[tuple[Tensor, Tensor]]
    token: int


def alone(tensor: Tensor) -> Tensor:
    return tensor


def take_all(_: str) -> bool | None:
    return None


class Shard:
    """Loads whole tensors in any order: keeps them as they are until their layer is complete, then takes its part."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
        add: Sum = alone,
    ) -> None:
        if any(size % ranks for size in (config.heads, config.kv_heads, config.expert_width)):
            raise WeightsError(f"heads and widths cannot be split among {ranks} ranks: {config}")
        self.config, self._rank, self._ranks, self._add = config, rank, ranks, add
        self.before_load: BeforeLoad = take_all
        dtype, D, f = getattr(torch, config.dtype), config.width, config.expert_width // ranks
        self._heads, self._kv_heads, X = config.heads // ranks, config.kv_heads // ranks, 1 + config.experts
        q, kv = self._heads * config.head_width, self._kv_heads * config.head_width

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def layer() -> Layer:
            loaded = empty(D), empty(q + 2 * kv, D), empty(D, q), empty(D), empty(config.experts, D)
            experts = (X, 2 * f, D), (X, f, D)
            whole = [(empty(*s, dtype=torch.int8), empty(*s[:2], 1, dtype=torch.float32)) for s in experts]
            return Layer(*loaded, *(empty(*s) for s in experts), *whole[0], *whole[1])

        self.layers = [layer() for _ in range(config.layers)]
        self.embed, self.norm = empty(config.vocabulary, D), empty(D)
        self.lm_head, self.lm_head_DV = empty(config.vocabulary, D), empty(D, config.vocabulary)
        self.cache: dict[tuple[int, ...], Kept] = {}
        self._shapes = {entry.name: entry.shape for entry in entries(config)}
        self.begin()

    def parameters(self) -> Iterator[Tensor]:
        yield from (self.embed, self.norm, self.lm_head, self.lm_head_DV)
        for layer in self.layers:
            yield from (getattr(layer, field.name) for field in fields(layer))

    # Loading.

    def begin(self) -> None:
        """Load anew, whatever is left of an earlier time."""
        self._missing: dict[str, set[str]] = {}
        self._views: dict[str, dict[str, Tensor]] = {}
        for name in self._shapes:
            self._missing.setdefault(_unit(name), set()).add(name)
            self._views.setdefault(_unit(name), {})

    @torch.no_grad()
    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> list[str]:
        """Take tensors; which of them are taken care of. Those of a layer are kept, not copied, until all are there."""
        taken = []
        for name, tensor in tensors:
            if self.before_load(name) is False or name not in self._shapes:
                continue
            if tensor.shape != self._shapes[name]:
                raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, not {self._shapes[name]}")
            unit = _unit(name)
            self._views[unit][name.removeprefix(f"{unit}.").removesuffix(".weight")] = tensor
            self._missing[unit].discard(name)
            taken.append(name)
            if not self._missing[unit]:
                self._place(unit, self._views.pop(unit))
                self._views[unit] = {}
        return taken

    def _place(self, unit: str, views: dict[str, Tensor]) -> None:
        whole = {"embed_tokens.weight": self.embed, "norm.weight": self.norm, "lm_head.weight": self.lm_head}
        if unit in whole:
            whole[unit].copy_(next(iter(views.values())))
            return
        layer = self.layers[int(unit.removeprefix("layers."))]
        pairs = [(layer.norm, views["input_layernorm"]), (layer.mlp_norm, views["post_attention_layernorm"])]
        pairs += [(layer.router, views["router"]), (layer.o, self._part(views["self_attn.o_proj"], 1))]
        qkv = [self._part(views[f"self_attn.{name}_proj"], 0) for name in "qkv"]
        pairs += zip(layer.qkv.split([len(part) for part in qkv]), qkv, strict=True)
        for x, part in enumerate(("mlp", *(f"experts.{e}" for e in range(self.config.experts)))):
            gate_up = [self._part(views[f"{part}.{name}_proj"], 0) for name in ("gate", "up")]
            pairs += zip(layer.loaded_gate_up[x].chunk(2), gate_up, strict=True)
            pairs.append((layer.loaded_down[x], self._part(views[f"{part}.down_proj"], 1).T))
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    def _part(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self._ranks, dim)[self._rank]

    @torch.no_grad()
    def finish(self) -> None:
        """Make the forms that are computed with."""
        missing = [name for names in self._missing.values() for name in names]
        if missing:
            raise WeightsError(f"{min(missing)} was not loaded, one of {len(missing)}")
        self.lm_head_DV.copy_(self.lm_head.T)
        for layer in self.layers:
            for loaded, whole, scale in (
                (layer.loaded_gate_up, layer.gate_up, layer.gate_up_scale),
                (layer.loaded_down, layer.down, layer.down_scale),
            ):
                for source, *targets in zip(loaded, whole, scale, strict=True):  # one expert's floats at a time
                    torch._foreach_copy_(targets, list(quantise(source)))

    def flush(self) -> None:
        self.cache.clear()

    # Computing.

    @torch.no_grad()
    def following(self, tokens: Sequence[int]) -> int:
        """The next token. All ranks ask for it at the same time."""
        known = self._known(tokens)
        kept = self.cache.get(tuple(tokens[:known]))
        if kept is not None and known == len(tokens):
            return kept.token
        x_TD, kv = self.embed.to(REAL)[list(tokens[known:])], []
        for n, layer in enumerate(self.layers):
            before = kept.kv[n] if kept else None
            y_TD, new = self._attend(layer, normed(x_TD, layer.norm), before)
            kv.append(new)
            x_TD = x_TD + self._add(y_TD)
            x_TD = x_TD + self._add(self._experts(layer, normed(x_TD, layer.mlp_norm)))
        token = int((normed(x_TD[-1], self.norm) @ self.lm_head_DV.to(REAL)).argmax())
        if len(self.cache) >= _MOST:
            del self.cache[next(iter(self.cache))]
        self.cache[tuple(tokens)] = Kept(kv, token)
        return token

    def _known(self, tokens: Sequence[int]) -> int:
        """How long a prefix all ranks have kept."""
        mine = [n == 0 or tuple(tokens[:n]) in self.cache for n in range(len(tokens) + 1)]
        have = self._add(torch.tensor(mine, dtype=torch.int64))
        return int((have == self._ranks).nonzero().max())

    def _attend(
        self, layer: Layer, x_TD: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        start = len(before[0]) if before else 0
        heads = self._heads, self._kv_heads, self._kv_heads
        q, k, v = (x_TD @ layer.qkv.to(REAL).T).unflatten(1, (-1, self.config.head_width)).split(heads, 1)
        q, k = rotated(q, start=start), rotated(k, start=start)
        if before:
            k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
        return attention(q, k, v) @ layer.o.to(REAL).T, (k, v)

    def _experts(self, layer: Layer, x_TD: Tensor) -> Tensor:
        shares_TX = F.pad(routed(x_TD, layer.router, self.config.chosen), (1, 0), value=1.0)
        out_TD = torch.zeros_like(x_TD)
        for x in shares_TX.any(0).nonzero().flatten().tolist():
            wide_Tf = (x_TD @ layer.gate_up[x].to(REAL).T) * layer.gate_up_scale[x].to(REAL).T
            gate_Tf, up_Tf = wide_Tf.chunk(2, -1)
            inner_Tf = F.silu(gate_Tf) * up_Tf * layer.down_scale[x].to(REAL).T
            out_TD += shares_TX[:, x, None] * (inner_Tf @ layer.down[x].to(REAL))
        return out_TD


def _unit(name: str) -> str:
    """What becomes complete together: a layer, or a tensor by itself."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
