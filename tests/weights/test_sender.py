"""Senders: what they must agree on, and what does not stop them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import pushes
from ranks import Ranks
from stretto.ir.errors import WeightsError
from stretto.weights.connection import Connection, PeerTimeout
from stretto.weights.receive.receiver import Receiver
from stretto.weights.send import sender as senders
from stretto.weights.send.push import Push
from stretto.weights.send.remotes import status
from stretto.weights.send.sender import Sender
from stretto.weights.sources import safetensors as files


class Taking:
    """A loader that takes all there is."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, tensors: Any) -> list[str]:
        self.tensors = {name: tensor.clone() for name, tensor in tensors}
        names = list(self.tensors)
        tensors.clear()  # it is the loader's own list
        return names


@pytest.fixture
def taking(folder: Path) -> Iterator[tuple[str, Taking]]:
    taking = Taking()
    with Receiver(f"unix://{folder}/r", taking) as receiver:
        receiver.start()
        yield str(receiver.address), taking


def test_ranks_that_push_different_versions_are_told_and_nothing_is_pushed(ranks: Ranks, taking: Any) -> None:
    said = ranks.run(pushes.different, 2, [taking[0]])
    assert said == ["rank 1 pushes another version, to other addresses, or with other options than rank 0"] * 2
    assert status(taking[0]).version == "initial"


def test_ranks_whose_files_hold_other_values_are_told(ranks: Ranks, folder: Path) -> None:
    paths = [str(folder / f"{k}.safetensors") for k in range(2)]
    for number, path in enumerate(paths):
        save_file({f"t{k}": torch.full((100,), float(k + number * (k == 3))) for k in range(5)}, path)
    said = ranks.run(pushes.other_files, 2, paths)
    assert said == ["ranks 0 and 1 read different values of t3 for v"] * 2
    assert ranks.run(pushes.other_files, 2, paths[:1] * 2) == ["registered"] * 2


def test_a_rank_without_room_stops_all_and_the_next_time_all_go_on(ranks: Ranks, taking: Any) -> None:
    for failed, pushed in ranks.run(pushes.without_room, 2, [taking[0]]):
        assert failed == "rank 1: TypeError: 'NoneType' object is not callable"
        assert "'delivered'" in pushed


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([(0, 2), (2, 4)], "registered"),
        ([(0, 4), (0, 4)], "registered"),
        ([(0, 2), (1, 3)], "t has 4 elements, of which ranks hold 4: parts are missing or overlap"),
        ([(0, 2), (3, 4)], "t has 4 elements, of which ranks hold 3: parts are missing or overlap"),
    ],
)
def test_parts_must_make_up_the_whole(ranks: Ranks, boxes: list[tuple[int, int]], said: str) -> None:
    assert ranks.run(pushes.odd_parts, 2, boxes) == [said] * 2


def test_a_model_that_has_grown_gets_larger_buffers(taking: Any) -> None:
    address, found = taking
    with Sender(device="cpu") as sender:
        for size in (1000, 6 << 20, 1000):
            model = {"w": torch.full((size,), size % 251, dtype=torch.uint8)}
            sender.register(f"v{size}", model)
            sender.push(f"v{size}", [address])
            assert torch.equal(found.tensors["w"], model["w"])


def test_a_sender_between_pushes_makes_way_for_another(taking: Any) -> None:
    address, found = taking
    with Sender(device="cpu") as one, Sender(device="cpu") as other:
        for number, sender in enumerate((one, other, one, other)):
            sender.register(f"v{number}", {"w": torch.tensor(number)})
            sender.push(f"v{number}", [address])
            assert int(found.tensors["w"]) == number
            assert status(address).version == f"v{number}"


def test_progress_that_cannot_be_told_does_not_matter(taking: Any, caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        raise ZeroDivisionError

    with Sender(device="cpu", bucket_bytes=256) as sender:
        sender.register("v", {f"t{k}": torch.zeros(60) for k in range(4)})
        sender.push("v", [taking[0]], progress=progress)
    assert told == [(1, 4)]
    assert "progress could not be told" in caplog.text


def test_empty_tensors_can_be_pushed_again_and_again(taking: Any) -> None:
    with Sender(device="cpu") as sender:
        for number in range(3):
            sender.register(f"v{number}", {"empty": torch.zeros(0, 3)})
            assert sender.push(f"v{number}", [taking[0]]).receivers == {taking[0]: "delivered"}


def test_memory_is_used_again_for_the_next_version(taking: Any) -> None:
    with Sender(device="cpu") as sender:
        places = set()
        for number in range(3):
            sender.register(f"v{number}", {"w": torch.full((1000,), number)})
            places.add(sender._store.get(f"v{number}").host_buffer(0).data_ptr())
            sender.push(f"v{number}", [taking[0]])
            assert taking[1].tensors["w"].unique().tolist() == [number]
        assert len(places) == 1
        with pytest.raises(WeightsError, match=r"v1 was dropped, and there is v2; Sender\(max_versions=2\)"):
            sender.push("v1", [taking[0]])


@pytest.mark.parametrize("way", ["rewritten", "cut", "deleted"])
def test_what_becomes_of_a_file_after_registering_does_not_matter(taking: Any, tmp_path: Path, way: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(4000.0)}, path)
    with Sender(device="cpu") as sender:
        sender.register("v", path)
        if way == "deleted":
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.truncate(300) if way == "cut" else (file.seek(1000), file.write(b"x" * 100))
        sender.push("v", [taking[0]])
    assert torch.equal(taking[1].tensors["w"], torch.arange(4000.0))


