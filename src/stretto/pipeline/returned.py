"""What recomputed sites return: what others save of it comes back in the memory layout of the first run."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import storage_of


class Layout(NamedTuple):
    """How a tensor lies in its memory."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> "Layout":
        return Layout(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor that lies so in the memory of another."""
        return memory.as_strided(*self)

    def without_repeats(self) -> "Layout":
        """Return the layout of the first of those entries that share one place, as in expanded tensors."""
        size = torch.Size(1 if step == 0 else length for length, step in zip(self.size, self.stride, strict=True))
        return self._replace(size=size)


class Returned(NamedTuple):
    """Outputs of a site that share memory."""

    numbers: tuple[int, ...]
    """Their numbers among the leaves of the output."""
    layouts: tuple[Layout, ...]
    elements: int
    """The size of their memory."""

    @staticmethod
    def of(leaves: Sequence[Tensor], numbers: tuple[int, ...]) -> "Returned":
        first = leaves[numbers[0]]
        elements = first.untyped_storage().nbytes() // first.element_size()
        return Returned(numbers, tuple(Layout.of(leaves[number]) for number in numbers), elements)

    def again(self, name: str, leaves: Sequence[Tensor], saved: Layout) -> Tensor:
        """Return what was saved of this memory in the first run of a site, out of the leaves of its second run."""
        outputs = [leaves[number].detach() for number in self.numbers]
        if len(set(map(storage_of, outputs))) == 1 and Returned.of(leaves, self.numbers) == self:
            return saved.view(outputs[0])
        # What the site started from lies otherwise now, as what is unpacked from float8 does.
        with torch.no_grad():
            memory = outputs[0].new_empty(self.elements)
            known = torch.zeros_like(memory, dtype=torch.bool)
            for output, layout in zip(outputs, self.layouts, strict=True):
                once = layout.without_repeats()
                once.view(memory).copy_(output[tuple(slice(length) for length in once.size)])
                once.view(known).fill_(True)
            if not bool(saved.view(known).all()):
                raise PipelineError(f"what was saved of an output of {name} is more than it returns; recompute both")
        return saved.view(memory)
