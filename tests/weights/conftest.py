"""What tests of weights share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks import Ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that doors may be in."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to four, for senders."""
    made = Ranks(4)
    yield made
    made.stop()
