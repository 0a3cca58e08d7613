"""Hypothesis profiles and markers.

The default profile repeats the same examples; `--hypothesis-profile=thorough` explores.
"""

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("default")

STARTERS = {"Ranks", "Script", "Victim", "multiprocessing", "subprocess"}
"""The names of what starts processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of modules that start processes."""
    for item in items:
        if isinstance(item, pytest.Function) and STARTERS & vars(item.module).keys():
            item.add_marker("processes")
