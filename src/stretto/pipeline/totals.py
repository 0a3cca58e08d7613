"""The total of a step's losses, or of a metric, over all ranks."""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import isfinite, nan

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.groups import all_reduce
from stretto.execute.team import Team
from stretto.ir.errors import PipelineError

VALUE, COUNT, KIND = range(3)
"""The rows of a table, with a column for each microbatch: its sum, its count, and its kind.

The kind is 1 if the function returned a sum and a count, 0 if it returned a mean and every microbatch weighs alike. It
is −n if it returned a mean, and each microbatch weighs by its share of a batch of n rows; then the sum is the mean
times the microbatch's rows, and the count is these rows.
"""


class Total:
    """The sum of all ranks' tables, and of extra numbers (`more`), once `wait` has returned."""

    def __init__(
        self,
        table: Tensor,
        more: Tensor,
        settle: Callable[[], None],
        then: Callable[[], None],
        what: str = "the loss",
    ) -> None:
        """`settle` makes the current stream wait for sums on a device, and the host for others; `then` makes the host
        wait for the device.
        """
        self._table, self._more, self._settle, self._then, self.what = table, more, settle, then, what
        self._settled = self._arrived = False

    def wait(self) -> None:
        """Wait until the sums have arrived."""
        if not self._arrived:
            self._wait_on_stream()
            self._then()
            self._arrived = True

    def _wait_on_stream(self) -> None:
        if not self._settled:
            self._settle()
            self._settled = True

    def more(self) -> list[float]:
        """Return the sums of the extra numbers."""
        self.wait()
        return self._more.tolist()

    @property
    def counted(self) -> bool:
        """Whether the values are sums with counts. Raise PipelineError if ranks weigh microbatches differently."""
        self.wait()
        kinds = sorted(set(self._table[KIND].tolist()))
        if len(kinds) > 1:
            raise PipelineError(mixed(self.what) if kinds[-1] == 1 else _unlike([-kind for kind in kinds]))
        return kinds == [1]

    def count(self) -> Tensor:
        """Return the total count of the step; on a device, the host does not wait for it."""
        self._wait_on_stream()
        return self._table[COUNT].sum()

    @cached_property
    def mean(self) -> float:
        """The mean over the microbatches, or the sum divided by the total count. Raise if it is not finite."""
        self.wait()
        values, counts, _ = self._table.tolist()
        for microbatch, value in enumerate(values):
            if not isfinite(value):
                raise PipelineError(f"{self.what} of microbatch {microbatch} is not finite")
        if not (total := sum(counts)):
            raise PipelineError(NOTHING_COUNTED)
        return float(sum(values) / total)

    @cached_property
    def raw_mean(self) -> float:
        """The same, whatever it is; not a number if nothing was counted."""
        self.wait()
        values, counts, _ = self._table.tolist()
        return float(sum(values) / sum(counts)) if sum(counts) else nan


NOTHING_COUNTED = "the loss counted nothing in the whole step: all its counts are 0"


def mixed(what: str) -> str:
    """Return the error text for a function that returns a count for some microbatches only."""
    return f"{what} of some microbatches has a count, of others none; it must have one in all or none"


def _unlike(rows: Sequence[float]) -> str:
    shares = [f"by its share of {number:g} rows" if number else "alike" for number in rows]
    return (
        "ranks that run the last stage were given batches of different sizes: there a microbatch weighs "
        f"{' and elsewhere '.join(shares)}; give all of them the same"
    )


def sum_tables(
    team: Team,
    named_tables: Sequence[tuple[str, Tensor]],
    then: Callable[[], None],
    *,
    flags: Sequence[bool] = (False,),
) -> list[Total]:
    """Start to sum each table over all ranks, and with them the number of ranks that have each of the flags.

    There is at least one flag, so that ranks meet even if tables are empty. A table's name is what errors call its
    function. `then` makes the host wait for a device.
    """
    names, tables = zip(*named_tables, strict=True)
    flagged = [torch.full((1,), float(flag), dtype=torch.float64, device=team.device) for flag in flags]
    whole = torch.cat([*(table.flatten() for table in tables), *flagged])
    everybody = team.everybody
    assert everybody is not None
    work = team.start(lambda: all_reduce(everybody, whole, dist.ReduceOp.SUM))

    def settle() -> None:
        team.settle(work, whole)

    *parts, more = torch.split(whole, [*(table.numel() for table in tables), len(flags)])
    every = zip(parts, tables, names, strict=True)
    return [Total(part.view_as(table), more, settle, then, name) for part, table, name in every]
