"""An exchange as DeepEP's: a token travels once to each rank that needs it, and its outputs there come back as a sum.

T tokens of this rank, A tokens that arrive, S tokens sent (once for each rank), R rows, K experts, D features, n ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.moe import Counted, Dispatched, ExpertRanks


class Layout(NamedTuple):
    """Which tokens go to which rank."""

    source_S: Tensor
    """The tokens in order of the ranks that they go to."""
    indices_SK: Tensor
    """Their experts on that rank, -1 where another rank has it."""
    sizes: Any
    """On the host: the numbers of tokens and rows that go to each rank, those that come, and the ranks' marks."""


class Handle(NamedTuple):
    """The way back."""

    layout: Layout
    place_R: Tensor
    """For each row, its token among those that have arrived."""


class TokenExchange:
    def __init__(self, ranks: ExpertRanks) -> None:
        self._ranks = ranks

    def count(self, indices_TK: Tensor, experts: int) -> Counted:
        each = experts // self._ranks.size
        rank_TK = indices_TK // each
        every_n = torch.arange(self._ranks.size, device=indices_TK.device)
        goes_nT = (rank_TK[None] == every_n[:, None, None]).any(-1)
        rank_S, source_S = goes_nT.nonzero(as_tuple=True)
        here_SK = rank_TK[source_S] == rank_S[:, None]
        indices_SK = torch.where(here_SK, indices_TK[source_S] % each, -1)
        rows_n = (rank_TK.flatten()[None] == every_n[:, None]).sum(1)
        sent_n3 = torch.stack([torch.full_like(rows_n, self._ranks.mark()), goes_nT.sum(1), rows_n], dim=1)
        taken_n3 = torch.empty_like(sent_n3)
        self._ranks.all_to_all(taken_n3, sent_n3)
        sizes = torch.stack([sent_n3, taken_n3])
        return Counted(torch.bincount(indices_TK.flatten(), minlength=experts), Layout(source_S, indices_SK, sizes))

    def sizes(self, counted: Counted) -> tuple[Layout, int]:
        self._ranks.wait()
        sent, taken = counted.state.sizes.tolist()
        self._ranks.validate([row[0] for row in taken])
        sizes = {"sent": [row[1] for row in sent], "taken": [row[1] for row in taken]}
        rows = {"rows": sum(row[2] for row in taken)}
        return counted.state._replace(sizes={**sizes, **rows}), len(counted.counts_E) // self._ranks.size

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, sized: tuple[Layout, int]) -> Dispatched:
        layout, each = sized
        # tokens and weights in one message, so that the backward has one message too
        both_SD = torch.cat([x_TD, weights_TK.to(x_TD.dtype)], 1)[layout.source_S]
        both_AD = self._exchange(both_SD, layout.sizes["taken"], layout.sizes["sent"])
        x_AD, weights_AK = both_AD.split([x_TD.shape[1], weights_TK.shape[1]], dim=1)
        indices_AK = layout.indices_SK.new_empty(len(x_AD), weights_TK.shape[1])
        self._ranks.all_to_all(indices_AK, layout.indices_SK, layout.sizes["taken"], layout.sizes["sent"])
        flat = torch.where(indices_AK < 0, each, indices_AK).flatten()
        order_R = flat.sort(stable=True).indices[: layout.sizes["rows"]]
        place_R = order_R // max(1, weights_TK.shape[1])
        counts_e = torch.bincount(flat, minlength=each + 1)[:each]
        return Dispatched(x_AD[place_R], weights_AK.flatten()[order_R], counts_e, Handle(layout, place_R))

    def combine(self, rows_RD: Tensor, state: Handle, *, tokens: int, dtype: torch.dtype) -> Tensor:
        layout, place_R = state
        sizes = layout.sizes
        sums_AD = rows_RD.new_zeros(sum(sizes["taken"]), rows_RD.shape[1])
        sums_AD = sums_AD.index_add(0, place_R, rows_RD)
        sums_SD = self._exchange(sums_AD, sizes["sent"], sizes["taken"])
        out_TD = sums_SD.new_zeros(tokens, rows_RD.shape[1]).index_add(0, layout.source_S, sums_SD)
        return out_TD.to(dtype)

    def _exchange(self, rows: Tensor, taken: list[int], sent: list[int]) -> Tensor:
        return _exchange(rows, self._ranks, taken, sent)


def _exchange(rows: Tensor, ranks: ExpertRanks, taken: list[int], sent: list[int]) -> Tensor:
    return _Exchange.apply(ranks.joining(rows), ranks, taken, sent)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: ExpertRanks, taken: list[int], sent: list[int]) -> Tensor:
        ctx.back = ranks, sent, taken
        arrived = rows.new_empty(sum(taken), rows.shape[1])
        ranks.all_to_all(arrived, rows.contiguous(), taken, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchange(grad, *ctx.back), None, None, None
