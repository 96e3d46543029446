"""States on their way into files: the bytes they had when they were taken, whatever comes then."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from penstock.dataflow.errors import StateError
from penstock.dataflow.files import WrittenFile
from penstock.workers.training import state_files
from penstock.workers.training.checkpoint_files import StoredPiece, share_of
from penstock.workers.training.state_files import StateFiles, Writes
from torch import Tensor

LIMIT_S = 60.0


def tensors(device: str = "cpu") -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    found = {
        "b": torch.randn(70_001, generator=random).bfloat16(),
        "f": torch.randn(300, 200, generator=random),
        "across": torch.randn(30, 40, generator=random).t(),
        "i": torch.arange(5),
        "half": torch.randn(3, generator=random).half(),
        "double": torch.randn(3, generator=random).double(),
        "small": torch.tensor([3], dtype=torch.uint8),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 4),
    }
    return {name: tensor.to(device) for name, tensor in found.items()}


def as_written(held: Mapping[str, Tensor]) -> bytes:
    """The file as the library writes it."""
    whole = {name: tensor.contiguous().cpu() for name, tensor in held.items()}
    return safetensors.torch.save(whole, metadata={"format": "pt"})


def written(writes: Writes, folder: Path) -> Mapping[str, WrittenFile]:
    return writes(folder, lambda: False)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several parts, and blocks of which a tensor takes several."""
    monkeypatch.setattr(state_files, "_AT_ONCE", 1000)
    monkeypatch.setattr(state_files, "_BLOCK_BYTES", 7_000)


@pytest.mark.usefixtures("small_parts")
def test_a_file_is_what_the_library_would_write_and_its_hash(tmp_path: Path) -> None:
    held = tensors()
    found = written(StateFiles().take({"a": held, "b": {}}), tmp_path)
    for name, content in (("a", held), ("b", {})):
        expected = as_written(content)
        assert (tmp_path / name).read_bytes() == expected
        assert found[name] == WrittenFile(len(expected), hashlib.sha256(expected).hexdigest())


@pytest.mark.usefixtures("small_parts")
def test_what_changes_after_it_was_kept_is_written_as_it_was(tmp_path: Path) -> None:
    held = tensors()
    expected = as_written(held)
    files = StateFiles()
    writes = files.take({"a": held})
    files.keep()
    for tensor in held.values():
        tensor.zero_()
    written(writes, tmp_path)
    assert (tmp_path / "a").read_bytes() == expected


@pytest.mark.usefixtures("small_parts")
def test_a_state_may_change_in_the_middle_of_being_written(tmp_path: Path) -> None:
    held = tensors()
    expected = as_written(held)
    files = StateFiles()
    writes = files.take({"a": held})
    at, go = threading.Event(), threading.Event()
    asked: list[int] = []

    def is_unwanted() -> bool:
        asked.append(0)
        if len(asked) == 50:
            at.set()
            go.wait(LIMIT_S)
        return False

    writer = threading.Thread(target=lambda: writes(tmp_path, is_unwanted))
    writer.start()
    assert at.wait(LIMIT_S)
    files.keep()
    for tensor in held.values():
        tensor.zero_()
    go.set()
    writer.join(LIMIT_S)
    assert len(asked) > 100
    assert (tmp_path / "a").read_bytes() == expected


def test_nothing_is_copied_of_what_has_been_written(tmp_path: Path) -> None:
    held = tensors()
    files = StateFiles()
    written(files.take({"a": held}), tmp_path)
    held["f"].zero_()
    files.keep()
    assert files.num_left == 0


def test_a_change_that_nobody_announced_is_noticed(tmp_path: Path) -> None:
    held = tensors()
    writes = StateFiles().take({"a": held})
    held["f"].view(-1)[3:4].add_(1.0)
    with pytest.raises(StateError) as raised:
        written(writes, tmp_path)
    assert str(raised.value) == (
        "a tensor [300, 200] was changed while its checkpoint was being written; what changes "
        "it must call StateFiles.keep before"
    )


def test_what_nobody_wants_any_more_ends(tmp_path: Path) -> None:
    files = StateFiles()
    assert files.take({"a": tensors()})(tmp_path, lambda: True) == {}
    written(files.take({"a": tensors()}), tmp_path)


def test_where_there_is_no_room_for_a_copy_the_disk_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scarce:
        available, total = 1000, 1 << 40

    monkeypatch.setattr(psutil, "virtual_memory", Scarce)
    held = tensors()
    expected = as_written(held)
    files = StateFiles()
    writes = files.take({"a": held})
    writer = threading.Timer(0.1, lambda: written(writes, tmp_path))
    writer.start()
    files.keep()
    assert files.num_left == 0, "it has been written"
    writer.join(LIMIT_S)
    assert (tmp_path / "a").read_bytes() == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_ranks_write_everything_once_and_alike(num_ranks: int) -> None:
    sizes = [1, 8, 3, 5, 9, 2, 2, 7, 4, 4, 6, 1]
    pieces = [
        StoredPiece(str(i), ((0, size),), str(i), (0,), first=True) for i, size in enumerate(sizes)
    ]
    shares = [list(share_of(pieces, rank, num_ranks)) for rank in range(num_ranks)]
    assert [piece for share in shares for piece in share] == pieces
    numbers = [sum(piece.box[0][1] for piece in share) for share in shares]
    assert max(numbers) <= sum(sizes) / num_ranks + max(sizes)


@pytest.mark.gpu
def test_a_gpu_goes_on_at_once(tmp_path: Path) -> None:
    held = tensors("cuda")
    expected = as_written(held)
    files = StateFiles()
    for _ in range(2):  # the second time in the same memory
        again = {name: tensor.clone() for name, tensor in held.items()}
        writes = files.take({"a": again})
        for tensor in again.values():
            tensor.zero_()
        torch.cuda.synchronize()
        written(writes, tmp_path)
        assert (tmp_path / "a").read_bytes() == expected
    assert files.room.num_bytes == 256 << 20
