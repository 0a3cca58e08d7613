"""Hypothesis profiles, markers, and Triton's interpreter where there is no GPU.

The default profile repeats the same examples; `--hypothesis-profile=thorough` explores.
"""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported

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
