"""Starts the broker of this machine's ranks, and connects to it."""

import os
import socket
import subprocess
import sys
import uuid

from stretto.onegpu.errors import GroupError
from stretto.onegpu_broker.flags import Flags
from stretto.onegpu_broker.wire import PROTOCOL, close, recv_from_broker
from stretto.wire.frames import MalformedMessage
from stretto.wire.greeting import Greeting
from stretto.wire.peers import peer_user

_GREETING = 60.0  # seconds for a broker to start
BROKER = "the broker of this machine's ranks"


def connect(address: str) -> tuple[socket.socket, Flags]:
    """Connect to a broker of this user; return the connection and the broker's flags."""
    connection, file = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), -1
    try:
        connection.connect(f"\0{address}")
        if (user := peer_user(connection)) != os.geteuid():
            raise ConnectionError(f"it belongs to user {user}, and this process to user {os.geteuid()}")
        connection.settimeout(_GREETING)
        message, file = recv_from_broker(connection)
        connection.settimeout(None)
        if message is None:
            raise ConnectionError("it does not answer")
        Greeting(PROTOCOL, None, serves=False).meet(message)
        return connection, Flags(file)
    except (OSError, ValueError) as error:
        connection.close()
        close(file)
        sent = "it sent " if isinstance(error, MalformedMessage) else ""
        raise GroupError(f"{BROKER} cannot be used: {sent}{error}") from None


def start_broker() -> str:
    """Start a broker process and return its address, an abstract socket name. It ends after its last rank."""
    address = f"stretto-{uuid.uuid4().hex}"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(f"\0{address}")
    server.listen(64)
    # The broker is exempt from the limit on the ranks' share of the device, and gets all hardware queues.
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    subprocess.Popen(
        [sys.executable, "-m", "stretto.onegpu_broker.serve", str(server.fileno())],
        pass_fds=[server.fileno()],
        env=environment,
        start_new_session=True,  # Ctrl-C is for the ranks; the broker ends after them
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a process that reads the ranks' output must not wait for the broker
        stderr=subprocess.DEVNULL,
    )
    server.close()
    return address
