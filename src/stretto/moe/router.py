"""The router of DeepSeek-V3 and Kimi K2: sigmoid scores, expert groups, and balance by a bias instead of a loss.

N sequences, T tokens (of all sequences), D features, E experts, G groups of experts, K experts for each token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """Which experts each token goes to, and how much each counts."""

    indices_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor


class Router(nn.Module):
    """Chooses K of E experts for each token by sigmoid scores.

    A bias is added to the scores for the choice only; `update_bias` raises it for experts that got few tokens and
    lowers it for those that got many. With several groups, only experts of the best `top_groups` groups are chosen; a
    group is as good as the sum of its two best experts.

    Scores and weights are computed in float32 at least, and the bias stays in float32 whatever the module is cast to.
    """

    unread_buffers = ("counts_E",)
    """Buffers that forwards only write, so that a recomputation discards what it writes."""
    weight: nn.Parameter
    e_score_correction_bias: Tensor
    counts_E: Tensor

    def __init__(
        self,
        features: int,
        experts: int,
        *,
        top_k: int,
        groups: int = 1,
        top_groups: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.top_k, self.groups, self.top_groups = top_k, groups, top_groups
        self.normalize, self.scale = normalize, scale
        self.weight = nn.Parameter(torch.empty(experts, features))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("counts_E", torch.zeros(experts, dtype=torch.int64), persistent=False)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_TD: Tensor) -> Routing:
        exact = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            scores_TE = F.linear(x_TD.to(exact), self.weight.to(exact)).sigmoid()
            indices_TK = self._choose(scores_TE.detach() + self.e_score_correction_bias)
            weights_TK = scores_TE.gather(1, indices_TK)
            if self.normalize:
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
            return Routing(indices_TK, weights_TK * self.scale, scores_TE)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        if self.groups > 1:
            scores_TGe = scores_TE.view(len(scores_TE), self.groups, scores_TE.shape[1] // self.groups)
            best_TG = scores_TGe.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1, sorted=False).indices
            closed_TG = torch.ones_like(scores_TGe[..., 0], dtype=torch.bool).scatter_(1, best_TG, False)
            scores_TE = scores_TGe.masked_fill(closed_TG[..., None], float("-inf")).flatten(1)
        return scores_TE.topk(self.top_k, dim=-1, sorted=False).indices

    def count(self, counts_E: Tensor) -> None:
        """Count the tokens of a microbatch, in training mode."""
        if self.training:
            self.counts_E += counts_E

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """Move each expert's bias by `rate`: up if it got fewer tokens than the mean, down if more. Count anew."""
        counts_E = self.counts_E.double()
        self.e_score_correction_bias += rate * (counts_E.mean() - counts_E).sign()
        self.counts_E.zero_()

    def balance_loss(self, routing: Routing, sequences: int) -> Tensor:
        """Return the mean over sequences of Σᵢ fᵢ Pᵢ, DeepSeek-V3's sequence-wise auxiliary loss without its factor.

        fᵢ is the share of tokens whose K best scores include expert i, times E / K; Pᵢ is its mean share of scores.
        """
        scores_NtE = routing.scores_TE.view(sequences, -1, routing.scores_TE.shape[-1])
        chosen_NtE = torch.zeros_like(scores_NtE).scatter_(2, scores_NtE.detach().topk(self.top_k, -1).indices, 1.0)
        shares_NtE = scores_NtE / (scores_NtE.sum(-1, keepdim=True) + 1e-20)
        f_NE = chosen_NtE.mean(1) * (scores_NtE.shape[-1] / self.top_k)
        return (f_NE * shares_NtE.mean(1)).sum(-1).mean()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        bias = self.e_score_correction_bias
        if bias.dtype != torch.promote_types(bias.dtype, torch.float32):  # in fewer bits, small steps would be lost
            self.e_score_correction_bias = before.to(bias.device)
        if before.is_meta and not bias.is_meta:
            self.counts_E.zero_()
        return self

    def extra_repr(self) -> str:
        experts, features = self.weight.shape
        groups = f", groups={self.groups}, top_groups={self.top_groups}" if self.groups > 1 else ""
        return f"features={features}, experts={experts}, top_k={self.top_k}{groups}"
