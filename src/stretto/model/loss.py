"""The losses of our models and of cut ones.

N sequences, T tokens of each, V words of the vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.model.config import ModelError
from stretto.model.values import CutOutput, Output

IGNORED = -100


def causal_lm_loss(
    output: Tensor | Output, targets_NT: Tensor, *, mtp_weight: float = 0.3, balance_weight: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the next tokens, times their count, and that count; -100 in targets is not counted.

    `targets_NT` are the tokens that follow the input's, position by position. With MTP, the mean cross entropy of the
    tokens after them is added, times `mtp_weight`; with auxiliary losses, their sum, times `balance_weight`.
    """
    given = Output(output, None, None) if isinstance(output, Tensor) else output
    if not isinstance(given, Output):
        raise ModelError(
            f"causal_lm_loss takes logits or a stretto.model.Output (got {type(output).__name__}); "
            "transformers_loss is for models cut from transformers"
        )
    if targets_NT.shape != given.logits_NTV.shape[:-1]:
        raise ModelError(
            f"targets are the tokens that follow the inputs, of shape {tuple(given.logits_NTV.shape[:-1])} (got "
            f"{tuple(targets_NT.shape)})"
        )
    count = (targets_NT != IGNORED).sum()
    total = _summed_cross_entropy(given.logits_NTV, targets_NT)
    if given.mtp_logits_NTV is not None:
        later_NT = targets_NT[:, 1:]
        mean = _summed_cross_entropy(given.mtp_logits_NTV, later_NT) / (later_NT != IGNORED).sum().clamp(min=1)
        total = total + mtp_weight * mean * count
    if given.balance is not None:
        total = total + balance_weight * given.balance.to(total.dtype) * count
    return total, count


def transformers_loss(output: Tensor | CutOutput, labels_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of each token's prediction of the next one, and the number of predictions.

    `labels_NT` are the tokens themselves, -100 where there is nothing to predict. They are shifted here;
    `causal_lm_loss` takes targets that are shifted already.

    A `Pipeline` divides by the count of the whole step, so every token weighs the same. The router loss of a microbatch
    is added once for each of its predictions, so for one microbatch the mean is the loss of the uncut model.

    >>> total, count = transformers_loss(torch.zeros(1, 3, 8), torch.tensor([[5, 2, -100]]))  # predicts only the 2
    >>> f"{total:.3f}", int(count)
    ('2.079', 1)
    """
    logits_NTV, router_loss = output if isinstance(output, CutOutput) else (output, None)
    if labels_NT.shape != logits_NTV.shape[:-1] or labels_NT.is_floating_point():
        raise PipelineError(
            f"labels are token ids of shape {tuple(logits_NTV.shape[:-1])}, one for each token of the inputs "
            f"(got {str(labels_NT.dtype).removeprefix('torch.')} of shape {tuple(labels_NT.shape)})"
        )
    next_NT = F.pad(labels_NT[:, 1:], (0, 1), value=IGNORED)
    total = _summed_cross_entropy(logits_NTV, next_NT)
    count = (next_NT != IGNORED).sum()
    return total if router_loss is None else total + router_loss * count, count


def _summed_cross_entropy(logits_NTV: Tensor, targets_NT: Tensor) -> Tensor:
    """Sum the cross entropies, in float32 at least."""
    exact = torch.promote_types(logits_NTV.dtype, torch.float32)
    logits = logits_NTV.flatten(0, 1).to(exact)
    return F.cross_entropy(logits, targets_NT.flatten(), ignore_index=IGNORED, reduction="sum")
