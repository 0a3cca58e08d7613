"""What tests of weights share."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ranks import Ranks


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that sockets may be in: its user's alone, with a short name."""
    with TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to four, for senders."""
    made = Ranks(4)
    yield made
    made.stop()
