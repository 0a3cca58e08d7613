"""The ranks that hold the experts of one layer, and how they exchange rows and wait for each other."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.groups import all_to_all

T = TypeVar("T")


class Waits(Protocol):
    """Begins joint operations and waits for them, and raises if another rank fails meanwhile: `Team` is one."""

    def start(self, begin: Callable[[], T]) -> T: ...

    def settle(self, work: dist.Work | None, held: Tensor) -> None: ...

    def catch_up(self, what: str) -> None: ...


class ExpertRanks:
    """This rank among those that hold a layer's experts. A `Pipeline` makes it, and an `Exchange` communicates with it.

    All its operations are collectives: each rank must run the same ones in the same order.
    """

    def __init__(self, team: Waits, group: dist.ProcessGroup) -> None:
        """`group` is only used here."""
        self._team, self.group = team, group
        self.rank, self.size = group.rank(), group.size()
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        """The dummy scalar that makes every rank take part in backwards (`joining`). It gets no gradient."""

    def all_to_all(
        self, taken: Tensor, sent: Tensor, taken_sizes: list[int] | None = None, sent_sizes: list[int] | None = None
    ) -> None:
        """Exchange rows: so many come from each rank, and so many go to each; without sizes, equally many.

        The current stream waits for it; with tensors on the host, the calling thread does.
        """
        work = self._team.start(
            lambda: all_to_all(self.group, taken, sent, self._sizes(taken, taken_sizes), self._sizes(sent, sent_sizes))
        )
        self._team.settle(work, taken)

    def wait(self) -> None:
        """Make the host wait until the current stream has run everything queued on it; raise if another rank fails."""
        self._team.catch_up("the numbers of rows that other ranks send")

    def joining(self, x: Tensor) -> Tensor:
        """Return the same numbers in a tensor that requires gradients whenever gradients are on.

        What comes after runs its backward on every rank, also on one where the tensor itself needs no gradient. Without
        that rank, the others would wait for it in the backward.
        """
        return _Joining.apply(self.anchor, x)  # type: ignore[no-any-return, no-untyped-call]

    def _sizes(self, rows: Tensor, sizes: list[int] | None) -> list[int]:
        return [len(rows) // self.size] * self.size if sizes is None else sizes


class _Joining(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, anchor: Tensor, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad if ctx.needs_input_grad[1] else None
