"""How rows get to the ranks that hold their experts, and back: the adapter point for communication kernels.

T tokens of this rank, R rows at its experts, K experts for each token, D features, E experts on all ranks, e experts on
each rank.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.moe.permutation import Permutation, combine, dispatch, validate_rows


class Counted(NamedTuple):
    """What `Exchange.count` has begun.

    - `counts_E`: how many of this rank's own rows go to each of all E experts, a tensor of whole numbers on the tokens'
      device.
    - `state`: what the exchange needs next, a pytree of tensors and plain values.
    """

    counts_E: Tensor
    state: Any


class Dispatched(NamedTuple):
    """Rows that have arrived at this rank's experts.

    - `rows_RD`: rows × D features, in order of this rank's experts. A token has a row for each expert that it goes to.
    - `weights_R`: how much each of these rows counts. Where weights get gradients, they come back through it.
    - `counts_e`: how many of these rows each of this rank's e experts has, a tensor of whole numbers on their device.
    - `state`: what `Exchange.combine` needs, a pytree of tensors, which may carry gradients, and plain values.
    """

    rows_RD: Tensor
    weights_R: Tensor
    counts_e: Tensor
    state: Any


class Exchange(Protocol):
    """Takes tokens to their experts and back, in four phases; kernels such as DeepEP's are adapted by implementing it.

    Each phase is a task of its own, and phases of several microbatches are in flight at once. So an exchange stores
    nothing between phases: all that a later phase needs is in what an earlier one returns. These values are pytrees
    (named tuples, tuples, lists, dicts) of tensors, numbers, strings and None. Gradients flow through all tensors in
    them.

    All ranks run the same phases in the same order, and so they must in the backward: pass what is differentiated
    through `ExpertRanks.joining`. Only `sizes` may make the host wait for the device. Layers that choose by their data
    which experts they run would break this rule: send `ExpertRanks.mark()` with the counts, and give the marks of all
    ranks to `ExpertRanks.validate` in `sizes`.
    """

    def count(self, indices_TK: Tensor, experts: int) -> Counted:
        """Begin to tell the ranks how many rows will come, on the communication stream. `experts` is E."""
        ...

    def sizes(self, counted: Counted) -> Any:
        """Return what `dispatch` needs, after the host has waited for the numbers (`ExpertRanks.wait`)."""
        ...

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, sized: Any) -> Dispatched:
        """Take the tokens to their experts, and with them the weights. Both tensors may get gradients."""
        ...

    def combine(self, rows_RD: Tensor, state: Any, *, tokens: int, dtype: torch.dtype) -> Tensor:
        """Return for each of T tokens the sum of its experts' outputs, in this dtype.

        `rows_RD` are the outputs of this rank's experts, in the order of `Dispatched.rows_RD`, and weighed already;
        `state` is `Dispatched.state`.
        """
        ...


def validate_exchange(exchange: object) -> None:
    """Raise PipelineError if an object lacks methods of an exchange."""
    methods = ("count", "sizes", "dispatch", "combine")
    if missing := [name for name in methods if not callable(getattr(exchange, name, None))]:
        raise PipelineError(
            f"an exchange has the methods {', '.join(methods)}, and {type(exchange).__name__} has no "
            f"{', '.join(missing)}; see stretto.moe.Exchange"
        )


# What an exchange returns is checked by what the host knows, so without a wait.


def validate_counted(exchange: Exchange, counted: object, *, experts: int) -> None:
    name = f"{type(exchange).__name__}.count"
    if not isinstance(counted, Counted):
        raise PipelineError(f"{name} must return a stretto.moe.Counted (got a {type(counted).__name__})")
    if tuple(counted.counts_E.shape) != (experts,):
        shape = tuple(counted.counts_E.shape)
        raise PipelineError(f"{name} must return a count of rows for each of all {experts} experts (got shape {shape})")


def validate_dispatched(exchange: Exchange, rows: object, *, experts: int) -> None:
    name = f"{type(exchange).__name__}.dispatch"
    if not isinstance(rows, Dispatched):
        raise PipelineError(f"{name} must return a stretto.moe.Dispatched (got a {type(rows).__name__})")
    if tuple(rows.counts_e.shape) != (experts,):
        shape = tuple(rows.counts_e.shape)
        raise PipelineError(
            f"{name} must return a count of rows for each of this rank's {experts} experts (got shape {shape})"
        )
    if tuple(rows.weights_R.shape) != (len(rows.rows_RD),):
        shape = tuple(rows.weights_R.shape)
        raise PipelineError(f"{name} must return a weight for each of {len(rows.rows_RD)} rows (got shape {shape})")


def validate_combined(exchange: Exchange, out: object, *, shape: tuple[int, int], dtype: torch.dtype) -> None:
    name = f"{type(exchange).__name__}.combine"
    if not isinstance(out, Tensor):
        raise PipelineError(f"{name} must return a tensor (got a {type(out).__name__})")
    if (tuple(out.shape), out.dtype) != (shape, dtype):
        raise PipelineError(
            f"{name} must return tokens × features {shape} in {dtype} (got {tuple(out.shape)} in {out.dtype})"
        )


class Local:
    """The exchange of a rank that holds all experts: the rows only change their order."""

    def count(self, indices_TK: Tensor, experts: int) -> Counted:
        order = Permutation.by_expert(indices_TK, experts=experts)
        return Counted(order.counts_E, order)

    def sizes(self, counted: Counted) -> Permutation:
        assert isinstance(counted.state, Permutation)
        total = counted.counts_E.sum()
        if total.is_cuda:  # where only the device can look at it without a wait
            torch._assert_async(total == len(counted.state.source_R), "tokens are routed to experts that do not exist")
        else:
            validate_rows(counted.state, int(total))
        return counted.state

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, sized: Permutation) -> Dispatched:
        weights_R = weights_TK.flatten().index_select(0, sized.source_R)
        return Dispatched(dispatch(x_TD, sized), weights_R, sized.counts_E, sized)

    def combine(self, rows_RD: Tensor, state: Permutation, *, tokens: int, dtype: torch.dtype) -> Tensor:
        return combine(rows_RD, state, tokens=tokens, dtype=dtype)
