"""The CPU device's memory."""

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
