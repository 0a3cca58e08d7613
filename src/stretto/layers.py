"""Layers and their phases: what a model is made of, for planning.

>>> from stretto.layers import DENSE, EMBEDDING, LOSS, MOE, cut_layers
>>> [len(stage) for stage in cut_layers([EMBEDDING, DENSE, *[MOE] * 5, LOSS], stages=4)]
[2, 2, 2, 2]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, TypeVar

from stretto.ir.errors import PlanError

__all__ = [
    "DENSE",
    "EMBEDDING",
    "EXPERT_PARALLEL_MOE",
    "LOSS",
    "MOE",
    "MTP",
    "Layer",
    "Phase",
    "cut_layers",
    "parse_layers",
]

_T = TypeVar("_T")
PhaseLane = Literal["compute", "comm", "host"]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a layer that runs on one lane. Each compute phase has weights, and so a weight gradient.

    A phase on the "host" lane makes the host wait for numbers from the device. A phase without a backward passes on
    what it got, and only adds what it has learned.
    """

    name: str
    lane: PhaseLane = "compute"
    backward: bool = True
    joint: bool = False
    """Whether the expert-parallel ranks run it together, as they do every phase on the "comm" lane."""

    @property
    def is_joint(self) -> bool:
        return self.joint or self.lane == "comm"


@dataclass(frozen=True, slots=True)
class Layer:
    """Phases that run one after another in the forward, and in reverse in the backward."""

    name: str
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.phases, tuple) or not all(isinstance(phase, Phase) for phase in self.phases):
            raise PlanError(f"a layer has a tuple of Phases (got {self.phases!r:.40})")


_ATTN, _MLP, _LOSS = Phase("attn"), Phase("mlp"), Phase("loss")
EMBEDDING = Layer("embedding", (Phase("embedding"),))
DENSE = Layer("dense", (_ATTN, _MLP))
MOE = Layer("moe", (_ATTN, Phase("dispatch", "comm"), _MLP, Phase("combine", "comm")))
EXPERT_PARALLEL_MOE = Layer(
    "moe",
    (
        _ATTN,
        Phase("counts", "comm", backward=False),
        Phase("sizes", "host", backward=False),
        *MOE.phases[1:],
    ),
)
"""The same with experts on several ranks: they first tell each other how many rows will come ("counts"), and the hosts
wait for these numbers ("sizes"). On a mesh with ep, `MOE` is the same without this exchange of counts."""
MTP = Layer("mtp", (*MOE.phases, _LOSS))
"""Multi-token prediction: one more MoE layer with a loss of its own."""
LOSS = Layer("loss", (_LOSS,))


def parse_layers(text: str, *, ep: int = 1) -> list[Layer]:
    """Read a model's layers in order. With several expert-parallel ranks (`ep`), moe is `EXPERT_PARALLEL_MOE`.

    >>> [layer.name for layer in parse_layers("embedding, dense, moe*2, loss")]
    ['embedding', 'dense', 'moe', 'moe', 'loss']
    """
    moe = MOE if ep == 1 else EXPERT_PARALLEL_MOE
    mtp = Layer(MTP.name, (*moe.phases, _LOSS))
    known = {layer.name: layer for layer in (EMBEDDING, DENSE, moe, mtp, LOSS)}
    layers: list[Layer] = []
    for word in text.split(","):
        name, times, count = (side.strip() for side in word.partition("*"))
        number = int(count) if count.isascii() and count.isdecimal() and len(count) < 6 else 0 if times else 1
        if name not in known or number < 1:
            raise PlanError(f"{word.strip()!r:.40} is no layer; write e.g. moe or moe*3, of {', '.join(known)}")
        layers += [known[name]] * number
    return layers


def cut_layers(
    layers: Sequence[_T], *, stages: int, balance: Sequence[int] | None = None
) -> tuple[tuple[_T, ...], ...]:
    """Divide a model's layers among stages: evenly, with one more for the first stages, or as `balance` says.

    >>> [len(stage) for stage in cut_layers([EMBEDDING, *[MOE] * 5, LOSS], stages=3)]
    [3, 2, 2]
    """
    if type(stages) is not int or stages < 1:
        raise PlanError(f"stages is a whole number of at least 1 (got {stages!r:.40})")
    if balance is not None and not all(type(share) is int for share in balance):
        raise PlanError(f"balance has a whole number of layers for each stage (got {balance!r:.40})")
    if balance is None:
        each, more = divmod(len(layers), stages)
        balance = [each + (stage < more) for stage in range(stages)]
    if len(balance) != stages or sum(balance) != len(layers) or min(balance) < 1:
        shares = f"{stages} shares of at least 1 that add up (got {list(balance)})"
        raise PlanError(f"{len(layers)} layers on {stages} stages need {shares}")
    return tuple(tuple(layers[a:b]) for a, b in pairwise(accumulate(balance, initial=0)))
