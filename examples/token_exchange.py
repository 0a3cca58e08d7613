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
        rows = x_TD[layout.source_S], weights_TK[layout.source_S]
        x_AD, weights_AK = _exchange(self._ranks, layout.sizes["taken"], layout.sizes["sent"], *rows)
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
        sums_AD = _summed(rows_RD, place_R, sum(sizes["taken"]))
        (sums_SD,) = _exchange(self._ranks, sizes["sent"], sizes["taken"], sums_AD)
        return _summed(sums_SD, layout.source_S, tokens).to(dtype)


def _summed(rows_RD: Tensor, place_R: Tensor, places: int) -> Tensor:
    """Add up the rows of each place. Unlike `index_add`, `scatter_add` does not save them for the backward."""
    sums = rows_RD.new_zeros(places, rows_RD.shape[1])
    return sums.scatter_add(0, place_R[:, None].expand_as(rows_RD), rows_RD)


def _exchange(ranks: ExpertRanks, taken: list[int], sent: list[int], *rows: Tensor) -> tuple[Tensor, ...]:
    return _Exchange.apply(ranks, taken, sent, *rows)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Sends rows of tensors. It is one function, so that all gradients go back on every rank, in the same order."""

    @staticmethod
    def forward(ctx: Any, ranks: ExpertRanks, taken: list[int], sent: list[int], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.back = ranks, sent, taken
        arrived = tuple(each.new_empty(sum(taken), *each.shape[1:]) for each in rows)
        for here, there in zip(arrived, rows, strict=True):
            ranks.all_to_all(here, there.contiguous(), taken, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ranks, taken, sent = ctx.back
        first, *others = grads
        return None, None, None, *_exchange(ranks, taken, sent, ranks.joining(first), *others)
