"""What a device does: actions, pairs of them, the two ends of a transfer, and sums of gradients."""

from dataclasses import dataclass
from enum import StrEnum

from stretto.ir.errors import PlanError


class Op(StrEnum):
    """What an action does with its stage and microbatch."""

    F = "F"  # forward
    B = "B"  # full backward: I, then W
    I = "I"  # backward for the input  # noqa: E741
    W = "W"  # backward for the weights


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One unit of work, e.g. "2F0": stage 2, forward, microbatch 0."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """A forward and an independent full backward, woven together: "(0F3;3B1)OVERLAP_F_B"."""

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if (self.forward.op, self.backward.op) != (Op.F, Op.B):
            raise PlanError(f"a pair is a forward and a full backward (got {self.forward} and {self.backward})")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


class End(StrEnum):
    """An end of a transfer: activations travel for F, gradients for B."""

    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One end of a transfer, e.g. "3SEND_F1": stage 3 sends its output of microbatch 1."""

    stage: int
    end: End
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.end.value}{self.microbatch}"


@dataclass(frozen=True, slots=True, order=True)
class Reduce:
    """A sum of a stage's gradients over devices: "3REDUCE_GRAD"."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}REDUCE_GRAD"
