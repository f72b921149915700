"""Host memory: how long, where, and who else has it."""

import errno
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from stronghold.device.memory import HostBuffer

HUGE = 2 * 2**20


def mapping(address: int) -> dict[str, str]:
    """Returns what the system says of the mapping of this process that holds ``address``, by name."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split()[0] and not line[0].isupper():
            if found:
                break
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                found["range"] = line.split()[0]
        elif found:
            found[name] = value.strip()
    return found


def resident(address: int) -> int:
    """Returns how many bytes of the mapping with this address are in memory."""
    return int(mapping(address)["Rss"].split()[0]) * 1024


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 100_001, HUGE, 3 * HUGE + 5])
def test_it_is_as_long_as_asked_for_begins_at_a_page_and_is_zero(length, private):
    buffer = HostBuffer(length, private=private)
    assert buffer.flat.numel() == length
    assert not buffer.flat.any()
    if length:
        assert buffer.flat.data_ptr() % 4096 == 0


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_a_private_one_has_huge_pages_where_the_system_grants_them_and_takes_no_more_than_asked():
    length = 8 * HUGE + 10_000
    buffer = HostBuffer(length, private=True)
    assert buffer.flat.data_ptr() % HUGE == 0
    first, last = buffer.flat.data_ptr(), buffer.flat.data_ptr() + length - 1
    neighbours = resident(first), resident(last)  # the system may have joined either part to one with the same flags
    buffer.flat.fill_(1)
    whole, rest = mapping(first), mapping(last)
    assert "hg" in whole["VmFlags"].split()
    assert "hg" not in rest["VmFlags"].split()
    assert resident(first) - neighbours[0] == 8 * HUGE
    assert resident(last) - neighbours[1] == 3 * 4096


def test_a_small_private_one_takes_no_addresses_for_a_huge_page():
    buffer = HostBuffer(HUGE - 1, private=True)
    assert len(buffer.mapped) == HUGE - 1
    assert "dc" in mapping(buffer.flat.data_ptr())["VmFlags"].split()


@pytest.mark.parametrize("private", [False, True])
def test_a_child_shares_what_users_look_at_and_has_nothing_of_the_rest(private):
    buffer = HostBuffer(2 * HUGE, private=private)
    buffer.flat.fill_(1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        there = bool(mapping(buffer.flat.data_ptr()))
        if there:
            buffer.flat[5] = 7
        os.write(write, b"1" if there else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == (b"0" if private else b"1")
    assert buffer.flat[5] == (1 if private else 7)
    os.close(read)
    os.close(write)


def test_a_system_without_huge_pages_is_no_error(monkeypatch):
    class Without(mmap.mmap):
        def madvise(self, option, *rest):
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, "Invalid argument")
            super().madvise(option, *rest)

    monkeypatch.setattr(mmap, "mmap", Without)
    buffer = HostBuffer(2 * HUGE, private=True)
    buffer.flat.fill_(1)
    assert "hg" not in mapping(buffer.flat.data_ptr())["VmFlags"].split()


def test_a_child_does_not_give_back_what_it_mapped_itself_where_its_parent_has_private_memory():
    """The addresses are free in the child, so that the system gives them out again."""
    buffer = HostBuffer(64 * HUGE, private=True)
    begin = buffer.flat.data_ptr()
    child = os.fork()
    if child == 0:
        own = [mmap.mmap(-1, 64 * HUGE) for _ in range(64)]
        its = {torch.frombuffer(one, dtype=torch.uint8).data_ptr(): one for one in own}
        there = [address for address in its if address < begin + 64 * HUGE and begin < address + 64 * HUGE]
        del buffer
        gc.collect()
        still = all(torch.frombuffer(its[address], dtype=torch.uint8)[:: 2**12].sum() == 0 for address in there)
        os._exit((0 if still else 2) if there else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "1: it had no memory there; -11: it is gone"
