"""Where large tensors go that nobody computes with: into files that the process's memory has no part in."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mlora_worker.storage.artifacts.aside import Aside, tensors_in, tensors_of
from tests.fixtures.process_memory import data_bytes

MIB = 2**20
COUNT = 16 * MIB  # numbers of four bytes: 64 MiB


def full(tmp_path: Path) -> Aside:
    """Without room for any file."""
    (tmp_path / "file").touch()
    return Aside(tmp_path / "file" / "folder")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_equal_and_takes_no_memory_of_the_process(tmp_path: Path, dtype: torch.dtype) -> None:
    aside, one = Aside(tmp_path / "aside"), torch.randn(1024, COUNT // 1024).to(dtype)
    before = data_bytes()
    copy = aside.copy(one.T if dtype is torch.bfloat16 else one)
    assert data_bytes() - before < MIB
    assert torch.equal(copy, one.T if dtype is torch.bfloat16 else one)
    one.zero_()
    assert copy.any()
    assert aside.held == 0
    assert list((tmp_path / "aside").iterdir()) == [], (
        "the file has no name: whatever ends the process removes it"
    )


def test_packed_tensors_are_there_again_without_a_copy(tmp_path: Path) -> None:
    aside = Aside(tmp_path / "aside")
    tensors = {
        "a": torch.randn(COUNT).view(64, -1),
        "b": torch.arange(5, dtype=torch.uint8),
        "c": torch.zeros(0, 3),
    }
    before = data_bytes()
    payload = aside.payload(tensors)
    found = tensors_in(payload)
    assert data_bytes() - before < MIB
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], one) for name, one in tensors.items())
    assert torch.equal(tensors_in(Aside().payload(tensors))["a"], tensors["a"])


def test_a_buffer_can_be_filled_and_takes_no_memory_of_the_process(tmp_path: Path) -> None:
    before = data_bytes()
    buffer = Aside(tmp_path / "aside").buffer(64 * MIB + 5)
    buffer[:] = bytes([7]) * len(buffer)
    assert data_bytes() - before < 65 * MIB  # the bytes that it was filled from
    assert (len(buffer), buffer[0], buffer[-1]) == (64 * MIB + 5, 7, 7)


def test_what_finds_no_room_on_the_volume_is_in_memory_and_counted_until_it_is_free(tmp_path: Path) -> None:
    aside, one = full(tmp_path), torch.randn(COUNT)
    first, second = aside.copy(one), aside.copy(one)
    assert torch.equal(first, one)
    assert torch.equal(second, one)
    assert aside.held == 128 * MIB
    views = {"a": first[5:9]}
    del first, second
    gc.collect()
    assert aside.held == 64 * MIB, "a view holds the whole"
    views.clear()
    gc.collect()
    assert aside.held == 0
    buffer = aside.buffer(MIB)
    assert aside.held == MIB
    del buffer
    assert aside.held == 0


def test_without_a_budget_all_is_in_memory_and_nothing_is_counted() -> None:
    aside, one = Aside(), torch.randn(COUNT)
    copy = aside.copy(one)
    assert torch.equal(copy, one)
    assert (aside.held, aside.folder) == (0, None)
    assert aside.put({"a": one})["a"] is one


def test_tensors_of_a_removed_file_are_still_there(tmp_path: Path) -> None:
    save_file({"a": torch.arange(100_000.0)}, tmp_path / "x.safetensors")
    before = data_bytes()
    found = tensors_of(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").unlink()
    assert data_bytes() - before < MIB
    assert torch.equal(found["a"], torch.arange(100_000.0))


@pytest.mark.parametrize(
    "data", [b"", b"nothing", (2**40).to_bytes(8, "little") + b"{}", b"\2\0\0\0\0\0\0\0[]"]
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(SafetensorError):
        tensors_of(tmp_path / "x.safetensors")
