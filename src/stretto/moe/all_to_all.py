"""The exchange of rows by PyTorch's own collectives.

T tokens of this rank and their R rows, A rows that arrive at its experts, K experts for each token, D features,
n ranks, E experts on all ranks, e = E / n experts on each.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.moe.exchange import Counted, Dispatched
from stretto.moe.expert_ranks import ExpertRanks
from stretto.moe.fp8 import pack, unpack
from stretto.moe.kernels import has_kernels
from stretto.moe.permutation import (
    Permutation,
    combine,
    dispatch,
    inverted,
    tokens_of,
    validate_rows,
)


class Counting(NamedTuple):
    """The state after `count`: numbers that may still be on their way to the host."""

    order: Permutation
    """This rank's rows in order of all experts, and so of the ranks that hold them."""
    arriving_ne: Tensor
    """How many rows come from each rank for each of this rank's experts."""
    host: Tensor
    """On the host: what goes to each rank and what comes from each rank, its mark and a number for each expert."""


class Sized(NamedTuple):
    """The state after `sizes`."""

    order: Permutation
    arriving_ne: Tensor
    sent: list[int]
    arriving: list[int]


class Route(NamedTuple):
    """The state after `dispatch`: the way back."""

    order: Permutation
    by_expert: Permutation
    """The rows that arrive, from the order of ranks to the order of this rank's experts."""
    sent: list[int]
    arriving: list[int]


