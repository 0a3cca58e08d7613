"""A layer or phase that the backward recomputes whole."""

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stretto.ir.errors import PipelineError
from stretto.pipeline.module_buffers import ModuleBuffers, Snapshot
from stretto.pipeline.pytree import Value, flatten_once
from stretto.pipeline.rng import Generators


class CheckpointedRun:
    """One run of a layer that is recomputed whole, on the same input and with the same random numbers."""

    def __init__(
        self, number: int, function: Callable[[Value], Value], buffers: ModuleBuffers, generators: Generators, seed: int
    ) -> None:
        self._number, self._function, self._buffers = number, function, buffers
        self._generators, self._seed = generators, seed
        self._snapshot: Snapshot | None = None
        self._parameters = buffers.parameters()

    def run(self, value: Value) -> Value:
        leaves, self._spec = flatten_once(value, f"layer {self._number}")
        self._versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        return checkpoint(self._once, *leaves, use_reentrant=False, preserve_rng_state=False)

    def _once(self, *leaves: Any) -> Value:
        """Run the layer, for the first time or again, on new containers, since it may modify those it gets."""
        if self._snapshot is not None:
            self._buffers.validate_parameters(self._parameters)
        if self._versions != [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]:
            raise PipelineError(
                f"layer {self._number} was given what was changed in place afterwards, so it cannot be checkpointed"
            )
        value = pytree.tree_unflatten(leaves, self._spec)
        if self._snapshot is None:
            self._generators.seed(self._seed)
            with self._buffers.followed() as self._snapshot:  # usable at once: a layer may differentiate inside
                return self._function(value)
        with self._generators.kept(), self._buffers.restored(self._snapshot):
            self._generators.seed(self._seed)
            return self._function(value)
