"""What tests of weights share."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that doors may be in."""
    tmp_path.chmod(0o700)
    return tmp_path
