"""What a changed byte can and cannot go unseen by, and that every way to find a sum finds the same."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from stretto.weights import checksums
from stretto.weights.checksums import COLUMNS, ROW, by_floats, digest_of, matrix

CPU = torch.device("cpu")
Words = NDArray[np.int32]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def random_bytes(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def plainly(data: bytes) -> bytes:
    """As the definition has it, in integers of any size."""
    left, numbers = data, matrix(CPU).numpy().astype(np.int64)
    while len(left) > ROW:
        rows = np.frombuffer(left + bytes(-len(left) % ROW), np.int8).astype(np.int64).reshape(-1, ROW)
        sums = rows @ numbers
        assert abs(sums).max() < 2**31
        left = sums.astype("<i4").tobytes()
    return hashlib.blake2b(len(data).to_bytes(8, "little") + left, digest_size=32).digest()


SIZES = [0, 1, ROW - 1, ROW, ROW + 1, 2 * ROW, 600 * ROW, 1025 * ROW + 77]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("by", ["integers", "floats"])
def test_a_sum_is_what_its_definition_says(
    nbytes: int, threads: int, by: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, before = random_bytes(nbytes), torch.get_num_threads()
    if by == "floats":
        monkeypatch.setattr(checksums, "_product", lambda _: by_floats)
    monkeypatch.setattr(checksums, "_PART", 100)
    torch.set_num_threads(threads)
    try:
        assert digest_of(data, pool) == plainly(data.numpy().tobytes())
    finally:
        torch.set_num_threads(before)


def test_the_matrix_is_that_of_every_version(pool: ThreadPoolExecutor) -> None:
    """Sender and receiver may be of different releases: another matrix would be another protocol."""
    assert matrix(CPU)[0, :4].tolist() == [7, -75, -44, 75]
    assert hashlib.blake2b(matrix(CPU).numpy().tobytes()).hexdigest()[:16] == "9e50865a23b4aeb5"
    assert digest_of(torch.zeros(100_000, dtype=torch.uint8), pool).hex()[:16] == "a6e472b453b7f8af"


@pytest.mark.parametrize("byte", [-128, 127])
def test_the_largest_numbers_are_summed_without_loss(byte: int) -> None:
    """Where products were cut off at 16 bits, or sums rounded, it would be here."""
    rows = torch.full((64, ROW), byte, dtype=torch.int8)
    rows[1] = torch.where(matrix(CPU)[:, 0] < 0, -128, 127)  # each product as large as can be
    expected = rows.numpy().astype(np.int64) @ matrix(CPU).numpy().astype(np.int64)
    assert (by_floats(rows).numpy() == expected).all()
    assert (checksums._product(CPU)(rows).numpy() == expected).all()
    assert abs(expected[1, 0]) > 2**26


def test_a_processor_that_is_not_exact_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(rows: Tensor, numbers: Tensor) -> Tensor:  # as sums of pairs in 16 bits are
        pairs = (rows.int()[:, :, None] * numbers.int()).view(len(rows), -1, 2, COLUMNS).sum(2)
        return pairs.clamp(-(2**15), 2**15 - 1).sum(1).int()

    monkeypatch.setattr(checksums, "_multiplies_integers", lambda: True)
    monkeypatch.setattr(torch, "_int_mm", cut_off)
    assert checksums._product.__wrapped__(CPU) is by_floats
    monkeypatch.setattr(torch, "_int_mm", None)
    monkeypatch.setattr(checksums, "_multiplies_integers", lambda: False)
    assert checksums._product.__wrapped__(CPU) is by_floats


def test_autocast_changes_nothing() -> None:
    rows = random_bytes(40 * ROW).view(torch.int8).view(-1, ROW)
    expected = by_floats(rows)
    with torch.autocast("cpu"):
        assert torch.equal(by_floats(rows), expected)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_a_users_choice_of_precision_changes_nothing(precision: str) -> None:
    rows = random_bytes(40 * ROW).view(torch.int8).view(-1, ROW)
    before = torch.get_float32_matmul_precision()
    expected = by_floats(rows)
    torch.set_float32_matmul_precision(precision)
    try:
        assert torch.equal(by_floats(rows), expected)
    finally:
        torch.set_float32_matmul_precision(before)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3 * ROW), st.integers(0, 2**32), st.integers(1, 40))
def test_lengths_count(count: int, seed: int, more: int) -> None:
    data = torch.zeros(count + more, dtype=torch.uint8)
    data[:count] = random_bytes(count, seed)
    with ThreadPoolExecutor(1) as pool:
        assert digest_of(data, pool) != digest_of(data[:count], pool)


# Damage, and how often it goes unseen.


def flip(bit: int, count: int) -> Callable[[Words], None]:
    def act(words: Words) -> None:
        words.view(np.uint32)[:count] ^= np.uint32(1 << bit)

    return act


def moved_bit(words: Words) -> None:
    words.view(np.uint32)[0] &= 0x7FFFFFFF
    words.view(np.uint32)[1] |= 0x80000000


def reversed_words(words: Words) -> None:
    words[:] = words[::-1].copy()


def swapped_blocks(words: Words) -> None:
    words[:64], words[64:128] = words[64:128].copy(), words[:64].copy()


def negated_doubles(words: Words) -> None:
    words.view(np.float64)[:] *= -1


WORDS = ROW // 4
DAMAGE: dict[str, Callable[[Words], None]] = {
    **{f"bit {bit} of {count} words": flip(bit, count) for bit in (0, 7, 15, 30, 31) for count in (1, 2, 4, 32, 4096)},
    "a high bit from one word to another": moved_bit,
    "the signs of an even number of doubles": negated_doubles,
    "words in reverse": reversed_words,
    "two blocks exchanged": swapped_blocks,
    "shifted by a word": lambda words: words.__setitem__(slice(None), np.roll(words, 1)),
    "shifted by a row": lambda words: words.__setitem__(slice(None), np.roll(words, WORDS)),
    "shifted by a byte": lambda words: words.view(np.int8).__setitem__(slice(None), np.roll(words.view(np.int8), 1)),
    "two words swapped": lambda words: words.__setitem__([3, 5000], words[[5000, 3]]),
    "two rows swapped": lambda words: words.__setitem__(
        slice(None),
        words.reshape(-1, WORDS)[[-1, *range(1, len(words) // WORDS - 1), 0][: len(words) // WORDS]].reshape(-1),
    ),
    "a word doubled": lambda words: words.__setitem__(0, words[0] * 2),
    "one added, one taken": lambda words: words.__setitem__([0, 1], words[[0, 1]] + [1, -1]),
    "zeroed": lambda words: words.fill(0),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("rows", [1, 2, 520])
def test_damage_that_a_sum_could_miss_is_seen(name: str, rows: int, pool: ThreadPoolExecutor) -> None:
    """Each of these is missed by some sum that was thought good enough: of words, by place, of doubles."""
    for seed in range(1 if rows > 2 else 8):
        words = random_bytes(rows * ROW, seed).numpy().view(np.int32)
        doubles = words.view(np.float64)
        doubles[np.isnan(doubles)] = 1.5
        words[:2] = -5, 7
        changed = words.copy()
        DAMAGE[name](changed)
        if rows == 1 and "row" in name:
            assert (changed == words).all()
            continue
        assert not (changed == words).all()
        one, other = (digest_of(torch.from_numpy(it.view(np.uint8)), pool) for it in (words, changed))
        assert one != other


def test_a_sum_by_place_misses_what_this_does_not(pool: ThreadPoolExecutor) -> None:
    """That the families above are adversarial: Σ (2i + 1)·wᵢ over 64-bit words, as it once was, does not see them."""

    def by_place(words: Words) -> int:
        wide = words.view(np.uint64)
        with np.errstate(over="ignore"):
            return int((wide * (2 * np.arange(len(wide), dtype=np.uint64) + 1)).sum(dtype=np.uint64))

    def four_in_one_lane(words: Words) -> None:
        words.view(np.uint64)[:4] ^= np.uint64(1 << 62)

    words = np.abs(random_bytes(2 * ROW).numpy().view(np.int32)) // 2
    for change in (negated_doubles, four_in_one_lane):
        changed = words.copy()
        change(changed)
        assert by_place(changed) == by_place(words)
        one, other = (digest_of(torch.from_numpy(it.view(np.uint8)), pool) for it in (words, changed))
        assert one != other


CHANGES = {
    "one bit": [64],
    "the sign": [-128],
    "an even number of signs": [128, -128],
    "a bit from one byte to another": [128, -1],
    "eight in one lane": [128] * 8,
    "sixteen in one lane": [64] * 16,
    "a swap": [5, -5],
    "negated": [-2 * byte for byte in (3, 17, 60, 33)],
    "shifted": [7, -9, 2, 40, -40],
    "exchanged blocks": [3, 1, -4, 9, -3, -1, 4, -9],
    "anything": [1, 2, 3, -255, 255, 0, 0, 64],
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_share_of_matrices_that_miss_a_change(name: str) -> None:
    """With numbers of 4 bits in place of 8, a column misses a change at most once in 16 times, and two do once in 256:
    counted over random matrices. With the real numbers of 8 bits, one does at most once in 256 times."""
    change = np.array(CHANGES[name])
    random = np.random.default_rng(0)
    tries = 1 << 18
    for low, high in ((-8, 8), (-128, 128)):
        columns = random.integers(low, high, (2, tries, len(change)))
        missed = (columns @ change) == 0
        for seen, bound in ((missed[0], 1 / (high - low)), (missed.all(0), 1 / (high - low) ** 2)):
            expected = bound * tries
            assert seen.sum() <= expected + 5 * expected**0.5 + 5


def test_columns_of_the_matrix_are_as_random_ones_are() -> None:
    numbers = matrix(CPU).numpy().astype(float)
    assert numbers.shape == (ROW, COLUMNS)
    counts = np.bincount(matrix(CPU).numpy().view(np.uint8).reshape(-1), minlength=256)
    assert abs(counts - counts.mean()).max() < 6 * counts.mean() ** 0.5
    close = np.corrcoef(numbers.T) - np.eye(COLUMNS)
    assert abs(close).max() < 6 / ROW**0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_gpu_finds_the_same(nbytes: int, pool: ThreadPoolExecutor) -> None:
    data = random_bytes(nbytes)
    assert digest_of(data.cuda(), pool) == digest_of(data, pool)
