"""The whole model: from tokens to logits, as one module or as the layers of a `Pipeline`.

N sequences, T tokens of each, D features, V words of the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.ir.errors import PlanError
from stretto.layers import EMBEDDING, LOSS, Phase
from stretto.model.blocks import Activations, Block, DenseBlock, MoeBlock
from stretto.model.config import ModelConfig, ModelError
from stretto.model.values import Output
from stretto.pipeline.named_layer import NamedLayer


class EmbeddingLayer(NamedLayer):
    """The first layer: from tokens to their vectors."""

    layer_name = EMBEDDING.name

    def __init__(self, config: ModelConfig, *, mtp: bool, balance: bool) -> None:
        super().__init__({"model.embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size)})
        self._mtp, self._balance = mtp, balance

    def forward(self, tokens_NT: Tensor) -> Activations:
        if not isinstance(tokens_NT, Tensor) or tokens_NT.dim() != 2 or tokens_NT.is_floating_point():
            shape = tuple(tokens_NT.shape) if isinstance(tokens_NT, Tensor) else type(tokens_NT).__name__
            raise ModelError(f"this model takes one tensor of token ids, sequences × tokens (got {shape})")
        x_NTD = self.module("model.embed_tokens")(tokens_NT)
        exact = torch.promote_types(x_NTD.dtype, torch.float32)
        balance = x_NTD.new_zeros((), dtype=exact) if self._balance else None
        return Activations(x_NTD, tokens_NT if self._mtp else None, balance)


class BlockLayer(NamedLayer):
    """A transformer block, in phases."""

    def __init__(self, name: str, block: Block) -> None:
        super().__init__({name: block})
        self._name = name

    @property
    def block(self) -> Block:
        block = self.module(self._name)
        assert isinstance(block, Block)
        return block

    @property
    def layer_name(self) -> str:
        return self.block.layer_name

    def phases(self) -> Sequence[tuple[Phase, Callable[[Any], Any]]]:
        return self.block.phases()

    def forward(self, value: Activations) -> Activations:
        return self.block(value)  # type: ignore[no-any-return]


class MtpModule(MoeBlock):
    """Predicts the token after the next one, from the model's output and the next token's vector.

    One more block, on a projection of both; its head is the model's.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.enorm, self.hnorm = (nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(width, eps=config.rms_norm_eps)})

    def project(self, h_NTD: Tensor, tokens_NT: Tensor) -> Tensor:
        """Return the input of the block: for each token but the last, its output joined with the next token."""
        if tokens_NT.shape[1] < 2:
            raise ModelError("mtp needs sequences of at least two tokens")
        next_NTD = self.enorm(self.embed_tokens(tokens_NT[:, 1:]))
        return self.eh_proj(torch.cat([next_NTD, self.hnorm(h_NTD[:, :-1])], dim=-1))  # type: ignore[no-any-return]


class HeadLayer(NamedLayer):
    """The last layer: the final norm and the head, and the MTP module if there is one."""

    layer_name = LOSS.name

    def __init__(self, config: ModelConfig, *, mtp: bool, balance: bool) -> None:
        modules: dict[str, nn.Module] = {"model.norm": nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)}
        modules["lm_head"] = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._mtp = f"model.layers.{config.num_hidden_layers}" if mtp else None
        if self._mtp is not None:
            modules[self._mtp] = MtpModule(config)
        super().__init__(modules)
        self._plain = not mtp and not balance

    def forward(self, value: Activations) -> Tensor | Output:
        head = self.module("lm_head")
        h_NTD = self.module("model.norm")(value.x_NTD)
        logits_NTV: Tensor = head(h_NTD)
        if self._plain:
            return logits_NTV
        mtp_logits_NTV, balance = None, value.balance
        if self._mtp is not None:
            module = self.module(self._mtp)
            assert isinstance(module, MtpModule)
            assert value.tokens_NT is not None
            out = module(Activations(module.project(h_NTD, value.tokens_NT), None, balance))
            mtp_logits_NTV, balance = head(module.shared_head["norm"](out.x_NTD)), out.balance
        return Output(logits_NTV, mtp_logits_NTV, balance)


def _validate(config: ModelConfig) -> None:
    if not isinstance(config, ModelConfig):
        raise ModelError(f'config is a ModelConfig, such as ModelConfig.named("tiny") (got {config!r:.40})')