def test_a_file_that_is_cut_while_it_is_registered_ends_nobody(
    taking: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(4000.0)}, path)
    read = files.Stretch.read_into

    def cutting(stretch: Any, memory: torch.Tensor) -> None:
        os.truncate(path, 300)
        read(stretch, memory)

    with Sender(device="cpu") as sender:
        with monkeypatch.context() as patch:
            patch.setattr(files.Stretch, "read_into", cutting)
            with pytest.raises(WeightsError, match=f"{path} was cut to 300 bytes while it was read"):
                sender.register("v", path)
        sender.register("v", {"w": torch.ones(3)})
        sender.push("v", [taking[0]])


@pytest.mark.parametrize(
    ("receivers", "said"),
    [
        ([], "there is no receiver to push to"),
        (["unix:///nowhere/x"], "unix:///nowhere/x cannot be reached: No such file or directory"),
        (["ftp://x"], "'ftp://x' is no address; there are unix:///path and tcp://host:port"),
    ],
)
def test_where_to_must_be_right(receivers: list[str], said: str) -> None:
    with Sender(device="cpu") as sender:
        sender.register("v", {"w": torch.zeros(1)})
        with pytest.raises(WeightsError) as error:
            sender.push("v", receivers)
        assert str(error.value) == said


def test_an_address_named_twice_is_an_error(taking: Any) -> None:
    with Sender(device="cpu") as sender:
        sender.register("v", {"w": torch.zeros(1)})
        with pytest.raises(WeightsError, match="is named twice"):
            sender.push("v", [taking[0]] * 2)


def test_a_version_needs_a_name_and_tensors() -> None:
    with Sender(device="cpu") as sender:
        with pytest.raises(WeightsError, match="a version needs a name"):
            sender.register("", {"w": torch.zeros(1)})
        with pytest.raises(WeightsError, match="v has no tensors"):
            sender.register("v", {})
    with pytest.raises(WeightsError, match=r"keeps at least 1 version \(got 0\)"):
        Sender(device="cpu", max_versions=0)


def test_a_closed_sender_says_so_and_touches_nobody(taking: Any) -> None:
    sender = Sender(device="cpu")
    sender.register("v", {"w": torch.zeros(1)})
    sender.close()
    sender.close()
    for act in (lambda: sender.register("v2", {"w": torch.zeros(1)}), lambda: sender.push("v", [taking[0]])):
        with pytest.raises(WeightsError, match="this sender is closed"):
            act()
    assert status(taking[0]).version == "initial"


def test_a_sender_is_for_one_thread_at_a_time(taking: Any) -> None:
    told: list[str] = []

    def progress(*_: int) -> None:
        with pytest.raises(WeightsError, match="this sender is at work in another thread"):
            sender.push("v", [taking[0]])
        told.append("refused")

    with Sender(device="cpu") as sender:
        sender.register("v", {"w": torch.zeros(1)})
        sender.push("v", [taking[0]], progress=progress)
    assert told == ["refused"]


def test_a_tiny_push_does_not_spoil_what_is_foreseen_of_the_next(taking: Any) -> None:
    with Sender(device="cpu") as sender:
        sender.register("tiny", {"w": torch.zeros(1)})
        first = sender.push("tiny", [taking[0]])
        sender.register("again", {"w": torch.zeros(1)})
        assert sender.push("again", [taking[0]]).moving.predicted == first.moving.predicted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"into": [torch.zeros(1)]}, r"into is tensors by name, such as model.state_dict\(\)"),
        ({"into": {"w": torch.zeros(1)}, "slices": {"w": slice(0, 1)}}, "the slice of w is a tuple of slices"),
        ({"into": {"w": torch.zeros(1)}, "slices": {"v": (slice(0, 1),)}}, "a slice of v is asked for"),
        ({"load": print, "expects": [("w", "int8", ())]}, r"expects are TensorSpec\(name, dtype, shape\)"),
        ({}, "either load, a function, or into, tensors by name"),
        ({"load": print, "device": "xpu"}, "weights are pushed on cpu or cuda"),
        ({"load": print, "hooks": {"pause": print}}, r"hooks are Hooks\(pause=…, resume=…\)"),
    ],
)
def test_a_receiver_that_cannot_be_is_refused(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        Receiver(f"unix://{folder}/x", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "tpu"}, r"weights are pushed on cpu or cuda \(got tpu\)"),
        ({"bucket_bytes": 100}, r"bucket_bytes is a multiple of 256 \(got 100\)"),
        ({"bucket_bytes": 0}, r"bucket_bytes is a multiple of 256 \(got 0\)"),
        ({"bucket_bytes": 1e6}, r"bucket_bytes is a multiple of 256 \(got 1000000.0\)"),
        ({"timeout": 0}, "timeout is a number of seconds above 0"),
    ],
)
def test_a_sender_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        Sender(**{"device": "cpu", **options})


