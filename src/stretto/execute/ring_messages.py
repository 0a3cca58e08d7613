"""The messages that supervisors pass around the ring."""

import msgspec

NOBODY = -1
LARGEST = 1 << 20  # bytes of a message


class RingMessage(msgspec.Struct, omit_defaults=True):
    """A heartbeat, a failure, or a farewell."""

    rank: int
    process: int = 0
    doing: str = ""
    """What the sender is doing; only a heartbeat or a farewell has it."""
    turn: int = 0
    """How many turns (steps and the like) the sender has begun."""
    label: str = ""
    """The name of the current turn; empty between turns."""
    busy: bool = False
    """Whether the sender works on its turn, rather than waiting for other ranks."""
    quiet: float = 0.0
    """Seconds since the sender last knew of a busy rank."""
    failure: str = ""
    """Why the ranks cannot go on; every rank passes this on."""
    about: int = NOBODY
    """The rank that the failure is about."""
    bye: bool = False


DECODER = msgspec.msgpack.Decoder(RingMessage)
