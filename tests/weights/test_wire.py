"""A receiver's door: whoever does not speak the protocol, or does not know the secret, changes nothing."""

import contextlib
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openings import after_opening, opening
from pushes import until
from stretto.ir.errors import WeightsError
from stretto.weights.connection import PROTOCOL, Connection, PeerClosed
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.listener import connect, read_secret
from stretto.weights.manifest import Manifest, TensorSpec
from stretto.weights.messages import (
    Abandon,
    Beat,
    Begin,
    Begun,
    Buffers,
    Commit,
    End,
    Failed,
    Filled,
    Hello,
    Message,
    Open,
    Pause,
    Paused,
    Proof,
    Ready,
    Serving,
    Status,
    StatusRequest,
    Taken,
    Unknown,
)
from stretto.weights.receive.receiver import Receiver
from stretto.weights.send.remotes import status
from stretto.weights.send.sender import Sender
from weights_victims import Team, Worker, receive

SECONDS = 30.0
SECRET = b"7e4bd8a1c3f0925566d0a7be18c2f94d"


class Listener:
    """A receiver, somebody who may push to it, and anybody else."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.chmod(0o700)
        (folder / "secret").write_bytes(SECRET + b"\n")
        (folder / "secret").chmod(0o600)
        secret = folder / "secret" if kind == "tcp" else None
        self.secret = read_secret(secret)
        address = f"unix://{folder}/door" if kind == "unix" else f"tcp://127.0.0.1:{free_port()}"
        self.live = {"w": torch.zeros(100)}
        self.receiver = Receiver(address, into=self.live, device="cpu", secret_file=secret).start()
        self.address, self.kind = str(self.receiver.address), kind
        self.sender = Sender(device="cpu", secret_file=secret)
        self._pushes = 0

    def dial(self) -> socket.socket:
        where: Any = self.address.removeprefix("unix://")
        if self.kind == "tcp":
            where = "127.0.0.1", int(self.address.rsplit(":", 1)[1])
        made = socket.socket(socket.AF_UNIX if self.kind == "unix" else socket.AF_INET)
        made.connect(where)
        made.settimeout(SECONDS)
        return made

    def throw(self, data: bytes) -> bytes:
        """Say that, hang up, and hear what is said until the receiver hangs up too."""
        with self.dial() as stream:
            with contextlib.suppress(OSError):  # it may hang up any time
                stream.sendall(data)
                stream.shutdown(socket.SHUT_WR)
            return drained(stream)

    def push(self) -> None:
        """A proper one, which must arrive."""
        self._pushes += 1
        version = f"v{self._pushes}"
        self.sender.register(version, {"w": torch.full((100,), float(self._pushes))})
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self.sender.push(version, [self.address])
                break
            except WeightsError as error:  # a receiver may have yet to see that the one before has gone
                assert "is busy" in str(error)
                assert time.monotonic() < deadline
                threading.Event().wait(0.01)
        assert self.receiver.ensure_serving() == version
        assert self.live["w"].tolist() == [float(self._pushes)] * 100
        self.sender.free_buffers()  # which lets go of the receiver

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def drained(stream: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := stream.recv(1 << 16):
            data += part
    return data


@pytest.fixture(scope="module", params=["unix", "tcp"])
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    made = Listener(tmp_path_factory.mktemp("door"), request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    made = Listener(tmp_path_factory.mktemp("guarded"), "tcp")
    yield made
    made.close()


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(8, "big") + body


def said(*messages: Message) -> bytes:
    return b"".join(framed(msgspec.msgpack.encode(message)) for message in messages)


HELLO = said(Hello(PROTOCOL, bytes(32)))
# Nonsense.


def values() -> Any:
    """What msgpack can say."""
    leaves = st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(max_size=40), st.text()
    )
    return st.recursive(leaves, lambda it: st.one_of(st.lists(it), st.dictionaries(st.text(), it)), max_leaves=20)


def messages() -> Any:
    """All there are, without a buffer that could be opened."""
    number, text = st.integers(-(2**63), 2**63 - 1), st.text(max_size=20)
    buffers = st.builds(Buffers, number, number, handle=st.binary(max_size=64), offset=number)
    entry = st.builds(
        TensorSpec, text, st.sampled_from(["float32", "nonsense", ""]), st.lists(number, max_size=3).map(tuple)
    )
    manifests = st.builds(Manifest, text, st.lists(entry, max_size=3).map(tuple))
    return st.one_of(
        st.builds(Hello, st.sampled_from([PROTOCOL, 0, 2, 2**40]), st.binary(max_size=40)),
        st.builds(Proof, st.binary(max_size=40)),
        st.sampled_from(
            [Beat(), StatusRequest(), Unknown(), Paused(), Begin(), End(), Commit(), Ready([1, 2], [[0, 1]])]
        ),
        st.builds(Open, text, text, text, number, st.booleans(), buffers, st.floats(), manifests | st.none()),
        st.builds(opening, buffers=buffers),
        st.builds(Pause, st.sampled_from(["wait", "abort", "keep"]), st.floats()),
        st.builds(Filled, number, number, st.binary(max_size=40)),
        st.builds(Taken, number),
        st.builds(Serving, text, st.sampled_from(["verified", "delivered"])),
        st.builds(Serving, text),
        st.builds(Abandon, text),
        st.builds(Failed, text, st.booleans()),
        st.builds(Status, st.sampled_from(["serving", "dirty"]), text, text, text, text),
    )


def speech() -> Any:
    """Anything that may be said at a door: noise, noise in frames, frames that lie, messages at the wrong time."""
    noise = st.binary(max_size=200)
    sized = st.builds(lambda size, body: size.to_bytes(8, "big") + body, st.integers(0, 2**64 - 1), noise)
    valid = st.builds(lambda value: framed(msgspec.msgpack.encode(value)), values())
    proper = messages().map(said)
    cut = st.builds(lambda data, at: data[: int(at * len(data))], proper, st.floats(0, 1))
    flipped = st.builds(_flipped, proper, st.integers(0, 10**6))
    part = st.one_of(noise, noise.map(framed), sized, valid, proper, proper, cut, flipped)
    return st.builds(
        lambda hello, parts: hello + b"".join(parts), st.sampled_from([b"", HELLO]), st.lists(part, max_size=6)
    )


def _flipped(data: bytes, at: int) -> bytes:
    at %= 8 * len(data)
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


NOT_UTF8 = framed(msgspec.msgpack.encode(Abandon("?")).replace(b"\xa1?", b"\xa1\xff"))
LONG_LIST = framed(b"\x82\xa4type\xa5Ready\xa5skips\xdd\xff\xff\xff\xff")
DEEP = framed(b"\x82\xa4type\xa4Open\xa1x" + b"\x91" * 3000)


@given(data=speech())
@example(data=NOT_UTF8)
@example(data=HELLO + NOT_UTF8)
@example(data=HELLO + said(opening()) + NOT_UTF8)
@example(data=HELLO + LONG_LIST)
@example(data=DEEP)
@example(data=HELLO + DEEP)
@example(data=HELLO + (2**64 - 1).to_bytes(8, "big"))
@example(data=HELLO + said(opening(), Pause("wait", 60), Begin(), Filled(0, 0, b""), End(), Commit()))
@settings(max_examples=100)
def test_nonsense_changes_nothing(door: Listener, data: bytes) -> None:
    before = door.receiver.status
    files = len(os.listdir("/proc/self/fd"))
    door.throw(data)
    assert msgspec.structs.replace(door.receiver.status, error=before.error) == before  # it says why it refused
    door.push()
    deadline = time.monotonic() + SECONDS
    while len(os.listdir("/proc/self/fd")) > files:
        assert time.monotonic() < deadline, "files are left open"


@pytest.mark.parametrize("size", [4097, 1 << 40, 2**64 - 1])
def test_a_long_message_is_not_waited_for_before_the_greeting(door: Listener, size: int) -> None:
    with door.dial() as stream:
        stream.sendall(size.to_bytes(8, "big") + b"x")
        drained(stream)  # while this side has not hung up
    door.push()


def test_another_protocol_is_refused_and_logged(door: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stretto.weights.receive.receiver"), door.dial() as stream:
        stream.sendall(said(Hello(PROTOCOL + 1, bytes(32))))
        drained(stream)
        deadline = time.monotonic() + SECONDS
        while f"a hello in protocol {PROTOCOL + 1}" not in caplog.text:
            assert time.monotonic() < deadline
    assert door.address in caplog.text
    door.push()


@pytest.mark.parametrize(
    "word", [Filled(0, 0, b""), End(), Commit(), Hello(PROTOCOL, bytes(32)), Taken(0), Ready(), Failed("")], ids=repr
)
def test_messages_out_of_turn_are_refused_and_change_nothing(door: Listener, word: Message) -> None:
    before = door.receiver.status
    connection = connect(door.address, door.secret)
    try:
        (answer, told) = after_opening(connection, word, StatusRequest())
    finally:
        connection.close()
    assert isinstance(answer, Failed)
    assert not answer.dirty
    assert told == msgspec.structs.replace(before, error=answer.why) == door.receiver.status
    door.push()


def test_what_was_opened_before_is_not_taken_for_what_is_not_known(door: Listener) -> None:
    connection = connect(door.address, door.secret)
    shared = SharedBuffers(512, torch.device("cpu"))
    try:
        after_opening(connection)
        connection.send(Abandon("no"))
        buffers, files = shared.described(local=connection.local)
        other = msgspec.structs.replace(opening(buffers=buffers), digest="another", manifest=None)
        connection.send(other, files)
        assert isinstance(connection.recv(seconds=SECONDS)[0], Unknown)
        connection.send(Pause("wait", 60))
        assert connection.recv(seconds=SECONDS)[0] == Failed("nothing was opened", dirty=False)
    finally:
        connection.close()
        shared.close()
    door.push()


def test_nonsense_in_the_middle_of_an_update_is_no_end_of_the_receiver(door: Listener) -> None:
    connection = connect(door.address, door.secret)
    try:
        assert after_opening(connection, Pause("wait", 60), Begin()) == [Paused(), Begun()]
        assert door.receiver.status.state == "loading"
        connection._stream.sendall(NOT_UTF8)
        with pytest.raises(PeerClosed):
            connection.recv(seconds=SECONDS)
    finally:
        connection.close()
    until(lambda: door.receiver.status.state == "serving", SECONDS)  # for nothing was written
    assert "nonsense" in door.receiver.status.error
    door.push()


# Crowds.


def test_somebody_who_says_nothing_keeps_nobody_out_and_is_thrown_out(guarded: Listener) -> None:
    with guarded.dial() as silent, guarded.dial() as slow:
        slow.sendall(HELLO[:3])
        guarded.push()
        for stream in (silent, slow):
            drained(stream)
    guarded.push()


def test_a_crowd_that_says_nothing_keeps_nobody_out(door: Listener) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(40):
            held.enter_context(door.dial())
        door.push()
    door.push()


# A Unix socket.


def test_a_socket_is_for_its_user_alone(folder: Path) -> None:
    made = folder / "new" / "place"
    with Receiver(f"unix://{made}/door", lambda _: None):
        assert stat.S_IMODE((made / "door").stat().st_mode) == 0o600
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert not (made / "door").exists()


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(WeightsError, match=f"{folder} is open to others") as error:
        Receiver(f"unix://{folder}/door", lambda _: None)
    assert "\n" not in str(error.value)
    assert list(folder.iterdir()) == []


def test_what_a_killed_process_has_left_is_taken_over(folder: Path) -> None:
    address = f"unix://{folder}/door"
    victim = Worker(receive, address, "")
    try:
        assert victim.recv() == "ready"
        with pytest.raises(WeightsError, match=f"another process listens at {address}"):
            Receiver(address, lambda _: None)
        os.kill(victim.pid, signal.SIGKILL)
        Team.fall_of(victim)
    finally:
        victim.end()
    assert (folder / "door").exists()
    with Receiver(address, lambda _: None, version="next"):
        assert status(address).version == "next"


def test_what_a_stopped_process_holds_is_not_taken_away(folder: Path) -> None:
    with contextlib.ExitStack() as held:
        busy = held.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(folder / "door"))
        busy.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:  # until nobody can connect any more
                stream = held.enter_context(socket.socket(socket.AF_UNIX))
                stream.setblocking(False)
                stream.connect(str(folder / "door"))
        with pytest.raises(WeightsError, match="another process listens"):
            Receiver(f"unix://{folder}/door", lambda _: None)
        assert (folder / "door").exists()


def test_what_is_no_socket_is_left_alone(folder: Path) -> None:
    (folder / "door").write_text("precious")
    with pytest.raises(WeightsError, match="is no socket"):
        Receiver(f"unix://{folder}/door", lambda _: None)
    assert (folder / "door").read_text() == "precious"


# Addresses.


BAD = [
    "",
    "engine",
    "unix:engine",
    "unix://engine",
    "unix:///" + 200 * "x",
    "unix:///\0",
    "unix:///dev/null/door",
    "tcp://",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:port",
    "tcp://127.0.0.1:99999",
    "tcp://127.0.0.1:80/path",
    "tcp://[::1",
    "tcp://a..b:80",
    "http://127.0.0.1:80",
]


@pytest.mark.parametrize("address", BAD)
def test_what_is_no_address_is_said_in_a_line(folder: Path, address: str) -> None:
    (folder / "secret").write_bytes(SECRET)
    (folder / "secret").chmod(0o600)
    with pytest.raises(WeightsError) as listening:
        Receiver(address, lambda _: None, secret_file=folder / "secret")
    with pytest.raises(WeightsError) as connecting:
        status(address, secret=SECRET)
    for error in (listening, connecting):
        assert "\n" not in str(error.value)
        assert SECRET.decode() not in str(error.value)


def test_a_port_that_is_taken_is_named(folder: Path) -> None:
    (folder / "secret").write_bytes(SECRET)
    (folder / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WeightsError, match=address):
            Receiver(address, lambda _: None, secret_file=folder / "secret")


def test_nobody_there_is_said_with_the_address(folder: Path) -> None:
    for address in (f"unix://{folder}/nobody", f"tcp://127.0.0.1:{free_port()}"):
        with pytest.raises(WeightsError, match=f"{address} cannot be reached"):
            status(address, secret=SECRET)


# The secret.


def test_tcp_is_refused_without_a_secret_on_either_side() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(WeightsError, match="needs a secret"):
        Receiver(address, lambda _: None)
    with pytest.raises(WeightsError, match="needs a secret"):
        status(address)
    with Sender(device="cpu") as sender:
        sender.register("v1", {"w": torch.zeros(1)})
        with pytest.raises(WeightsError, match="needs a secret"):
            sender.push("v1", [address])


@pytest.mark.parametrize(
    ("data", "mode", "why"),
    [
        (SECRET, 0o640, "others can read"),
        (SECRET, 0o604, "others can read"),
        (b"fifteen bytes..\n", 0o600, "has 15 bytes"),
        (b"", 0o600, "has 0 bytes"),
        (None, 0o600, "cannot read the secret"),
    ],
)
def test_a_secret_is_long_and_for_its_user_alone(folder: Path, data: bytes | None, mode: int, why: str) -> None:
    path = folder / "secret"
    if data is not None:
        path.write_bytes(data)
        path.chmod(mode)
    for make in (
        lambda: Receiver(f"tcp://127.0.0.1:{free_port()}", lambda _: None, secret_file=path),
        lambda: Sender(device="cpu", secret_file=path),
    ):
        with pytest.raises(WeightsError, match=why) as error:
            make()
        assert str(path) in str(error.value)
        assert not data or data.strip().decode() not in str(error.value)


class Tap:
    """Listens in on one conversation."""

    def __init__(self, door: Listener) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.said: dict[str, bytearray] = {"client": bytearray(), "server": bytearray()}
        self._listener = door
        self._thread = threading.Thread(target=self._pass)
        self._thread.start()

    def _pass(self) -> None:
        client, _ = self._server.accept()
        client.settimeout(SECONDS)
        with client, self._listener.dial() as server:
            back = threading.Thread(target=self._copy, args=("server", server, client))
            back.start()
            self._copy("client", client, server)
            back.join()

    def _copy(self, who: str, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.said[who] += data
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def __enter__(self) -> "Tap":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(SECONDS)
        self._server.close()
        assert not self._thread.is_alive()


def test_the_secret_is_never_said_and_what_was_said_is_of_no_use_to_others(guarded: Listener) -> None:
    with Tap(guarded) as tap:
        assert status(tap.address, secret=SECRET) == guarded.receiver.status
    client, server = bytes(tap.said["client"]), bytes(tap.said["server"])
    assert msgspec.msgpack.encode(guarded.receiver.status) in server
    for text in (client, server):
        for length in range(8, len(SECRET)):  # nor any larger part of it
            assert SECRET[:length] not in text
            assert SECRET[-length:] not in text
        assert bytes.fromhex(SECRET.decode()) not in text
    again = guarded.throw(client)
    assert _kinds(again) == ["Hello"]
    assert _kinds(guarded.throw(client + server)) == ["Hello"]
    guarded.push()


def test_what_the_receiver_proves_does_not_prove_it_of_another(guarded: Listener) -> None:
    """Neither its nonce nor, by asking it elsewhere, its own proof."""
    with guarded.dial() as stream:
        hello = stream.recv(1 << 12)
        stream.sendall(hello + said(Proof(bytes(32))))
        assert drained(stream) == b""
    guarded.push()


def _kinds(data: bytes) -> list[str]:
    found = []
    while data:
        size = int.from_bytes(data[:8], "big")
        found.append(msgspec.msgpack.decode(data[8 : 8 + size])["type"])
        data = data[8 + size :]
    return found


@pytest.mark.parametrize("secret", [b"another secret of enough bytes", SECRET[:-1], SECRET + b"0", SECRET.upper()])
def test_a_wrong_secret_is_refused(guarded: Listener, secret: bytes) -> None:
    before = guarded.receiver.status
    with pytest.raises(WeightsError, match=guarded.address) as error:
        status(guarded.address, secret=secret)
    assert secret.decode() not in str(error.value)
    assert guarded.receiver.status == before
    guarded.push()


def test_a_receiver_that_does_not_know_the_secret_is_told_nothing(guarded: Listener) -> None:
    """Somebody who has taken a receiver's address gets no proof that would open the real one."""
    words: list[bytes] = []

    def pretend(server: socket.socket) -> None:
        stream, _ = server.accept()
        with stream:
            stream.settimeout(SECONDS)
            stream.sendall(HELLO)
            words.append(stream.recv(1 << 12))
            stream.sendall(said(Proof(bytes(32))))
            words.append(drained(stream))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(WeightsError, match="sent no proof that it knows the secret"):
            status(f"tcp://127.0.0.1:{server.getsockname()[1]}", secret=SECRET)
        thread.join(SECONDS)
    assert set(_kinds(b"".join(words))) <= {"Hello", "Proof"}
    assert _kinds(guarded.throw(b"".join(words))) == ["Hello"]