def test_a_sender_that_cannot_see_how_much_memory_there_is_goes_on(
    taking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: object) -> int:
        raise OSError(24, "Too many open files")

    with Sender(device="cpu") as sender:
        with monkeypatch.context() as patch:
            patch.setattr(senders, "free_bytes", none)
            with pytest.raises(WeightsError, match="Too many open files"):
                sender.register("v", {"w": torch.zeros(1)})
        sender.register("v", {"w": torch.zeros(1)})
        sender.push("v", [taking[0]])


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(
    taking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, recv = [True], Connection.recv

    def hears(connection: Connection, *, seconds: float) -> Any:
        if late and seconds == 5.0 and connection in kept:
            late.clear()
            raise PeerTimeout("is slow: it did not answer in time")
        return recv(connection, seconds=seconds)

    with Sender(device="cpu") as sender:
        sender.register("v", {"w": torch.zeros(1)})
        sender.push("v", [taking[0]])
        kept = [it._connection for it in sender._remotes._remotes.values()]
        monkeypatch.setattr(Connection, "recv", hears)
        with pytest.raises(WeightsError, match="is slow"):
            sender.push("v", [taking[0]])
        sender.push("v", [taking[0]])


def test_the_package_shows_what_it_has() -> None:
    import stretto.weights

    assert {"Sender", "Receiver", "PushError", "status"} <= set(dir(stretto.weights))


def test_what_a_push_is_asked_for_must_make_sense(taking: Any) -> None:
    with Sender(device="cpu") as sender:
        sender.register("v", {"w": torch.zeros(1)})
        with pytest.raises(WeightsError, match="receivers are a list"):
            sender.push("v", taking[0])
        with pytest.raises(WeightsError, match=r"in_flight is one of wait, abort, keep \(got 'drop'\)"):
            sender.push("v", [taking[0]], in_flight="drop")  # type: ignore[arg-type]
        with pytest.raises(WeightsError, match="progress is a function"):
            sender.push("v", [taking[0]], progress=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["host memory", "the buffer"])
def test_a_bit_that_changes_after_registering_is_found(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live = {name: torch.zeros(5000) for name in ("a", "b")}
    given: Any = {name: torch.ones(5000) for name in live}
    with Receiver(f"unix://{folder}/r", into=live) as receiver:
        receiver.start()
        with Sender(device="cpu") as sender:
            sender.register("v", given)
            if how == "host memory":
                sender._store.get("v").host_buffer(0)[77] ^= 4
            else:
                copy = Push._copy

                def flipped(push: Push, bucket: int) -> None:
                    copy(push, bucket)
                    push._h2d_buffer(bucket)[77] ^= 4

                monkeypatch.setattr(Push, "_copy", flipped)
            with pytest.raises(WeightsError, match="arrived changed"):
                sender.push("v", [str(receiver.address)])
            assert receiver.status.version == "initial"


def test_files_of_any_size_one_after_the_other(folder: Path, tmp_path: Path) -> None:
    taken = Taking()
    with Receiver(f"unix://{folder}/r", taken) as receiver:
        receiver.start()
        with Sender(device="cpu", bucket_bytes=8192) as sender:
            for number, size in enumerate(
                (257, 3, 401, 66)
            ):  # what one leaves in a buffer is between the next's tensors
                tensors = {f"t{k}": torch.full((size + k,), 7 + k, dtype=torch.uint8) for k in range(4)}
                path = tmp_path / f"{number}.safetensors"
                save_file(tensors, path)
                sender.register(f"v{number}", path)
                assert sender.push(f"v{number}", [str(receiver.address)]).receivers == {
                    str(receiver.address): "delivered"
                }
                assert all(torch.equal(taken.tensors[name], it) for name, it in tensors.items())


def test_a_sender_that_cannot_fill_its_own_buffer_says_so_and_stays_usable(ranks: Ranks, folder: Path) -> None:
    spec = [("float32", (60,))] * 6
    live = [{name: torch.zeros(60) for name in pushes.tensors_of(spec, 0)} for _ in range(2)]
    receivers = [Receiver(f"unix://{folder}/{k}", into=into).start() for k, into in enumerate(live)]
    said = ranks.run(pushes.broken_buffer, 2, spec, [str(it.address) for it in receivers])
    assert said == [["rank 0: copying bucket 0 into its buffer: no", "verified verified"]] * 2
    for receiver, into in zip(receivers, live, strict=True):
        receiver.close()
        assert all(pushes.same(into[name], it) for name, it in pushes.tensors_of(spec, 2).items())
