"""Keeps expert-parallel ranks together: each runs every exchange of tokens that the others run, in the backward too."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from stretto.ir.action import Op
from stretto.ir.errors import PipelineError
from stretto.moe.exchange import Exchange
from stretto.moe.expert_ranks import ExpertRanks
from stretto.moe.experts import experts_of
from stretto.pipeline.pytree import Value, tensors_of
from stretto.pipeline.segments import depending


class Exchanges:
    """The exchanges of a stage's experts."""

    def __init__(self, module: nn.Module, stage: int, exchange: Exchange, expert_ranks: ExpertRanks) -> None:
        """`module` holds the stage's layers; the exchange connects its experts with those of the other ranks."""
        self._experts, self._stage = experts_of(module), stage
        self._exchange, self._ranks = exchange, expert_ranks
        self._turns = 0  # in the current step

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect the experts while a step runs."""
        self._turns = 0
        for number, experts in enumerate(self._experts):
            experts.exchange, experts.members, experts.number = self._exchange, self._ranks, number
        try:
            yield
        finally:
            self._ranks.outputs()
            for experts in self._experts:
                experts.exchange = experts.members = None

    def take_turn(self, op: Op, part: int) -> None:
        """Say what runs now, so that ranks notice if one of them runs something else.

        Ranks run the same passes in the same order, on microbatches of other numbers: turns are counted.
        """
        self._turns += 1
        self._ranks.begin((self._stage, self._turns, ord(op), part), notes=op is Op.F)

    def kept_in(self, value: Value) -> Value:
        """Return a part's output such that its backward runs through all that experts returned in the part."""
        outputs = self._ranks.outputs()
        if not outputs or not torch.is_grad_enabled():
            return value
        leaves, spec = pytree.tree_flatten(value)
        real = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not real:
            raise PipelineError(f"a layer of stage {self._stage} has experts, but returns no tensor of real numbers")
        leaf = depending(real[0], outputs, tensors_of(value))
        return pytree.tree_unflatten([leaf if other is real[0] else other for other in leaves], spec)

    def kept_in_loss(self, loss: Tensor, output: Value) -> Tensor:
        """Return a loss whose backward runs through all of the output, and all that experts returned in the part."""
        return depending(loss, [*tensors_of(output), *self._ranks.outputs()])
