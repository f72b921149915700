"""The processor that the kernels run on, and the extension that holds them."""

import math
import os
import platform
import subprocess
import sys

from stronghold import native
from stronghold.native import processor

ISAS = native.available_isas()


def test_isas_are_listed_plainest_first_and_the_last_is_the_best():
    assert ISAS[0] == "plain"
    if platform.machine() in ("x86_64", "AMD64"):
        assert ("plain", "avx2", "avx512", "avx512vbmi")[: len(ISAS)] == ISAS
    elif platform.machine() in ("aarch64", "arm64"):
        assert ISAS == ("plain", "neon")
    assert native.best_isa() == ISAS[-1]


def test_usable_cores_is_within_the_affinity():
    assert 1 <= native.usable_cores() <= len(os.sched_getaffinity(0))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_cgroup_v2_quota_is_the_least_of_the_group_and_those_above_it(tmp_path):
    write(tmp_path / "memberships", "0::/user/job\n")
    root = tmp_path / "cgroup"
    assert processor._cgroup_quota(tmp_path / "memberships", root) == math.inf
    write(root / "cpu.max", "max 100000\n")
    write(root / "user/cpu.max", "250000 100000\n")
    write(root / "user/job/cpu.max", "400000 100000\n")
    assert processor._cgroup_quota(tmp_path / "memberships", root) == 2.5
    write(root / "user/job/cpu.max", "50000 100000\n")
    assert processor._cgroup_quota(tmp_path / "memberships", root) == 0.5


def test_a_cgroup_v1_quota_is_read_from_the_cpu_controller(tmp_path):
    write(tmp_path / "memberships", "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n")
    root = tmp_path / "cgroup"
    write(root / "cpu/cpu.cfs_quota_us", "-1\n")
    write(root / "cpu/cpu.cfs_period_us", "100000\n")
    assert processor._cgroup_quota(tmp_path / "memberships", root) == math.inf
    write(root / "cpu/docker/a/cpu.cfs_quota_us", "300000\n")
    write(root / "cpu/docker/a/cpu.cfs_period_us", "100000\n")
    assert processor._cgroup_quota(tmp_path / "memberships", root) == 3.0


def test_a_cgroup_that_cannot_be_read_sets_no_limit(tmp_path):
    assert processor._cgroup_quota(tmp_path / "absent", tmp_path) == math.inf
    write(tmp_path / "memberships", "0::/\n")
    write(tmp_path / "cpu.max", "nonsense")
    assert processor._cgroup_quota(tmp_path / "memberships", tmp_path) == math.inf


def test_a_missing_extension_says_how_to_build_it():
    code = "import sys; sys.modules['stronghold._C'] = None; import stronghold.native"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode != 0
    assert "build them with `pip install .`" in done.stderr
    assert "direct cause of the following exception" in done.stderr
