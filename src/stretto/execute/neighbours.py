"""What a supervisor knows of its neighbours in the ring, and when it blames one of them."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from stretto.execute.ring_messages import NOBODY, RingMessage

_JOINING = 60.0  # seconds that a rank may wait for its neighbours
LATE = 1.0  # seconds between two polls, after which this process itself was stopped


class Neighbours:
    """The last heartbeat of each neighbour, and when the neighbour was last heard of."""

    def __init__(self, rank: int, *, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._on_one_machine = False
        self._beats: dict[int, tuple[RingMessage, float]] = {}  # the last heartbeat with any news, and its time
        self._heard: dict[int, float] = {}
        self._left: set[int] = set()
        self._polled = time.monotonic()

    def begin(self, peers: Iterable[int], doing: str, *, on_one_machine: bool) -> None:
        """Begin to watch these ranks; on one machine, their processes can be inspected."""
        now, self._on_one_machine = time.monotonic(), on_one_machine
        for peer in peers:
            self._beats[peer] = RingMessage(peer, doing=doing), now
            self._heard[peer] = now + _JOINING  # it may still wait for its other neighbour, and send nothing yet
        self._polled = now

    def beats(self) -> list[tuple[int, RingMessage]]:
        """Return the last heartbeat of each neighbour."""
        return [(peer, message) for peer, (message, _) in list(self._beats.items())]

    def hear(self, peer: int) -> None:
        """Record that a neighbour was heard of now."""
        self._heard[peer] = time.monotonic()

    def update(self, peer: int, message: RingMessage) -> None:
        """Record a heartbeat or a farewell."""
        now = time.monotonic()
        if message.bye:
            self._left.add(peer)
            self._beats[peer] = message, now
            self._heard.pop(peer, None)
        else:
            message.quiet = 0.0  # not news
            if self._beats[peer][0] != message:
                self._beats[peer] = message, now

    def lose(self, peer: int) -> str | None:
        """Record that a connection has ended; return what the peer last did if it died, None if it said farewell."""
        self._heard.pop(peer, None)
        return None if peer in self._left else self._beats[peer][0].doing

    def forgive(self) -> None:
        """Extend all deadlines if this process itself was stopped: it could not hear anything meanwhile."""
        now = time.monotonic()
        late, self._polled = now - self._polled, now
        if late > LATE:
            self._heard = {peer: heard + late for peer, heard in self._heard.items()}
            self._beats = {peer: (message, since + late) for peer, (message, since) in self._beats.items()}

    def failures(self, turn: int, label: str, *, most_silence: float) -> Iterator[tuple[str, int]]:
        """Yield why the ranks cannot go on, and the rank to blame; `turn` and `label` are this rank's own."""
        now = time.monotonic()
        for peer, (message, since) in list(self._beats.items()):
            silence = now - self._heard.get(peer, now)
            # A process that runs may be silent, as a long garbage collection lets none of its threads run.
            busy = self._on_one_machine and silence < self._timeout and not _is_stopped(message.process)
            if silence > most_silence and not busy:
                yield f"rank {peer} has not been heard of for {silence:.0f} s; it was last seen {message.doing}", peer
            elif message.busy and now - since > self._timeout and silence < LATE:
                yield f"rank {peer} has been {message.doing} for {now - since:.0f} s", peer
            elif label and peer in self._left and message.turn < turn:
                why = "it was closed, or its program has ended"
                yield f"rank {peer} left {message.doing}, before {label}: {why}", peer
            elif label and message.label and message.turn == turn and message.label != label:
                labels = f"rank {peer} runs {message.label} while rank {self._rank} runs {label}"
                yield f"{labels}; all ranks must call the same", NOBODY


def _is_stopped(process: int) -> bool:
    """Return whether a process of this machine is stopped, or gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] in "TtZX"
    except (OSError, IndexError):
        return True
