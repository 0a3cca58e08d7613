"""A batch, cut into microbatches."""

from collections.abc import Iterable

from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.runtime.structure import Value, leaves_of, rebuilt, tensors_of


def cut(batch: Value | Iterable[Value] | None, count: int, name: str) -> list[Value] | None:
    """A whole batch (a tensor, tuple or dict) is cut along its first dimension; all else holds microbatches."""
    if batch is None:
        return None
    if not isinstance(batch, Tensor | tuple | dict):
        given = list(batch)
        if len(given) != count:
            raise PipelineError(f"the plan has {count} microbatches, but {name} has {len(given)}")
        return given
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(batch)}
    if len(sizes) != 1 or sizes == {0} or next(iter(sizes)) % count:
        raise PipelineError(
            f"{name} cannot be cut into {count} equal microbatches: its tensors' first dimensions are {sorted(sizes)}"
        )
    size = sizes.pop() // count
    leaves = leaves_of(batch)
    return [
        rebuilt(batch, [leaf[k * size : (k + 1) * size] if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        for k in range(count)
    ]
