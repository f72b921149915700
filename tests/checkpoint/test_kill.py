"""Killed at random moments, a training goes on from its last checkpoint with the losses of one that was not."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ten_random_kills_change_no_loss():
    """``python -m tests.checkpoint.kill_loop --kills 100`` is the same for longer."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.kill_loop", "--kills", "10", "--seed", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    counts = json.loads(found.stdout.splitlines()[-1])
    assert counts["killed"] == 10
    assert counts["runs"] >= 2
    assert min(counts[kind] for kind in ("checkpoint", "start", "step", "clock")) >= 2
    assert counts["resumed"] >= 2
