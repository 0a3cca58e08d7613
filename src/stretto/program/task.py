"""Tasks and the lanes they queue on."""

from dataclasses import dataclass
from enum import IntEnum

from stretto.ir.action import Action, End, Op, Pair, Reduce, Transfer
from stretto.ir.text import Item


class Kind(IntEnum):
    """What a task does. B and PAIR end when the input gradient is ready; WGRAD is the rest of their work."""

    F = 0
    B = 1
    I = 2  # noqa: E741
    W = 3
    PAIR = 4
    WGRAD = 5
    SEND_F = 6
    RECV_F = 7
    SEND_B = 8
    RECV_B = 9
    RECOMPUTE = 10
    OFFLOAD = 11
    ONLOAD = 12
    H2D = 13
    BROADCAST = 14
    RELOAD = 15
    REDUCE = 16
    CALL = 17


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.PAIR, Kind.WGRAD, Kind.RECOMPUTE)
FORWARDS = (Kind.F, Kind.PAIR)
BACKWARDS = (Kind.B, Kind.I, Kind.PAIR)
"""Kinds that yield an input gradient."""
WEIGHTS = (Kind.W, Kind.WGRAD)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
COPIES = (Kind.OFFLOAD, Kind.ONLOAD)
"""Copies of activations to host memory, and back."""
UPDATES = (Kind.H2D, Kind.BROADCAST, Kind.RELOAD)
"""The steps of a weight update."""
PAIR_PHASES = (Kind.F, Kind.B, Kind.WGRAD, Kind.RECOMPUTE)
"""What a pair consists of where actions are split into phases."""
GRADIENTS = (*BACKWARDS, *WEIGHTS)
"""Kinds that add to the gradients of a stage's weights."""
EXPERT_SUM = -1
"""The part of a sum of a stage's experts' gradients, over the devices that hold the same experts."""
PHASE_LANES = ("compute", "comm", "host")
"""The lanes that phases run on."""


LANES: dict[Kind, tuple[str, ...]] = {
    **dict.fromkeys(COMPUTE, PHASE_LANES),
    **dict.fromkeys(SENDS, ("send",)),
    **dict.fromkeys(RECEIVES, ("recv",)),
    Kind.OFFLOAD: ("d2h",),
    Kind.ONLOAD: ("h2d",),
    Kind.REDUCE: ("reduce",),
    **{kind: (kind.name.lower(),) for kind in UPDATES},
}
"""The names of the lanes each kind may run on; user-defined calls may run on any lane."""


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """An in-order queue of a device.

    In training: "compute", "comm" (expert dispatch and combine), "host" (the host waits for numbers from the device),
    "d2h" and "h2d" (copies to and from host memory), "reduce" (sums of gradients over devices), and one end of each
    directed link to or from a peer.
    In a weight update: "h2d", "broadcast" and "reload". In a user-defined program: any name.
    """

    device: int
    name: str = "compute"
    peer: int | None = None

    def __str__(self) -> str:
        match self.name:
            case "send" if self.peer is not None:
                return f"send→{self.peer}"
            case "recv" if self.peer is not None:
                return f"recv←{self.peer}"
            case _:
                return self.name


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do on one lane. A pair's `stage` and `microbatch` are its forward's.

    In a weight update, `microbatch` is the bucket and `stage` is the device it comes from. A sum of gradients covers
    all microbatches; its `part` is 0, the number (from 1) of the tie whose gradients it sums, or `EXPERT_SUM`.
    """

    lane: Lane
    kind: Kind
    stage: int
    microbatch: int
    backward: tuple[int, int] | None = None
    """A pair's backward: its stage and microbatch."""
    part: int = 0
    phase: str = ""
    """If the task is only a part of its pass, `part` is the part's number and `phase` is its phase's name with its
    layer's number. In a user-defined program, `part` is the number of the call's name and `phase` is the name."""
    slot: int = -1
    """The buffer that the task fills, where buffers are reused; else −1. An offload fills one in host memory, numbered
    apart; all others fill one of their device."""
    woven: bool = False
    """Whether the task is a phase of a woven pair, and so takes its time in `Costs.woven`."""

    @property
    def device(self) -> int:
        return self.lane.device

    @property
    def awaited(self) -> str:
        """What tasks that need this one wait for, in words."""
        match self.kind:
            case Kind.RECV_F:
                return f"the output of {self.stage - 1}F{self.microbatch}"
            case Kind.RECV_B:
                return f"the gradient of {self.stage + 1}B{self.microbatch}"
            case Kind.SEND_F | Kind.SEND_B:
                return "what it sent to be taken"
            case Kind.REDUCE:
                experts = " experts" if self.part == EXPERT_SUM else ""
                return f"the sum of stage {self.stage}'s{experts} gradients over ranks"
            case _:
                return str(self)

    @property
    def item(self) -> Item | None:
        """The task in CSV; None for a WGRAD, which is part of the B or pair before it, and for kinds CSV lacks."""
        match self.kind:
            case Kind.SEND_F | Kind.RECV_F | Kind.SEND_B | Kind.RECV_B:
                return Transfer(self.stage, End[self.kind.name], self.microbatch)
            case Kind.REDUCE:
                return Reduce(self.stage)
            case Kind.PAIR:
                assert self.backward is not None
                return Pair(Action(self.stage, Op.F, self.microbatch), Action(self.backward[0], Op.B, self.backward[1]))
            case Kind.F | Kind.B | Kind.I | Kind.W:
                return Action(self.stage, Op[self.kind.name], self.microbatch)
            case _:
                return None

    def __str__(self) -> str:
        if self.kind is Kind.CALL:
            return self.phase
        if self.kind in UPDATES:
            return f"{self.kind.name}{self.microbatch}"
        if self.kind is Kind.WGRAD:
            name = f"{self.stage}B{self.microbatch}.wgrad"
        else:
            name = str(self.item or f"{self.stage}{self.kind.name}{self.microbatch}")
        return f"{name}.{self.phase}" if self.phase else name
