"""The greeting of two processes: a check of the protocol version and, optionally, mutual proof of a shared secret."""

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
    """The name of the side that sends it."""


class Proof(msgspec.Struct, tag=True):
    """A keyed hash of both hellos, which proves that its sender knows the secret."""

    digest: bytes


class Greeting:
    """One side of a greeting.

    Both sides send a hello with a fresh nonce. With a secret, the client then sends its proof, and only if that is
    valid the server sends its own: a client without the secret gets no proof. The secret itself is never sent.
    """

    def __init__(self, protocol: int, secret: bytes | None, *, serves: bool, name: str = "") -> None:
        self.hello = Hello(protocol, secrets.token_bytes(_NONCE), name)
        self._secret, self._serves = secret, serves
        self._other: Hello | None = None

    def meet(self, message: object) -> str:
        """Accept the peer's hello; return the peer's name. Raise MalformedMessage if the protocols differ."""
        if not isinstance(message, Hello) or len(message.nonce) != _NONCE:
            raise MalformedMessage("no hello")
        if message.protocol != self.hello.protocol:
            raise MalformedMessage(
                f"a hello in protocol {message.protocol}, and this side speaks {self.hello.protocol}"
            )
        self._other = message
        return message.name

    def proof(self) -> Proof:
        """Return this side's proof."""
        return Proof(self._digest(self._serves))

    def check(self, message: object) -> None:
        """Raise MalformedMessage unless this is a valid proof by the peer."""
        expected = self._digest(not self._serves)
        if not isinstance(message, Proof) or not hmac.compare_digest(message.digest, expected):
            raise MalformedMessage("no proof that it knows the secret")

    def _digest(self, server: bool) -> bytes:
        assert self._other is not None
        assert self._secret
        prover, verifier = (self.hello, self._other) if server == self._serves else (self._other, self.hello)
        content = msgspec.msgpack.encode(["server" if server else "client", prover, verifier])
        return hmac.digest(self._secret, content, hashlib.sha256)
