"""Cuts a batch into microbatches."""

from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import Value, tensors_of, version_of


def cut(batch: Value | Iterable[Value], count: int, name: str) -> tuple[list[Value], int]:
    """Return the microbatches, and the number of rows of the batch (0 if the microbatches came as a list or iterator).

    A tensor, or a container of tensors other than a list, is one batch and is cut along its first dimension. A list or
    iterator holds the microbatches themselves.
    """
    if not _is_whole(batch):
        if isinstance(batch, str | bytes | Mapping | np.ndarray) or not isinstance(batch, Iterable):
            raise PipelineError(
                f"{name} are a {type(batch).__name__}; "
                "give a tensor, a tuple or dict of tensors (such as dict(batch)), or a list of microbatches"
            )
        microbatches, versions = [], []
        for microbatch in islice(batch, count + 1):
            microbatches.append(microbatch)
            versions.append([version_of(tensor) for tensor in tensors_of(microbatch)])
        if len(microbatches) != count:
            more = "more" if len(microbatches) > count else len(microbatches)
            raise PipelineError(f"the plan has {count} microbatches, but {name} has {more}")
        if versions != [[version_of(tensor) for tensor in tensors_of(microbatch)] for microbatch in microbatches]:
            raise PipelineError(f"the iterator of {name} changes a tensor that it gave before; let it give copies")
        return microbatches, 0
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(batch)}
    if len(sizes) != 1 or sizes == {0} or next(iter(sizes)) % count:
        raise PipelineError(
            f"{name} cannot be cut into {count} equal microbatches: its tensors' first dimensions are {sorted(sizes)}"
        )
    rows = sizes.pop()
    size = rows // count
    leaves, spec = pytree.tree_flatten(batch)
    return [
        pytree.tree_unflatten(
            [_rows(leaf, k * size, size) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        for k in range(count)
    ], rows


def _rows(tensor: Tensor, first: int, count: int) -> Tensor:
    """Return some rows. If they need no gradient, use `.data`: in-place changes then bump no other slice's version."""
    part = tensor[first : first + count]
    return part if part.requires_grad else part.data


def _is_whole(batch: Value) -> bool:
    if isinstance(batch, list):
        return False
    return isinstance(batch, Tensor) or not pytree.tree_structure(batch).is_leaf()
