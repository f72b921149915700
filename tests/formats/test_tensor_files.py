"""Files written tensor by tensor, read by the safetensors library."""

import errno
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from stronghold.formats.tensor_files import DTYPES, TensorFileWriter
from stronghold.native import crc32c

TENSORS = {
    "codes": torch.arange(7, dtype=torch.uint8),
    "weight": torch.randn(3, 5).bfloat16(),
    "master": torch.randn(2, 1, 4),
    "step": torch.tensor(5),
    "none": torch.empty(0, 3),
    "low": torch.randint(-9, 9, (11,), dtype=torch.int16),
    "transposed": torch.randn(4, 6).t(),
}


def announce(tensors):
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def test_the_library_reads_what_was_written_in_any_order(tmp_path):
    path = tmp_path / "file.safetensors"
    with TensorFileWriter(path, announce(TENSORS), {"format": "pt"}) as file:
        sums = {name: file.write(name, tensor) for name, tensor in reversed(TENSORS.items())}
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype is tensor.dtype
        assert torch.equal(loaded[name], tensor)
        assert sums[name] == (crc32c(loaded[name].contiguous()) if tensor.numel() else 0)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert path.stat().st_size == file_length(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_reads_each_dtype(tmp_path, dtype):
    tensor = torch.arange(64, dtype=torch.uint8).view(dtype)
    with TensorFileWriter(tmp_path / "file", {"one": (dtype, tensor.shape)}) as file:
        file.write("one", tensor)
    found = load_file(tmp_path / "file")["one"]
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_a_dtype_without_a_name_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"one of torch.complex64; it has float64, .*quantise to another"):
        TensorFileWriter(tmp_path / "file", {"one": (torch.complex64, (2,))})
    assert not (tmp_path / "file").exists()


def file_length(path):
    header = int.from_bytes(path.read_bytes()[:8], "little")
    return 8 + header + sum(tensor.nbytes for tensor in TENSORS.values())


def test_a_tensor_that_was_not_written_is_told_and_leaves_no_file(tmp_path):
    path = tmp_path / "file.safetensors"
    with pytest.raises(ValueError, match="missing codes, low"), TensorFileWriter(path, announce(TENSORS)) as file:
        for name in TENSORS.keys() - {"codes", "low"}:
            file.write(name, TENSORS[name])
    assert not path.exists()


def test_another_tensor_than_announced_is_refused(tmp_path):
    path = tmp_path / "file.safetensors"
    with pytest.raises(ValueError, match="announced"), TensorFileWriter(path, announce(TENSORS)) as file:
        file.write("master", torch.randn(2, 4))
    assert not path.exists()


def test_a_full_disk_is_told_with_the_file_and_leaves_none(tmp_path, monkeypatch):
    path = tmp_path / "file.safetensors"
    real, calls = os.pwrite, []

    def full(file, data, offset):
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(OSError, match=r"No space left.*file\.safetensors"),
        TensorFileWriter(path, announce(TENSORS)) as f,
    ):
        for name, tensor in TENSORS.items():
            f.write(name, tensor)
    assert not path.exists()
