"""Safetensors files as a source."""

import json
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.manifest import ITEM_BYTES
from stretto.weights.regions import whole
from stretto.weights.sources import safetensors as files
from stretto.weights.sources.safetensors import DTYPES, INDEX, Safetensors

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_file(tensors: dict[str, Tensor], *, pad: int = 0, metadata: bool = True) -> bytes:
    """A safetensors file, written independently of what reads it; padding shifts the data off its alignment."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        values = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""
        kind = NAMES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(values)],
        }
        data += values
    text = json.dumps(header).encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + data


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def same(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


def random_tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel() * ITEM_BYTES[dtype]
    values = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return values.view(getattr(torch, dtype)).view(shape) if count else torch.empty(shape, dtype=getattr(torch, dtype))


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), SHAPES), max_size=8), st.integers(0, 9))
def test_every_bit_of_every_type_and_shape_is_read(kinds: list[tuple[str, tuple[int, ...]]], pad: int) -> None:
    tensors = {f"t{number}": random_tensor(*kind) for number, kind in enumerate(kinds)}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        path.write_bytes(as_file(tensors, pad=pad))
        held = {part.entry.name: part for part in Safetensors(path).held()}
        assert list(held) == list(tensors)
        assert all(part.box == whole(part.entry.shape) for part in held.values())
        assert all(same(held[name].read(), tensor) for name, tensor in tensors.items())


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {"b": torch.randn(3, 4, dtype=torch.bfloat16), "a": torch.arange(5), "c": torch.randn(())}
    library.save_file(tensors, tmp_path / "a.safetensors")
    held = {part.entry.name: part.read() for part in Safetensors(str(tmp_path / "a.safetensors")).held()}
    assert set(held) == set(tensors)
    assert all(same(held[name], tensors[name]) for name in tensors)


def test_tensors_come_by_their_place_in_the_file(tmp_path: Path) -> None:
    header = {"late": one(offsets=(8, 16)), "early": one(), "nothing": one(shape=(0,), offsets=(8, 8))}
    (tmp_path / "a").write_bytes(with_header(header, bytes(16)))
    assert [part.entry.name for part in Safetensors(tmp_path / "a").held()] == ["early", "nothing", "late"]


def test_a_folder_without_an_index_has_all_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.safetensors").write_bytes(as_file({name: torch.zeros(1)}))
    (tmp_path / "notes.txt").write_text("not weights")
    assert [part.entry.name for part in Safetensors(tmp_path).held()] == ["a", "b", "c"]
    some = Safetensors([tmp_path / "c.safetensors", str(tmp_path / "a.safetensors")])
    assert [part.entry.name for part in some.held()] == ["c", "a"]


def index(folder: Path, places: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 4}, "weight_map": places}))


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    for name in ("old", "2", "1"):
        (tmp_path / f"{name}.safetensors").write_bytes(as_file({f"t{name}": torch.zeros(1)}))
    index(tmp_path, {"t2": "2.safetensors", "t1": "1.safetensors"})
    assert [part.entry.name for part in Safetensors(tmp_path).held()] == ["t1", "t2"]


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ({"t": "b.safetensors"}, "t is in b.safetensors, which does not exist"),
        ({"x": "a.safetensors"}, "x is in a.safetensors, and it is not there"),
        ({"t": "../a.safetensors"}, "not a file of this folder"),
        ({"t": 3}, "is no index"),
        ({}, "no safetensors file"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, places: object, says: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(as_file({"t": torch.zeros(1)}))
    index(tmp_path, places)
    with pytest.raises(WeightsError, match=says):
        Safetensors(tmp_path)


BROKEN = {
    "not even a header": b"abc",
    "cut short": struct.pack("<Q", 50) + b"{}",
    "its header would have 100,000,001 bytes": struct.pack("<Q", 100_000_001) + b"{}",
    "its header would have [0-9,]{26} bytes": b"\xff" * 64,
    "not JSON": with_header(b"{nonsense"),
    "not JSON .*array": with_header([1]),
    "not JSON .*surrogate|not JSON .*utf-8": with_header(b'{"\xff": 1}'),
    "'t' is described wrongly.*shape": with_header({"t": {"dtype": "F32"}}),
    "'t' is described wrongly: Expected `int`": with_header({"t": one(shape=(2.5,))}),
    "'t' is described wrongly.*length 2": with_header({"t": one(offsets=(0, 4, 8))}),
    "t has type 'F3'": with_header({"t": one("F3")}, bytes(8)),
    r"t is float32\[2\], 8 bytes, but has bytes 0 to 4": with_header({"t": one(offsets=(0, 4))}, bytes(4)),
    r"t is float32\[-2\]": with_header({"t": one(shape=(-2,), offsets=(8, 0))}, bytes(8)),
    r"t is float32\[-1, -2\]": with_header({"t": one(shape=(-1, -2))}, bytes(8)),
    r"t is float32\[0, \d+\], which no tensor can be": with_header({"t": one(shape=(0, 2**63), offsets=(0, 0))}),
    "t has bytes -8 to 0": with_header({"t": one(offsets=(-8, 0))}, bytes(8)),
    "t has bytes 0 to 8, but the file has 7": with_header({"t": one()}, bytes(7)),
    "u has bytes 4 to 12, which overlap": with_header({"t": one(), "u": one(offsets=(4, 12))}, bytes(12)),
    "t has bytes 4 to 12, which leave a gap": with_header({"t": one(offsets=(4, 12))}, bytes(12)),
    "ends with 3 bytes": with_header({"t": one()}, bytes(11)),
    "it has 0 bytes, not even a header": b"",
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_broken_file_is_named_before_anything_is_read(tmp_path: Path, says: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(as_file({"fine": torch.zeros(1)}))
    (tmp_path / "broken.safetensors").write_bytes(BROKEN[says])
    with pytest.raises(WeightsError, match=f"broken.safetensors.*(?:{says})"):
        Safetensors(tmp_path)


@given(st.binary(max_size=60), st.integers(0, 200))
def test_random_bytes_are_refused_or_read(noise: bytes, at: int) -> None:
    good = as_file({"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.int8)})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(good[:at] + noise + good[at + len(noise) :])
        try:
            parts = list(Safetensors(path).held())
        except WeightsError as error:
            assert str(path) in str(error)
        else:
            assert all(part.read().shape == part.entry.shape for part in parts)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(as_file({"t": torch.zeros(1)}))
    with pytest.raises(WeightsError, match=r"t is in two files: .*a\.safetensors and .*b\.safetensors"):
        Safetensors(tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"there is no file .*nowhere"):
        Safetensors(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="no safetensors file in"):
        Safetensors(tmp_path)
    with pytest.raises(WeightsError, match="no safetensors file was given"):
        Safetensors([])


def test_a_file_that_is_cut_short_later_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(as_file({"a": torch.zeros(100_000)}))
    (part,) = Safetensors(path).held()
    nbytes = path.stat().st_size
    os.truncate(path, 100)
    with pytest.raises(WeightsError, match=f"a was cut from {nbytes} to 100 bytes"):
        part.read()


def test_a_file_that_is_replaced_later_is_an_error_and_one_that_is_deleted_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(as_file({"a": torch.ones(3)}))
    (part,) = Safetensors(path).held()
    path.unlink()
    assert part.read().tolist() == [1, 1, 1]
    path.write_bytes(as_file({"a": torch.zeros(3)}))
    with pytest.raises(WeightsError, match="has changed since"):
        part.read()


def test_a_file_that_is_written_to_all_the_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, writes = tmp_path / "a", []
    path.write_bytes(as_file({"a": torch.ones(3)}))

    def write(_: float) -> None:
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), b"x", path.stat().st_size - 1)
        writes.append(path.stat().st_ctime_ns)

    monkeypatch.setattr(files, "_SETTLING", 2.0)
    monkeypatch.setattr(files.time, "sleep", write)
    monkeypatch.setattr(files.time, "time_ns", lambda: path.stat().st_ctime_ns)  # the last write was just now
    with pytest.raises(WeightsError, match="a is being written to"):
        Safetensors(path)
    assert len(writes) > 1


def test_an_index_that_leads_nowhere_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(as_file({"a": torch.ones(3)}))
    (tmp_path / INDEX).symlink_to(tmp_path / INDEX)
    with pytest.raises(WeightsError, match="is no index of safetensors files"):
        Safetensors(tmp_path)


def test_a_file_is_left_as_it_is(tmp_path: Path) -> None:
    content = as_file({"a": torch.ones(3)})
    (tmp_path / "a").write_bytes(content)
    before = (tmp_path / "a").stat()
    next(Safetensors(tmp_path / "a").held()).read().zero_()
    after = (tmp_path / "a").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (tmp_path / "a").read_bytes() == content


def test_a_file_that_is_cut_is_an_error_and_nobody_dies(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(as_file({"a": torch.ones(100_000)}))
    (part,) = Safetensors(path).held()
    os.truncate(path, 5000)
    assert part.stored is not None
    with pytest.raises(WeightsError, match=f"{path} was cut to 5000 bytes while it was read"):
        part.stored.read_into(torch.empty(100_000))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' + "[" * 100_000, '{"__metadata__":' + '{"a":' * 100_000])
def test_json_in_json_in_json_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(WeightsError, match="is no safetensors file: its header is not JSON"):
        Safetensors(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightsError, match="is no index of safetensors files"):
        Safetensors(tmp_path)


def test_a_name_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    """Of which a reader would have to choose one."""
    described = json.dumps(one())
    text = f'{{"a": {described}, "a": {described}}}'
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(8))
    with pytest.raises(WeightsError, match="'a' is there twice"):
        Safetensors(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(as_file({"a": torch.zeros(1)}))
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}')
    with pytest.raises(WeightsError, match="'a' is there twice"):
        Safetensors(tmp_path)


def test_files_may_be_links_and_an_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    """As in Hugging Face's cache."""
    blob, folder = tmp_path / "blobs" / "1f3a", tmp_path / "snapshot"
    for made in (blob.parent, folder):
        made.mkdir()
    blob.write_bytes(as_file({"a": torch.ones(3)}))
    (folder / "model.safetensors").symlink_to(blob)
    index(folder, {"a": "model.safetensors"})
    assert [part.read().tolist() for part in Safetensors(folder).held()] == [[1, 1, 1]]
    for outside in ("../blobs/1f3a", str(blob)):
        index(folder, {"a": outside})
        with pytest.raises(WeightsError, match="which is not a file of this folder"):
            Safetensors(folder)
