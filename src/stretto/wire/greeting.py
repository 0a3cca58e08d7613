"""The first words of two processes: which protocol they speak and, where anybody could have come, that they share a
secret. It is never told: each proves it by a keyed hash of numbers that both have just drawn."""

import hashlib
import hmac
import secrets

import msgspec

from stretto.wire.frames import MalformedMessage

_NONCE = 32  # bytes


class Hello(msgspec.Struct, tag=True):
    protocol: int
    nonce: bytes
    name: str = ""
    """Who says so."""


class Proof(msgspec.Struct, tag=True):
    """That one knows the secret: a keyed hash of both nonces."""

    digest: bytes


class Greeting:
    """One side of it. Both say hello; then who came proves that it knows the secret, and only then who was there, so
    that nobody gets a proof for nothing."""

    def __init__(self, protocol: int, secret: bytes | None, *, serves: bool, name: str = "") -> None:
        self.hello = Hello(protocol, secrets.token_bytes(_NONCE), name)
        self._secret, self._serves = secret, serves
        self._other: Hello | None = None

    def meet(self, message: object) -> str:
        """The other side's first word; who it says it is."""
        if not isinstance(message, Hello) or len(message.nonce) != _NONCE:
            raise MalformedMessage("no hello")
        if message.protocol != self.hello.protocol:
            raise MalformedMessage(
                f"a hello in protocol {message.protocol}, and this side speaks {self.hello.protocol}"
            )
        self._other = message
        return message.name

    def proof(self) -> Proof:
        """This side's."""
        return Proof(self._digest(self._serves))

    def check(self, message: object) -> None:
        """The other side's."""
        theirs = self._digest(not self._serves)
        if not isinstance(message, Proof) or not hmac.compare_digest(message.digest, theirs):
            raise MalformedMessage("no proof that it knows the secret")

    def _digest(self, server: bool) -> bytes:
        assert self._other is not None
        assert self._secret
        here, there = (self.hello, self._other) if server == self._serves else (self._other, self.hello)
        said = msgspec.msgpack.encode(["server" if server else "client", here, there])
        return hmac.digest(self._secret, said, hashlib.sha256)
