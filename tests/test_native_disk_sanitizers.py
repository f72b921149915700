"""The disk's own C++ tests, under AddressSanitizer with UBSan, and under ThreadSanitizer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("crc32c", "crc32c_folded", "disk", "disk_file", "disk_piece", "faults", "system")
SOURCES = [ROOT / "csrc" / f"{name}.cpp" for name in NAMES]
TESTS = sorted((ROOT / "tests" / "native_disk").glob("*.cpp"))
COMPILER = os.environ.get("CXX", "g++")
REPORTS = {"address,undefined": "heap-use-after-free", "thread": "data race"}


@pytest.fixture(scope="module", params=REPORTS)
def program(request, tmp_path_factory):
    """The tests' program under one sanitizer, and the sanitizer's name."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"needs a C++ compiler ({COMPILER} is not on the PATH)")
    path = tmp_path_factory.mktemp("sanitized") / "tests"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-I", str(ROOT / "csrc")]
    sanitize = [f"-fsanitize={request.param}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    done = subprocess.run(
        [COMPILER, *flags, *sanitize, *map(str, SOURCES + TESTS), "-o", str(path)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return path, request.param


def run(path, folder, *arguments):
    options = {"ASAN_OPTIONS": "detect_leaks=1", "TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1"}
    return subprocess.run(
        [path, folder, *arguments], capture_output=True, text=True, timeout=120, env=os.environ | options
    )


def test_the_tests_pass_and_the_sanitizer_reports_nothing(program, tmp_path):
    done = run(program[0], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and done.stdout.count("passed") >= 17
    assert done.stderr == ""


def test_the_sanitizer_sees_what_the_threads_do_to_memory(program, tmp_path):
    path, sanitizer = program
    done = run(path, tmp_path, sanitizer)
    assert done.returncode != 0
    assert REPORTS[sanitizer] in done.stderr
