"""The loss of a cut model, as `transformers` computes it from labels.

N sequences, T tokens of each, V words of the vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.model.values import CutOutput

IGNORED = -100


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
    exact = torch.promote_types(logits_NTV.dtype, torch.float32)
    total = F.cross_entropy(
        logits_NTV.flatten(0, 1).to(exact), next_NT.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    count = (next_NT != IGNORED).sum()
    return total if router_loss is None else total + router_loss * count, count
