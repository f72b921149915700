"""The library with its four dependencies alone: it is imported fast, and trains; the lab says what it misses."""

import sys

import pytest

from tests import lean

TRAIN = """
import torch, stronghold
from torch import nn

def losses(offloaded):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    if offloaded:
        model = stronghold.offload(model, device="cpu", window=2)
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        loss = model(torch.linspace(-1, 1, 32).reshape(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    if offloaded:
        stronghold.save(model, "saved")
        print(stronghold.report(model))

torch.testing.assert_close([*losses(True)], [*losses(False)])
"""
IMPORT = """
import sys, torch
before = set(sys.modules)
import stronghold
print(*sorted(set(sys.modules) - before))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return lean.make(tmp_path_factory.mktemp("lean"))


def test_the_dependencies_are_four():
    assert sorted(lean.dependencies()) == ["numpy", "psutil", "safetensors", "torch"]


def test_it_trains_saves_and_reports_with_its_dependencies_alone(environment):
    done = lean.run(environment, TRAIN)
    assert done.returncode == 0, done.stderr
    assert "layers" in done.stdout


def test_it_is_imported_fast(environment):
    """Beside its own small files and psutil's it reads nothing that torch has not read, no compiler for one."""
    done = lean.run(environment, IMPORT)
    assert done.returncode == 0, done.stderr
    brought = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert "stronghold" in brought and brought <= {"stronghold", "numpy", "psutil"}


LOAD = """
import json, pathlib, stronghold
from torch import nn

stronghold.save(nn.Linear(2, 2), "theirs")
pathlib.Path("theirs/config.json").write_text(json.dumps({"model_type": "gpt2"}))
stronghold.load("theirs", device="cpu")
"""


def test_a_model_of_transformers_says_that_they_are_missing(environment):
    done = lean.run(environment, LOAD)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'transformers'"


def test_a_command_says_which_package_it_misses_and_its_help_needs_none(environment):
    command = environment, "from stronghold.__main__ import main; sys.exit(main())", "train"
    done = lean.run(*command, "--layers", "1", "--steps", "1")
    assert done.returncode == 1
    told = "this needs rich, which is not installed; pip install '.[lab]' in the project's root"
    assert done.stderr == f"stronghold: error: {told}\n"
    assert lean.run(*command, "--help").returncode == 0
