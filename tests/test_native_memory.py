"""What host memory a process can come to have: of groups and limits that are written here."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from stronghold.native import host_memory

GIB = 2**30
TOTAL, SWAP = 64 * GIB, 4 * GIB


@pytest.fixture
def most(tmp_path, monkeypatch):
    """A machine of 64 GiB, with 4 GiB of swap and groups whose files are written into it."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=TOTAL, available=GIB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=SWAP, free=0))
    members = tmp_path / "memberships"

    def of(held_bytes=0, *, groups="", **files):
        members.write_text(groups)
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return host_memory.most_host_bytes(held_bytes, members, tmp_path)

    of.without_swap = lambda: host_memory.host_bytes(members, tmp_path)
    return of


def test_it_is_the_machines_with_its_swap_less_what_is_held_and_not_what_is_free(most):
    assert most() == TOTAL + SWAP
    assert most(10 * GIB) == TOTAL + SWAP - 10 * GIB
    assert most(100 * GIB) == 0


def test_a_group_of_version_2_and_those_above_it_limit_it(most):
    groups = "0::/user/job\n"
    assert most(groups=groups, user__job__memory_dot_max="max\n") == TOTAL + SWAP
    assert most(groups=groups, user__memory_dot_max=f"{8 * GIB}\n") == 8 * GIB + SWAP
    assert most(groups=groups, user__memory_dot_swap_dot_max="0\n") == 8 * GIB
    assert most(3 * GIB, groups=groups, user__job__memory_dot_max=f"{2 * GIB}\n") == 2 * GIB + SWAP - 3 * GIB


def test_a_group_of_version_1_limits_it(most):
    groups = "9:memory:/docker/a\n3:cpu:/docker/b\n"
    unlimited = "9223372036854771712\n"
    assert most(groups=groups, memory__docker__a__memory_dot_limit_in_bytes=unlimited) == TOTAL + SWAP
    assert most(groups=groups, memory__docker__a__memory_dot_limit_in_bytes=f"{6 * GIB}") == 6 * GIB + SWAP
    assert most(groups=groups, memory__docker__memory_dot_memsw_dot_limit_in_bytes=f"{7 * GIB}") == 7 * GIB


def test_what_is_planned_with_has_no_swap_in_it(most):
    most()
    assert most.without_swap() == TOTAL
    most(groups="0::/user/job\n", user__memory_dot_max=f"{8 * GIB}\n")
    assert most.without_swap() == 8 * GIB
    most(groups="9:memory:/docker/a\n", memory__docker__a__memory_dot_limit_in_bytes=f"{6 * GIB}")
    assert most.without_swap() == 6 * GIB


def test_a_file_that_cannot_be_read_sets_no_limit(most):
    assert most(groups="0::/job\n", job__memory_dot_max="nonsense") == TOTAL + SWAP


def test_a_limit_of_addresses_leaves_what_is_not_mapped():
    program = """
import resource, psutil
from stronghold.native import most_host_bytes
mapped = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**30, resource.RLIM_INFINITY))
print(most_host_bytes(0))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert 2**29 <= int(done.stdout) <= 2**30, done.stderr
