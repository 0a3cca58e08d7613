"""The ranks that hold the experts of one layer, and how they exchange rows and wait for each other."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.groups import all_to_all
from stretto.ir.errors import PipelineError

T = TypeVar("T")


class Waits(Protocol):
    """Begins joint operations and waits for them, and raises if another rank fails meanwhile: `Team` is one."""

    def start(self, begin: Callable[[], T]) -> T: ...

    def settle(self, work: dist.Work | None, held: Tensor) -> None: ...

    def catch_up(self, what: str) -> None: ...


class ExpertRanks:
    """This rank among those that hold a layer's experts. A `Pipeline` makes it, and an `Exchange` communicates with it.

    `all_to_all` is a collective: each rank must run the same ones in the same order.

    - `rank`, `size`: this rank's number among the expert-parallel ranks, and how many there are. Of E experts, rank r
      holds r · E / size to (r + 1) · E / size − 1.
    - `group`: their `torch.distributed` process group, for kernels that need one. The pipeline makes it, and uses it
      for nothing but this exchange. The functions of `torch.distributed` do not know it: call its methods.
    - `turn`, `current`: what the runtime runs, and the number of the experts that run; `mark` combines them.
    - `note`: told what experts return, and gradients that a layer may differentiate in turn. The runtime takes it with
      `outputs`, and runs its backward also if a layer does not use it. In a backward, what is recomputed is not noted.
    - `anchor`: the dummy scalar of `joining`. It gets no gradient.
    """

    def __init__(self, team: Waits, group: dist.ProcessGroup) -> None:
        self._team, self.group = team, group
        self.rank, self.size = group.rank(), group.size()
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self.turn: tuple[int, ...] = ()
        self.current = 0
        self._outputs: list[Tensor] | None = None

    def begin(self, turn: tuple[int, ...], *, notes: bool) -> None:
        """Begin a turn; with `notes`, what experts return in it is noted."""
        self.turn, self._outputs = turn, [] if notes else None

    def note(self, out: Tensor) -> None:
        """Note what experts have returned."""
        if self._outputs is not None and out.requires_grad:
            self._outputs.append(out)

    def outputs(self) -> list[Tensor]:
        """Return what experts have returned in this turn, and forget it: its graph holds this object."""
        outputs, self._outputs = self._outputs or [], None
        return outputs

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
        that rank, the others would wait for it in the backward. Experts pass what they exchange through it; an exchange
        needs it only for gradients that it exchanges in its own backward, so that these can be differentiated in turn.
        """
        return _Joining.apply(self.anchor, x, self.note)  # type: ignore[no-any-return, no-untyped-call]

    def mark(self) -> int:
        """Return a number below 2⁶² that differs if ranks run other experts, or the same at another time.

        An exchange sends it with its counts, and compares what comes (`validate`). Otherwise ranks whose layers choose
        by their data which experts they run would exchange rows of different layers.
        """
        running = repr((*self.turn, self.current, torch.is_grad_enabled()))
        return int.from_bytes(blake2b(running.encode(), digest_size=8).digest()) >> 2

    def validate(self, marks: Sequence[int]) -> None:
        """Raise PipelineError if the mark of some rank, in order of ranks, differs from this rank's."""
        other = next((rank for rank, mark in enumerate(marks) if mark != marks[self.rank]), None)
        if other is not None:
            raise PipelineError(
                f"rank {other} of the expert-parallel ranks runs other experts at this point than this rank "
                f"({self.rank}); every rank must run the same experts in the same order, whatever its data"
            )

    def _sizes(self, rows: Tensor, sizes: list[int] | None) -> list[int]:
        return [len(rows) // self.size] * self.size if sizes is None else sizes


class _Joining(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, note: Callable[[Tensor], None]) -> Tensor:  # noqa: ARG004
        ctx.note = note
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # With create_graph, this gradient has a backward with exchanges, and layers may leave it unused on some ranks.
        if torch.is_grad_enabled():
            ctx.note(grad)
        return None, grad if ctx.needs_input_grad[1] else None, None
