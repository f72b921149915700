"""The short programs under examples/ run and learn; the cases' scripts are thin."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["loop.py", "trainer.py", "dpo.py", "flux.py"])
def test_it_runs_and_the_loss_falls(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss'?:? '?(\d+\.\d+)", done.stdout)]
    assert len(losses) >= 10
    assert losses[9] < losses[0]


def test_rewards_rise():
    done = subprocess.run([sys.executable, EXAMPLES / "grpo.py"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rewards = [float(x) for x in re.findall(r"'reward': '?(\d+(?:\.\d+)?)", done.stdout)]
    assert len(rewards) >= 10
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5


@pytest.mark.parametrize("number", range(1, 6))
def test_the_scripts_of_a_case_are_links_to_one_file_and_run_from_a_shell(number):
    for name, one in (("run.sh", "case.sh"), ("extract.sh", "case.sh"), ("draw.py", "case.py")):
        path = EXAMPLES / f"case{number}_{name}"
        assert path.readlink() == Path(one)
        assert os.access(path, os.X_OK)


@pytest.mark.parametrize("name", ["case1_run.sh", "case3_extract.sh", "case5_draw.py"])
def test_a_cases_script_helps_and_refuses_from_any_folder(name, tmp_path):
    def call(*arguments):
        environment = os.environ | {"PYTHON": sys.executable}
        command = [sys.executable] if name.endswith(".py") else ["bash"]
        return subprocess.run(
            [*command, EXAMPLES / name, *arguments],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=tmp_path,
            env=environment,
        )

    told = call("--help")
    assert told.returncode == 0
    assert "The largest trainable model (figure 6a)" in told.stdout
    refused = call("--machine", "k80")
    assert refused.returncode == 2
    assert "error: argument --machine: invalid choice: 'k80'" in refused.stderr


def test_the_cases_of_several_methods_ask_for_what_deepspeed_needs(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "case.sh").write_text((EXAMPLES / "case.sh").read_text())
    python = tmp_path / "python"  # which says what is needed, and runs nothing
    python.write_text(f'#!/usr/bin/env bash\nif [[ "$*" == *" needs "* ]]; then exec {sys.executable} "$@"; fi\n')
    python.chmod(0o755)
    (tmp_path / "environment.sh").write_text(
        f"stronghold_environment() {{ PYTHON={python}; }}\nstronghold_baselines() {{ echo asked for: $*; }}\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)

    def said(*arguments):
        command = ["bash", tmp_path / "examples" / "case.sh", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert said("run", "2", "--machine", "cpu").stdout == "asked for: deepspeed ninja\n"
    assert said("run", "2", "--machine=tiny").stdout == said("run", "4").stdout == said("extract", "2").stdout == ""
    assert said("run", "2", "-h").stdout == ""
    wrong = said("run", "2", "--wrong")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "unrecognized arguments: --wrong" in wrong.stderr
