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
    - `weights_R`: how much each of these rows counts, in the weights' dtype. Their gradients come back through it.
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

    All ranks run the same phases in the same order, in backwards too: tokens and outputs require gradients on every
    rank. Layers that choose by their data which experts they run would break this rule: send `ExpertRanks.mark()` with
    the counts, and give the marks of all ranks to `ExpertRanks.validate` in `sizes`. Only `sizes` may make the host
    wait for the device.
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


def validate_routing(x_TD: object, indices_TK: object, weights_TK: object) -> None:
    """Raise PipelineError unless there are tokens, and for each of them as many experts as weights."""
    if not isinstance(x_TD, Tensor) or x_TD.dim() != 2:
        raise PipelineError(f"tokens go to experts as a tensor, tokens × features (got {_described(x_TD)})")
    if not _is(indices_TK, shape=(len(x_TD), None), numbers="whole"):
        raise PipelineError(
            f"the experts of {len(x_TD)} tokens are a tensor of whole numbers, tokens × experts of each "
            f"(got {_described(indices_TK)})"
        )
    assert isinstance(indices_TK, Tensor)
    if not _is(weights_TK, shape=tuple(indices_TK.shape), numbers="floating-point"):
        raise PipelineError(
            f"the weights of experts are a floating-point tensor with a number for each of their indices, "
            f"{tuple(indices_TK.shape)} (got {_described(weights_TK)})"
        )


# What an exchange returns is checked by what the host knows, so without a wait.


def validate_counted(exchange: Exchange, counted: object, *, experts: int) -> None:
    name = f"{type(exchange).__name__}.count"
    if not isinstance(counted, Counted):
        raise PipelineError(f"{name} must return a stretto.moe.Counted (got {_described(counted)})")
    if not _is(counted.counts_E, shape=(experts,), numbers="whole"):
        raise PipelineError(
            f"{name} must return a count of rows for each of all {experts} experts (got {_described(counted.counts_E)})"
        )


def validate_dispatched(
    exchange: Exchange, dispatched: object, x_TD: Tensor, weights_TK: Tensor, *, experts: int
) -> None:
    name = f"{type(exchange).__name__}.dispatch"
    if not isinstance(dispatched, Dispatched):
        raise PipelineError(f"{name} must return a stretto.moe.Dispatched (got {_described(dispatched)})")
    rows_RD, weights_R, counts_e, _ = dispatched
    if not _is(rows_RD, shape=(None, x_TD.shape[1]), dtype=x_TD.dtype):
        raise PipelineError(
            f"{name} must return rows of {x_TD.shape[1]} features in {x_TD.dtype} (got {_described(rows_RD)})"
        )
    if not _is(weights_R, shape=(len(rows_RD),), dtype=weights_TK.dtype):
        raise PipelineError(
            f"{name} must return a weight in {weights_TK.dtype} for each of {len(rows_RD)} rows "
            f"(got {_described(weights_R)})"
        )
    if not _is(counts_e, shape=(experts,), numbers="whole"):
        raise PipelineError(
            f"{name} must return a count of rows for each of this rank's {experts} experts (got {_described(counts_e)})"
        )
    for what, given, returned in (("rows", x_TD, rows_RD), ("weights", weights_TK, weights_R)):
        _validate_gradient(f"the {what} that {name} returns", given, returned)


def validate_combined(
    exchange: Exchange, out_TD: object, rows_RD: Tensor, *, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    name = f"{type(exchange).__name__}.combine"
    if not _is(out_TD, shape=shape, dtype=dtype):
        raise PipelineError(f"{name} must return tokens × features {shape} in {dtype} (got {_described(out_TD)})")
    assert isinstance(out_TD, Tensor)
    _validate_gradient(f"what {name} returns", rows_RD, out_TD)


def _is(
    value: object, *, shape: tuple[int | None, ...], dtype: torch.dtype | None = None, numbers: str | None = None
) -> bool:
    """Return whether a value is a tensor of this shape (None is any size), and of this dtype or kind of numbers."""
    return (
        isinstance(value, Tensor)
        and value.dim() == len(shape)
        and all(size in (None, there) for size, there in zip(shape, value.shape, strict=True))
        and dtype in (None, value.dtype)
        and numbers in (None, _numbers(value))
    )


def _numbers(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "floating-point"
    return "other" if tensor.is_complex() or tensor.dtype == torch.bool else "whole"


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} in {value.dtype}"
    return f"a {type(value).__name__}"


def _validate_gradient(what: str, given: Tensor, returned: Tensor) -> None:
    if torch.is_grad_enabled() and given.requires_grad and not returned.requires_grad:
        raise PipelineError(f"{what} must require gradients, as what it gets does: something in it detaches them")


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
        return Dispatched(dispatch(x_TD, sized), sized.sort(weights_TK), sized.counts_E, sized)

    def combine(self, rows_RD: Tensor, state: Permutation, *, tokens: int, dtype: torch.dtype) -> Tensor:
        return combine(rows_RD, state, tokens=tokens, dtype=dtype)
