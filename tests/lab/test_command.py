"""How a command ends: its exit code, what is told of an error, and that nobody hears of a reader who has gone."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stronghold.errors import StrongholdError
from stronghold.lab.command import FAILED, INTERRUPTED, error_in, in_one_line, run_command

ROOT = Path(__file__).parents[2]


def end_with(raised):
    """Returns the exit code of a command that returns or raises that, and what was told."""
    told = []

    def run(options):
        if isinstance(raised, BaseException):
            raise raised
        return raised

    def tell(error, options):
        told.append((error, options.arguments, options.size))
        return 7

    parser = argparse.ArgumentParser()
    parser.set_defaults(run=run)
    parser.add_argument("--size", type=int)
    return run_command(parser, ["--size", "3"], tell), told


def test_a_command_ends_with_what_it_returns_or_its_error_is_told():
    error = ValueError("no")
    assert end_with(0) == (0, [])
    assert end_with(5) == (5, [])
    assert end_with(error) == (7, [(error, ["--size", "3"], 3)])
    assert end_with(KeyboardInterrupt()) == (INTERRUPTED, [])
    with pytest.raises(SystemExit, match="4"):
        end_with(SystemExit(4))


ENDS = """
import argparse, sys
from stronghold.lab.command import run_command

def run(options):
    for number in range(int(sys.argv[1])):
        print(number)
    return 0

parser = argparse.ArgumentParser()
parser.set_defaults(run=run)
sys.exit(run_command(parser, [], None))
"""


@pytest.mark.parametrize(("loaded", "collected"), [("email", False), ("triton", True)])
def test_a_process_leaves_its_garbage_unless_triton_would_tell_of_it(loaded, collected):
    if loaded == "triton":
        pytest.importorskip("triton")
    count = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() == 0))"  # runs last
    command = [sys.executable, "-c", f"{count}; import {loaded}; {ENDS}", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{collected}\n", "")


SAYS = """
import argparse, os, sys
from stronghold.lab.command import run_command

def run(options):
    print("1 µs … " + os.fsdecode(b"a\\xff"))
    return 0

parser = argparse.ArgumentParser(description="a … description")
parser.set_defaults(run=run)
sys.exit(run_command(parser, sys.argv[1:], None))
"""


@pytest.mark.parametrize(
    ("encoding", "told"),
    [
        ("ascii", rb"1 \xb5s \u2026 a\udcff"),  # as in the locale C where PYTHONCOERCECLOCALE=0
        ("ascii:surrogateescape", rb"1 \xb5s \u2026 a\udcff"),
        ("latin-1", b"1 \xb5s \\u2026 a\\udcff"),
        ("utf-8", "1 µs … a\\udcff".encode()),
        ("utf-8:surrogateescape", "1 µs … a".encode() + b"\xff"),  # Python's own choice in the locale C
    ],
)
def test_what_the_output_s_encoding_lacks_is_escaped_and_no_error(encoding, told):
    def output(*arguments):
        command = [sys.executable, "-c", SAYS, *arguments]
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)

    done = output()
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, told, b"")
    helped = output("--help")
    assert helped.returncode == 0 and b"a " in helped.stdout and helped.stderr == b""


@pytest.mark.parametrize("lines", [1, 9999])  # of which Python hears at its end, or while it prints
def test_a_reader_who_has_gone_is_no_error(lines):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", ENDS, str(lines)]
    with subprocess.Popen(command, cwd=ROOT, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"BrokenPipeError" not in process.stderr.read()
        assert process.wait() == FAILED


CLOSED = """
import argparse, os, sys
from stronghold.lab.command import run_command

def run(options):
    print("to nobody")
    sys.stdin.read()
    os.write(3, b"%d" % os.open(os.devnull, os.O_RDONLY))
    return 0

parser = argparse.ArgumentParser()
parser.set_defaults(run=run)
sys.exit(run_command(parser, [], None))
"""


def test_streams_that_are_closed_from_the_beginning_lead_nowhere(tmp_path):
    command = f"exec {sys.executable} -c '{CLOSED}' 3>{tmp_path}/number <&- >&- 2>{tmp_path}/told"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT).returncode == 0, (tmp_path / "told").read_text()
    assert int((tmp_path / "number").read_text()) > 2, "a file has the number of a standard stream"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\n  and another"), "one and another"),
        (StrongholdError("no"), "no"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), "No such file or directory: x.txt"),
        (
            OSError(27, "File too large", "a/log"),
            "File too large: a/log; raise the limit on the size of files (ulimit -f), or pass a path on another disk",
        ),
        (
            OSError(28, "No space left on device"),
            "[Errno 28] No space left on device; free space there, or pass a path on another disk",
        ),
        (
            PermissionError(13, "Permission denied", "a/config.json"),
            "Permission denied: a/config.json; grant this user the rights to it and to the folders above it, or pass "
            "another path",
        ),
        (OSError(122, "Disk quota exceeded; have it raised", "x"), "Disk quota exceeded; have it raised: x"),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError(), "ValueError"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_an_error_is_one_line(error, line):
    assert in_one_line(error) == line


def test_the_last_error_that_a_command_told_is_found_among_what_it_said():
    said = ["step 1", "stronghold: error: one", "stronghold: error: two\n", "a library's stronghold: error: three", ""]
    assert error_in(said) == "two"
    assert error_in(said[:1]) == error_in([]) == ""
