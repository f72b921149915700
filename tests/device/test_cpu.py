"""The CPU device's memory, and the copies of its streams."""

import subprocess
import sys

import pytest
import torch

from stronghold.device import CpuDevice


@pytest.mark.parametrize("length", [1, 4095, 4096, 100_000])
def test_a_buffer_begins_at_a_page_and_so_does_its_storage(length):
    """A disk is read straight into it, and a tensor in it is found by the beginning of its storage."""
    flat = CpuDevice().buffer(length)
    assert flat.shape == (length,)
    assert flat.dtype is torch.uint8
    assert flat.data_ptr() % 4096 == 0
    assert flat.untyped_storage().data_ptr() == flat.data_ptr()
    flat.fill_(7)
    assert (flat == 7).all()


LARGE = 100_000


@pytest.mark.parametrize("cores", [2, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_stream_copies_every_bit_and_none_beside(dtype, cores, monkeypatch):
    """Those of numbers that are not a number, too, and of a source of any strides."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    stream = CpuDevice().stream("test")
    bits = torch.randint(256, (LARGE, 4), dtype=torch.uint8).view(dtype)
    for source in (bits, bits.t().contiguous().t()):
        whole = torch.zeros(LARGE + 2, bits.shape[1], dtype=dtype)
        stream.copy(whole[1:-1], source)
        stream.record().wait()
        assert torch.equal(whole[1:-1].contiguous().view(torch.uint8), source.contiguous().view(torch.uint8))
        assert not whole[0].any()
        assert not whole[-1].any()


@pytest.mark.parametrize("cores", [2, 64])
def test_a_copy_of_another_shape_fails_and_of_another_type_converts(cores, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    stream, target = CpuDevice().stream("test"), torch.zeros(LARGE)
    stream.copy(target, torch.ones(LARGE, dtype=torch.bfloat16))
    stream.record().wait()
    assert (target == 1).all()
    stream.copy(target, torch.zeros(LARGE - 1))
    with pytest.raises(RuntimeError, match="background copy or update failed"):
        stream.record().wait()
    assert (target == 1).all()


COPYING = """
import os, torch
from stronghold.device import CpuDevice
torch.set_num_threads(2)
large = torch.ones(2**22)
(large + 1).sum()
device = CpuDevice()
stream = device.stream("test")
before = len(os.listdir("/proc/self/task"))
stream.copy(torch.zeros(2**22), large)
stream.record().wait()
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_copy_brings_no_threads_with_it():
    """Those of OpenMP's that compute wait for one another in a loop only while there are no more of them than cores."""
    done = subprocess.run([sys.executable, "-c", COPYING], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
