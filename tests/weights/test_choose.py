"""The plan of a push."""

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.check import check
from stretto.ir.errors import WeightsError
from stretto.weights.manifest import Manifest, TensorSpec
from stretto.weights.send.choose import Speeds, bucket_bytes_for, buffers, choose
from stretto.weights.send.speeds import slowest

MIB = 1 << 20


def model(*sizes: int) -> Manifest:
    return Manifest("v", tuple(TensorSpec(f"t{k}", "uint8", (size,)) for k, size in enumerate(sizes)))


def test_the_fastest_that_fits_is_chosen() -> None:
    slow_copies = Speeds(h2d=1e9, broadcast=3e9, reload=3e9)
    plenty = choose(4, 32, MIB, slow_copies, 4 * MIB)
    little = choose(4, 32, MIB, slow_copies, 3 * MIB)
    assert (plenty.mode, little.mode) == ("overlap_all", "overlap_reload")
    assert plenty.predicted.makespan < little.predicted.makespan
    assert check(plenty.program) == []


def test_too_little_memory_is_an_error_that_says_what_is_needed() -> None:
    with pytest.raises(WeightsError, match=r"3,145,728 bytes of buffers are needed, and 3,000,000 are free"):
        choose(4, 32, MIB, Speeds(1e9, 1e9, 1e9), 3_000_000)


def test_a_lone_sender_needs_only_the_two_buffers_that_receivers_see() -> None:
    assert buffers(1, "overlap_all") == 2
    assert choose(1, 5, MIB, Speeds(1e9, 1e9, 1e9), 2 * MIB).predicted.makespan == pytest.approx(6 * MIB / 1e9)


def test_a_bucket_holds_the_largest_tensor_and_the_model_has_several_rounds() -> None:
    assert bucket_bytes_for(model(*[MIB] * 1000), 2, 1 << 40) == 1000 * MIB // 16 // 256 * 256
    assert bucket_bytes_for(model(100, 700 * MIB), 2, 1 << 40) == 700 * MIB
    assert bucket_bytes_for(model(10), 1, 1 << 40) == 4 * MIB


def test_a_bucket_shrinks_to_what_is_free() -> None:
    assert bucket_bytes_for(model(*[MIB] * 10000), 2, 300 * MIB) == int(300 * MIB * 0.9) // 3 // 256 * 256
    with pytest.raises(WeightsError, match=r"the largest tensor has 209,715,200 bytes, and 3 buffers .*split=True"):
        bucket_bytes_for(model(200 * MIB), 2, 300 * MIB)
    assert bucket_bytes_for(model(200 * MIB), 2, 300 * MIB, split=True) == 200 * MIB // 16


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(WeightsError, match="'four' is no mode; there are serial, overlap_reload, overlap_all"):
        choose(2, 2, MIB, Speeds(1, 1, 1), 1 << 40, mode="four")  # type: ignore[arg-type]


def test_a_sender_that_moved_too_little_has_no_opinion() -> None:
    others = [Speeds(3.0, inf, inf), Speeds(4.0, 6.0, inf)]
    council: Any = SimpleNamespace(gather=lambda mine, _: [mine, *others])
    assert slowest(Speeds(inf, 5.0, inf), council, Speeds(9.0, 9.0, 9.0)) == Speeds(3.0, 5.0, 9.0)
