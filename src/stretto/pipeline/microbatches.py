"""Cuts a batch into microbatches."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.ir.placement import Placement
from stretto.pipeline.pytree import Value, tensors_of, version_of


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The numbers of this rank's microbatches among those of all replicas.

    >>> from stretto.ir.mesh import MeshShape
    >>> Microbatches.of(Placement(((0,), (1,)), 8, MeshShape.of({"dp": 2})), device=1)
    Microbatches(first=4, count=4, replicas=2)
    """

    first: int
    count: int
    """The number of microbatches of each replica."""
    replicas: int

    @staticmethod
    def of(placement: Placement, device: int) -> "Microbatches":
        count = placement.microbatches // placement.replicas
        return Microbatches(count * placement.replica(device), count, placement.replicas)

    @property
    def total(self) -> int:
        """The number of microbatches of all replicas."""
        return self.count * self.replicas

    def fewer(self, count: int) -> "Microbatches":
        """Return the numbers with so many microbatches in each replica."""
        return Microbatches(self.first // self.count * count, count, self.replicas)


def rows_of(batch: Value | Iterable[Value], name: str) -> int:
    """Return the number of rows of a whole batch, or 0 for a list or iterator of microbatches.

    A tensor, or a container of tensors other than a list, is a whole batch. Raise PipelineError for anything else.
    """
    if not _is_whole(batch):
        if isinstance(batch, str | bytes | Mapping | np.ndarray) or not isinstance(batch, Iterable):
            raise PipelineError(
                f"{name} are a {type(batch).__name__}; "
                "give a tensor, a tuple or dict of tensors (such as dict(batch)), or a list of microbatches"
            )
        return 0
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(batch)}
    if len(sizes) != 1 or sizes == {0}:
        raise PipelineError(
            f"{name} cannot be cut into microbatches: their tensors' first dimensions are {sorted(sizes)}"
        )
    return sizes.pop()


def needed(batch: Value, name: str, rank: int, stage: int) -> Value:
    """Return the batch that a rank was given for a stage. Raise PipelineError if it is missing."""
    if batch is None:
        raise PipelineError(f"rank {rank} runs stage {stage} and needs {name}")
    return batch


def row_counts(rows: int, count: int) -> list[int]:
    """Return the rows of each microbatch: nearly equal, the first ones one row longer.

    >>> row_counts(7, 3)
    [3, 2, 2]
    """
    return [rows // count + (k < rows % count) for k in range(count)]


def cut(batch: Value | Iterable[Value], count: int, name: str) -> tuple[list[Value], int]:
    """Return the microbatches, and the number of rows of the batch (0 if the microbatches came as a list or iterator).

    A whole batch is cut along its first dimension. A list or iterator holds the microbatches themselves.
    """
    rows = rows_of(batch, name)
    if not rows:
        return _listed(batch, count, name), 0
    if rows < count:
        raise PipelineError(
            f"{name} have {rows} rows, but the plan has {count} microbatches; a step needs at least one row for each"
        )
    ends = [0, *accumulate(row_counts(rows, count))]
    leaves, spec = pytree.tree_flatten(batch)
    return [
        pytree.tree_unflatten([_rows(leaf, first, last) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        for first, last in pairwise(ends)
    ], rows


def validate_cuts(inputs: int, targets: int, count: int) -> None:
    """Raise PipelineError unless inputs and targets of so many rows (0 for a list) are cut in the same places."""
    if inputs and targets and inputs != targets:
        raise PipelineError(f"inputs have {inputs} rows, but targets have {targets}; give as many of both")
    if bool(inputs) != bool(targets) and (inputs + targets) % count:
        whole, listed = ("inputs", "targets") if inputs else ("targets", "inputs")
        raise PipelineError(
            f"{whole} have {inputs + targets} rows, which {count} microbatches cannot share equally, and {listed} are "
            "a list of microbatches; give both as one batch, or both as lists"
        )


def _listed(batch: Iterable[Value], count: int, name: str) -> list[Value]:
    microbatches, versions = [], []
    for microbatch in islice(batch, count + 1):
        microbatches.append(microbatch)
        versions.append([version_of(tensor) for tensor in tensors_of(microbatch)])
    if len(microbatches) != count:
        more = "more" if len(microbatches) > count else len(microbatches)
        raise PipelineError(f"the plan has {count} microbatches, but {name} has {more}")
    if versions != [[version_of(tensor) for tensor in tensors_of(microbatch)] for microbatch in microbatches]:
        raise PipelineError(f"the iterator of {name} changes a tensor that it gave before; let it give copies")
    return microbatches


def _rows(tensor: Tensor, first: int, last: int) -> Tensor:
    """Return some rows. If they need no gradient, use `.data`: in-place changes then bump no other slice's version."""
    part = tensor[first:last]
    return part if part.requires_grad else part.data


def _is_whole(batch: Value) -> bool:
    if isinstance(batch, list):
        return False
    return isinstance(batch, Tensor) or not pytree.tree_structure(batch).is_leaf()
