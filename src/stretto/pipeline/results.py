"""What a step returns."""

from stretto.ir.errors import PipelineError
from stretto.pipeline.losses import Total
from stretto.timeline import Timeline


class StepResult:
    """The result of a step, on every rank."""

    def __init__(self, total: Total, timeline: Timeline | None = None) -> None:
        self._total = total
        self.timeline = timeline
        """When each task of each rank ran, in seconds: on rank 0, if the step was recorded."""

    @property
    def loss(self) -> float:
        """The mean loss over the microbatches; with (sum, count) losses, the sum divided by the count. Waits for it."""
        return self._total.mean

    def __repr__(self) -> str:
        try:
            return f"StepResult(loss={self.loss:g})"
        except PipelineError as error:
            return f"StepResult({error})"
