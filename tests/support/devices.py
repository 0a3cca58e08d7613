"""Where tests compute."""

import os

import torch

from ranks import Ranks

DEVICE = torch.device(os.environ.get("STRETTO_TEST_DEVICE", "cpu"))
"""With "cuda", what many tests run is run on a GPU, under MPS if it takes several ranks."""


def device_ranks(count: int) -> Ranks:
    """Ranks that compute there."""
    return Ranks(count, backend="onegpu" if DEVICE.type == "cuda" else "gloo", device=DEVICE.type)
