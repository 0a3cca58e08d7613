"""The load-balancing loss of Mixtral and Qwen3-MoE, from sums that are passed from layer to layer.

With F(e) the times that expert e was among the K best of a token, and P(e) the sum of its probabilities, both over the
R tokens of all layers that have a router, the loss is E · Σ F(e)/R · P(e)/R.

N sequences, t tokens of each, T tokens of all sequences, E experts.
"""

import torch
from torch import Tensor

from stretto.model.values import Hidden, RouterSums


def add_router(
    before: RouterSums | None, logits_TE: Tensor, attention_mask_Nt: Tensor | None, top_k: int
) -> RouterSums:
    """Add a layer's tokens to the sums; padding does not count."""
    shares_TE = logits_TE.softmax(-1)
    best_TK = shares_TE.detach().topk(top_k, dim=-1).indices
    exact = torch.promote_types(shares_TE.dtype, torch.float32)
    if attention_mask_Nt is None:
        weights_TK = torch.ones_like(best_TK, dtype=exact)
        shares_E = shares_TE.to(exact).sum(0)
    else:
        weights_T1 = attention_mask_Nt.reshape(-1, 1).to(exact)
        weights_TK = weights_T1.expand_as(best_TK)
        shares_E = (shares_TE.to(exact) * weights_T1).sum(0)
    chosen_E = torch.zeros_like(shares_E, requires_grad=False).scatter_add_(0, best_TK.flatten(), weights_TK.flatten())
    return RouterSums(chosen_E, shares_E) if before is None else RouterSums(before[0] + chosen_E, before[1] + shares_E)


def balance_loss(x: Hidden, routers: int) -> Tensor:
    """Return the loss of all `routers` layers that have a router."""
    assert x.router is not None
    chosen_E, shares_E = x.router
    mask = x.attention_mask_NT
    every = x.states_NTD.shape[0] * x.states_NTD.shape[1]
    tokens = shares_E.new_full((), every) if mask is None else mask.sum().to(shares_E.dtype)
    rows = (routers * tokens).clamp(min=1)  # if all is padding, there is no loss
    return len(shares_E) * ((chosen_E / rows) * (shares_E / rows)).sum()