class AllToAll:
    """Sends each row to the rank that holds its expert, and its output back: an all-to-all with uneven splits each.

    Rank r holds experts r·e to (r + 1)·e − 1. Weights travel with the tokens, and a token's outputs come back one by
    one. They are summed in float32 on the token's own rank, to the bit as on one rank that holds all experts. With
    `fp8`, tokens travel to the experts as in `stretto.moe.fp8`; weights, outputs and gradients travel as they are.
    """

    def __init__(self, ranks: ExpertRanks, *, fp8: bool = False) -> None:
        self._ranks, self._fp8 = ranks, fp8
        # Numbers that the device writes to host memory, which must stay until the host has waited, by their addresses:
        # phases hand on other tensors of the same memory.
        self._on_the_way: dict[int, Tensor] = {}

    def count(self, indices_TK: Tensor, experts: int) -> Counted:
        size = self._ranks.size
        if experts % size:
            raise PipelineError(f"{experts} experts cannot be divided among {size} ranks; use a divisor of {experts}")
        order = Permutation.by_expert(indices_TK, experts=experts)
        sent, arriving = both = order.counts_E.new_empty(2, size, 1 + experts // size)
        sent[:, 0].fill_(self._ranks.mark())
        sent[:, 1:].copy_(order.counts_E.view(size, experts // size))
        self._ranks.all_to_all(arriving, sent)
        return Counted(order.counts_E, Counting(order, arriving[:, 1:], self._to_host(both)))

    def sizes(self, counted: Counted) -> Sized:
        self._ranks.wait()
        order, arriving_ne, host = counted.state
        self._on_the_way.pop(host.data_ptr(), None)
        sent, arriving = host[:, :, 1:].sum(2).tolist()
        self._ranks.validate(host[1, :, 0].tolist())
        validate_rows(order, sum(sent))
        return Sized(order, arriving_ne, sent, arriving)

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, sized: Sized) -> Dispatched:
        order = sized.order
        by_expert = _transposed(sized.arriving_ne, rows=sum(sized.arriving))
        route = Route(order, by_expert, sized.sent, sized.arriving)
        if self._fp8:
            rows_AD, weights_A = _DispatchFp8.apply(x_TD, order.sort(weights_TK), self._ranks, route)  # type: ignore[no-untyped-call]
        else:
            rows = dispatch(x_TD, order), order.sort(weights_TK)
            rows_AD, weights_A = _exchange(self._ranks, route.arriving, route.sent, *rows)
            rows_AD, weights_A = dispatch(rows_AD, by_expert), by_expert.sort(weights_A)
        return Dispatched(rows_AD, weights_A, by_expert.counts_E, route)

    def combine(self, rows_RD: Tensor, state: Route, *, tokens: int, dtype: torch.dtype) -> Tensor:
        rows_AD = dispatch(rows_RD, state.by_expert.inverse())
        (rows_RD,) = _exchange(self._ranks, state.sent, state.arriving, rows_AD)
        return combine(rows_RD, state.order, tokens=tokens, dtype=dtype)

    def _to_host(self, numbers: Tensor) -> Tensor:
        """Begin to copy numbers to the host; those of a host tensor are there already."""
        if not numbers.is_cuda:
            return numbers
        host = torch.empty_like(numbers, device="cpu", pin_memory=True)
        if has_kernels(numbers):
            from stretto.moe.row_kernels import copy_to

            copy_to(self._kept(host), numbers)
            return host
        return host.copy_(numbers, non_blocking=True)

    def _kept(self, host: Tensor) -> Tensor:
        """Keep host memory that the device writes to until `sizes` has waited."""
        self._on_the_way[host.data_ptr()] = host
        return host


def _transposed(counts_ne: Tensor, *, rows: int) -> Permutation:
    """Return the order by expert of rows that come ordered by rank, and from each rank by expert.

    Blocks of rows change places, and rows within a block keep their order, so a block's distance is all that is needed.
    """
    counts_e = counts_ne.sum(0)
    if has_kernels(counts_ne):
        from stretto.moe.row_kernels import transpose

        return Permutation(*transpose(counts_ne, rows=rows), counts_e)
    counts_en = counts_ne.T.contiguous()
    ends_ne, ends_en = (counts.flatten().cumsum(0).view_as(counts) for counts in (counts_ne, counts_en))
    distances = (ends_ne.T - ends_en).flatten().repeat_interleave(counts_en.flatten(), output_size=rows)
    source_R = torch.arange(rows, device=counts_ne.device) + distances
    return Permutation(source_R, inverted(source_R), counts_e)


def _exchange(ranks: ExpertRanks, taken: list[int], sent: list[int], *rows: Tensor) -> tuple[Tensor, ...]:
    return _Exchange.apply(ranks, taken, sent, *rows)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    """An all-to-all for each tensor. The backward is one the opposite way, in which every rank takes part again.

    Tensors that travel together are one node of autograd's graph, so their gradients do so too, in the same order on
    all ranks, whichever of them a rank needs.
    """

    @staticmethod
    def forward(ctx: Any, ranks: ExpertRanks, taken: list[int], sent: list[int], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.back = ranks, sent, taken
        return tuple(_moved(each, ranks, taken, sent) for each in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ranks, taken, sent = ctx.back
        first, *others = grads
        return None, None, None, *_exchange(ranks, taken, sent, ranks.joining(first), *others)


class _DispatchFp8(torch.autograd.Function):
    """Takes tokens to their experts as bytes, which are made once for each token; gradients come back as they are."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_R: Tensor, ranks: ExpertRanks, route: Route) -> tuple[Tensor, Tensor]:
        ctx.tokens, features = x_TD.shape
        ctx.save_for_backward(*route.order, *route.by_expert)
        ctx.back = ranks, route.sent, route.arriving
        token_R = tokens_of(route.order.source_R, tokens=ctx.tokens)
        packed = _moved(pack(x_TD).index_select(0, token_R), ranks, route.arriving, route.sent)
        rows_AD = unpack(packed, route.by_expert.source_R, features=features, dtype=x_TD.dtype)
        return rows_AD, route.by_expert.sort(_moved(weights_R, ranks, route.arriving, route.sent))

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor, grad_A: Tensor) -> Any:
        order, by_expert = Permutation(*ctx.saved_tensors[:3]), Permutation(*ctx.saved_tensors[3:])
        ranks, taken, sent = ctx.back
        back = by_expert.inverse()
        rows = dispatch(ranks.joining(grad_AD), back), back.sort(grad_A)
        rows_RD, weights_R = _exchange(ranks, taken, sent, *rows)
        return combine(rows_RD, order, tokens=ctx.tokens), weights_R, None, None


def _moved(rows: Tensor, ranks: ExpertRanks, taken: list[int], sent: list[int]) -> Tensor:
    arrived = rows.new_empty(sum(taken), *rows.shape[1:])
    ranks.all_to_all(arrived, rows.contiguous(), taken, sent)
    return arrived
