"""The sizes that are measured can be multiplied: on tensors without memory, for a GPU's are too large here."""

from types import SimpleNamespace

import pytest
import torch

from stronghold.probing import operator_speed
from stronghold.probing.operator_speed import DTYPES, MOST_MEMORY, Products, _within_reach, product_sizes


class Clock:
    """Runs what it is to time once, on a device with so much free memory."""

    def __init__(self, device, free_bytes=None):
        self.device = SimpleNamespace(torch_device=torch.device(device), free_bytes=lambda: free_bytes)
        self.shapes = []

    def timed(self, task, *, calls=None):
        task()
        return 1e-3


@pytest.mark.parametrize("is_host", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_can_be_multiplied(dtype, is_host, monkeypatch):
    monkeypatch.setattr(operator_speed, "all_cache_bytes", lambda device: 2**20)
    sizes = product_sizes(is_host=is_host)
    found = [measure.sample() for measure in Products(Clock("meta"), dtype, sizes).measures()]
    assert len(found) == len(sizes)
    assert {key[2] for sample in found for key in sample} == {tuple(size[:3]) for size in sizes}


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_that_would_take_much_of_the_devices_memory_are_left_out(dtype):
    free_bytes, sizes = 2**31, product_sizes(is_host=False)
    found = _within_reach(Clock("meta", free_bytes), dtype, sizes)
    taken = [dtype.itemsize * (m * k + k * n + m * n) for m, n, k, _ in found]
    assert max(taken) <= MOST_MEMORY * free_bytes
    assert {size.of_weights for size in found} == {False, True}
    assert len(_within_reach(Clock("meta", 2**50), dtype, sizes)) == len(sizes) > len(found)
