"""Language models: cuts those of Hugging Face `transformers` into layers for a `Pipeline`."""

from stretto.model.loss import causal_lm_loss
from stretto.model.values import CausalLMOutput

__all__ = ["CausalLMOutput", "causal_lm_loss"]
