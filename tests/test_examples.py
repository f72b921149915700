"""The short programs under examples/ run and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["loop.py", "trainer.py"])
def test_it_runs_and_the_loss_falls(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss'?:? '?(\d+\.\d+)", done.stdout)]
    assert len(losses) >= 10
    assert losses[9] < losses[0]