def layer_count(config: ModelConfig) -> int:
    """Return the number of a model's layers: the embedding, the blocks, and the head."""
    _validate(config)
    return config.num_hidden_layers + 2


def layer(config: ModelConfig, number: int, *, mtp: bool = False, balance: bool = False) -> nn.Module:
    """Build one layer of a model, for a `Pipeline` in which no rank holds all of them.

    >>> sizes = ModelConfig.named("tiny")
    >>> type(layer(sizes, 0)).__name__, type(layer(sizes, layer_count(sizes) - 1)).__name__
    ('EmbeddingLayer', 'HeadLayer')
    """
    _validate(config)
    if mtp and config.num_nextn_predict_layers != 1:
        raise ModelError(f"mtp needs num_nextn_predict_layers = 1 (got {config.num_nextn_predict_layers})")
    if not 0 <= number < layer_count(config):
        raise PlanError(f"this model has layers 0 to {layer_count(config) - 1} (got {number})")
    if number == 0:
        built: nn.Module = EmbeddingLayer(config, mtp=mtp, balance=balance)
    elif number == layer_count(config) - 1:
        built = HeadLayer(config, mtp=mtp, balance=balance)
    else:
        block = DenseBlock(config) if number - 1 < config.dense_layers else MoeBlock(config)
        built = BlockLayer(f"model.layers.{number - 1}", block)
    for name, parameter in built.named_parameters():
        if name.endswith("weight") and parameter.dim() == 1:
            continue  # of a norm, which begins with ones
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=config.initializer_range)
        else:
            nn.init.zeros_(parameter)
    return built


def layers(config: ModelConfig, *, mtp: bool = False, balance: bool = False) -> list[nn.Module]:
    """Build all layers of a model, as a `Pipeline` takes them.

    With `mtp`, the last layer has a module that also predicts the token after the next one. With `balance`, the
    auxiliary losses of all routers are summed up. Either way the output is an `Output`, which `causal_lm_loss` takes.

    >>> len(layers(ModelConfig.named("tiny")))
    6
    """
    every = [layer(config, number, mtp=mtp, balance=balance) for number in range(layer_count(config))]
    _tie(every, tied_names(config, mtp=mtp))
    return every


def _tie(every: Sequence[nn.Module], ties: Sequence[Sequence[str]]) -> None:
    for (number, _, first), *others in ([name.partition(".") for name in names] for names in ties):
        parameter = every[int(number)].get_parameter(first)
        for other, _, name in others:
            path, _, key = name.rpartition(".")
            setattr(every[int(other)].get_submodule(path), key, parameter)


def tied_names(config: ModelConfig, *, mtp: bool = False) -> list[tuple[str, ...]]:
    """Return the parameters that are one, with their layers' numbers, as `Pipeline(tied=...)` takes them."""
    last = layer_count(config) - 1
    names = ["0.model.embed_tokens.weight"]
    if config.tie_word_embeddings:
        names.append(f"{last}.lm_head.weight")
    if mtp:
        names.append(f"{last}.model.layers.{config.num_hidden_layers}.embed_tokens.weight")
    return [tuple(names)] if len(names) > 1 else []


class CausalLM(NamedLayer):
    """The whole model as one module, from tokens to logits.

    >>> model = CausalLM(ModelConfig.named("tiny"))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 256])
    """

    def __init__(self, config: ModelConfig, *, mtp: bool = False, balance: bool = False) -> None:
        self.config = config
        parts = layers(config, mtp=mtp, balance=balance)
        super().__init__(_modules_of(parts))
        self._layers, self._ties = parts, tied_names(config, mtp=mtp)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        _tie(self._layers, self._ties)  # `to_empty` gives each module a parameter of its own
        return self

    def forward(self, tokens_NT: Tensor) -> Tensor | Output:
        value: Any = tokens_NT
        for part in self._layers:
            value = part(value)
        return value  # type: ignore[no-any-return]

    def layers(self) -> list[nn.Module]:
        """Return the layers that a `Pipeline` takes; they share this model's parameters."""
        return list(self._layers)


def _modules_of(parts: Sequence[nn.Module]) -> Mapping[str, nn.Module]:
    """Return the modules of all layers by their full names."""
    named: dict[str, nn.Module] = {}
    for part in parts:
        for name, module in part.named_modules():
            if type(module) is not nn.Module and name and not any(name.startswith(f"{outer}.") for outer in named):
                named[name] = module
    return named
