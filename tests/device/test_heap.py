"""What the process keeps of what tensors free, while a model is trained on the CPU."""

import ctypes
import gc
import resource

import pytest
import torch
from torch import nn

import stronghold
from stronghold.device.heap import keep_freed_memory

SIZE = 256 * 2**20
PAGES = SIZE // resource.getpagesize()

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="another C library")


class Owner:
    pass


@pytest.fixture(autouse=True)
def _no_other_models():
    gc.collect()


def new_pages() -> int:
    """Makes a large tensor twice; returns how many pages the system gave to the second."""
    torch.empty(SIZE, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(SIZE, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_what_is_freed_is_kept_while_one_of_the_owners_lives():
    assert new_pages() >= PAGES / 512  # huge pages at most
    one, other = Owner(), Owner()
    keep_freed_memory(one)
    keep_freed_memory(other)
    assert new_pages() < PAGES / 1024
    del one
    assert new_pages() < PAGES / 1024
    del other
    assert new_pages() >= PAGES / 512


@pytest.mark.parametrize(
    ("update", "on_disk", "keeps"),
    [("deferred", False, True), ("in_backward", False, False), ("deferred", True, False)],
)
def test_an_optimizer_that_is_there_to_be_fast_keeps_it(tmp_path, update, on_disk, keeps):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    stronghold.offload(model, device="cpu", store=tmp_path / "store" if on_disk else "ram")
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-3, update=update)
    assert (new_pages() < PAGES / 1024) is keeps
    del optimizer
    gc.collect()
    assert new_pages() >= PAGES / 512
