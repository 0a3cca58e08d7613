"""The DeepSeek-V3 / Kimi K2 architecture, and models of Hugging Face `transformers`, as layers of a `Pipeline`."""

from stretto.model.balance import update_router_biases
from stretto.model.causal_lm import CausalLM, layer, layer_count, layers, tied_names
from stretto.model.config import ModelConfig, ModelError, Yarn
from stretto.model.files import from_pretrained, load_weights, save_pretrained
from stretto.model.loss import causal_lm_loss, transformers_loss
from stretto.model.values import CutOutput, Output

__all__ = [
    "CausalLM",
    "CutOutput",
    "ModelConfig",
    "ModelError",
    "Output",
    "Yarn",
    "causal_lm_loss",
    "from_pretrained",
    "layer",
    "layer_count",
    "layers",
    "load_weights",
    "save_pretrained",
    "tied_names",
    "transformers_loss",
    "update_router_biases",
]
