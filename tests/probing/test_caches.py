"""What is measured out of caches is larger than all of those that the cores share."""

import dataclasses
import os

import pytest
import torch

from stronghold import native
from stronghold.native import Blocks
from stronghold.probing import caches, update_speed
from stronghold.probing.caches import all_cache_bytes, cache_bytes

CPU = torch.device("cpu")
CORE = (("index0", "32K"), ("index1", "32K"), ("index2", "1024K"))
MiB = 2**20


@pytest.fixture
def processors(monkeypatch, tmp_path):
    """Eight cores in two groups, each of which shares 32 MiB; the process may use all but the last."""

    def add(core, folder, size, cores):
        path = tmp_path / f"cpu{core}" / "cache" / folder
        path.mkdir(parents=True)
        (path / "size").write_text(f"{size}\n")
        (path / "shared_cpu_list").write_text(f"{cores}\n")

    for core in range(8):
        for folder, size in CORE:
            add(core, folder, size, str(core))
        add(core, "index3", "32M", "0-3" if core < 4 else "4-7")
    monkeypatch.setattr(caches, "PROCESSORS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(7)})


def test_caches_that_cores_share_count_once(processors):
    assert cache_bytes(CPU) == 32 * MiB
    assert all_cache_bytes(CPU) == 2 * 32 * MiB + 7 * (MiB + 64 * 2**10)


def test_where_nothing_is_told_there_is_a_small_one(monkeypatch, tmp_path):
    monkeypatch.setattr(caches, "PROCESSORS", tmp_path)
    assert cache_bytes(CPU) == all_cache_bytes(CPU) == MiB


def test_updates_take_turns_over_more_than_caches_hold(processors, monkeypatch):
    monkeypatch.setattr(native, "host_bytes", lambda: 2**37)
    taken = {
        (dtype, states): bytes_of(update_speed.segments(dtype, states, 2**16, CPU)) // 2**16
        for dtype in (torch.float32, torch.bfloat16)
        for states in ("fp32", "8bit")
    }
    for (dtype, states), element_bytes in taken.items():
        count = update_speed._so_many(dtype, states, formats=6)
        assert count * element_bytes * update_speed.ELEMENTS >= 2 * all_cache_bytes(CPU)
        assert (count - 1) * element_bytes * update_speed.ELEMENTS < 2 * all_cache_bytes(CPU)
    monkeypatch.setattr(native, "host_bytes", lambda: 2**32)
    assert update_speed._so_many(torch.float32, "fp32", formats=6) == 1


def bytes_of(segments):
    """Returns the bytes of what is updated, in all its tensors; of blocks their exponents do not count."""
    values = [getattr(one, field.name) for one in segments for field in dataclasses.fields(one)]
    tensors = [value.codes if isinstance(value, Blocks) else value for value in values]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