def test_before_the_proof_nothing_is_told(guarded: Listener) -> None:
    for words in (
        (StatusRequest(),),
        (Proof(b""), StatusRequest()),
        (Proof(bytes(32)), StatusRequest()),
        (Hello(PROTOCOL, bytes(32)), StatusRequest()),
    ):
        assert _kinds(guarded.throw(HELLO + said(*words))) == ["Hello"]


@pytest.fixture
def two(guarded: Listener) -> Iterator[list[Connection]]:
    made = [connect(guarded.address, guarded.secret) for _ in range(2)]
    yield made
    for connection in made:
        connection.close()


def test_of_two_senders_one_is_refused_while_the_other_pushes(guarded: Listener, two: list[Connection]) -> None:
    first, second = two
    assert after_opening(first, Pause("wait", 60)) == [Paused()]
    second.send(opening())
    assert second.recv(seconds=SECONDS)[0] == Failed("is busy with another update", dirty=False)
    first.close()
    guarded.push()


def test_a_sender_between_two_pushes_keeps_nobody_out(guarded: Listener, two: list[Connection]) -> None:
    assert after_opening(two[0], StatusRequest()) == [guarded.receiver.status]
    two[0].send(Abandon("something else came up"))
    until(lambda: not guarded.receiver._state.opened, SECONDS)
    guarded.push()
