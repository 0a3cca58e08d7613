"""What a step or an evaluation returns."""

from collections.abc import Mapping
from functools import cached_property

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import Value
from stretto.pipeline.totals import Total
from stretto.timeline import Timeline


class StepResult:
    """The result of a step or an evaluation, on every rank."""

    def __init__(
        self,
        total: Total | None,
        timeline: Timeline | None = None,
        *,
        metrics: Mapping[str, Total | None] | None = None,
        outputs: list[Value] | None = None,
    ) -> None:
        """A total is None if there were no targets to compute it from."""
        self._total, self._metrics = total, metrics or {}
        self.timeline = timeline
        """When each task of each rank ran, in seconds: on rank 0, if the step was recorded."""
        self.outputs = outputs
        """The last layer's output of each microbatch, if asked for; None for those that this rank has not run."""

    @property
    def loss(self) -> float:
        """The mean loss over the batch; with (sum, count) losses, the sum divided by the count. Waits for it."""
        return _with_targets(self._total).mean

    @property
    def count(self) -> float | None:
        """What the loss was divided by, if it returns sums and counts, such as the number of tokens; otherwise None."""
        total = _with_targets(self._total)
        return float(total.count()) if total.counted else None

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics of an evaluation over the whole batch, by name."""
        return {name: _with_targets(total).raw_mean for name, total in self._metrics.items()}

    def __repr__(self) -> str:
        try:
            values = {"loss": self.loss, **self.metrics}
            return f"StepResult({', '.join(f'{name}={value:g}' for name, value in values.items())})"
        except PipelineError as error:
            return f"StepResult({error})"


def _with_targets(total: Total | None) -> Total:
    if total is None:
        raise PipelineError("this evaluation was given no targets, so it has no loss and no metrics")
    return total
