"""environment.sh and test.sh: the tests of a GPU run on a machine that has little besides one, and no network."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WANTED = "numpy psutil pytest safetensors"
MARK = "pytest.mark." + "gpu"  # in two: this file is none of those that have it
ABSENT = "import pytest, sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split())); sys.exit(pytest.main())"


def listed(name):
    script = '. ./environment.sh; declare -n modules="$1"; printf "%s\\n" "${modules[@]}"'
    return subprocess.check_output(["bash", "-c", script, "bash", name], cwd=ROOT, text=True).split()


def called(tmp_path, *arguments):
    """Returns which modules ./test.sh wants, and what it gives to pytest, without either."""
    for name in ("test.sh", "environment.sh"):
        shutil.copy(ROOT / name, tmp_path)
    tests = tmp_path / "tests" / "store"
    tests.mkdir(parents=True)
    (tests / "test_on_it.py").write_text(f"@{MARK}\n")
    (tests / "test_elsewhere.py").write_text("import hypothesis\n")
    with (tmp_path / "environment.sh").open("a") as file:
        file.write('stronghold_environment() { echo "${STRONGHOLD_MODULES[@]}" "$@"; PYTHON=echo; }\n')
    done = subprocess.run([tmp_path / "test.sh", *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    modules, *lines = done.stdout.splitlines()
    return modules.strip(), lines


@pytest.mark.parametrize(
    ("arguments", "files"),
    [((), "tests/store/test_on_it.py"), (("-q",), "tests/store/test_on_it.py"), (("tests/a.py",), "")],
)
def test_the_tests_of_a_gpu_want_little_and_collect_their_own_files(tmp_path, arguments, files):
    modules, (line,) = called(tmp_path, "-m", "gpu", *arguments)
    assert modules == WANTED
    assert line.split() == ["-m", "pytest", "-m", "gpu", *arguments, *files.split()]


def test_the_others_want_everything(tmp_path):
    modules, (line,) = called(tmp_path, "-k", "native")
    assert modules.split() == listed("STRONGHOLD_MODULES") + listed("STRONGHOLD_TEST_MODULES")
    assert line == "-m pytest -k native"


def test_the_files_with_tests_of_a_gpu_import_what_is_wanted_for_them():
    files = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text()]
    assert ROOT / "tests" / "test_gpu.py" in map(Path, files)
    absent = {*listed("STRONGHOLD_MODULES"), *listed("STRONGHOLD_TEST_MODULES"), "pybind11", "sklearn"}
    absent -= {*WANTED.split(), "triton"}  # PyTorch has its own where it compiles
    command = [sys.executable, "-c", ABSENT, " ".join(absent), "--collect-only", "-qq", *files]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-baselines.txt"])
@pytest.mark.parametrize("torch", ["2.9.1+cu126", "2.10.0", "2.13.0+cpu"])
def test_the_torchao_that_is_installed_is_one_that_this_torch_can_import(tmp_path, name, torch):
    """0.18 ends, with torch 2.9, in an ImportError about ``ScalingType``, and transformers' models with it."""
    (tmp_path / "torch.py").write_text(f"__version__ = {torch!r}\n")
    script = '. ./environment.sh; PYTHON="$1" _stronghold_requirements "$2"'
    command = ["bash", "-c", script, "bash", sys.executable, name]
    found = subprocess.check_output(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, text=True)
    pinned = (ROOT / name).read_text()
    if torch.startswith("2.9."):
        pinned = re.sub(r"^torchao==.*$", "torchao==0.17.0", pinned, flags=re.MULTILINE)
    assert found == pinned


def test_an_extension_that_first_sh_built_is_not_built_again(tmp_path):
    """A minute of the few for which a GPU is lent: it left no stamp."""
    for path in ("environment.sh", "benchmarks/gpu/common.sh"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for name, text in (("csrc/a.cpp", "int a;"), ("pyproject.toml", ""), ("stronghold/__init__.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (tmp_path / "setup.py").write_text(f"open('stronghold/_C{suffix}', 'a').write('built')")
    for name in ("pybind11", "setuptools"):
        (tmp_path / f"{name}.py").write_text("__version__ = '80.0'")
    script = """
    set -euo pipefail
    . benchmarks/gpu/common.sh --minutes 0.1 --out out
    mkdir -p build
    build
    . ./environment.sh
    _stronghold_check_system() { echo "building again"; }
    _stronghold_pip() { exit 1; }
    _stronghold_build
    """
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "stronghold" / f"_C{suffix}").read_text() == "built"
