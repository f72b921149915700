"""Which checkpoints of a run are whole."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.finetuning import runs


@pytest.mark.parametrize("file", ["manifest.json", "layer-00001.safetensors"])
def test_a_named_pipe_in_a_file_s_place_is_no_checkpoint(tmp_path: Path, file: str) -> None:
    """The run waited for its writer, for ever."""
    wanted = runs.settings(tmp_path, checkpoint_every=4)
    runs.run(wanted)
    (pipe,) = (Path(wanted.out) / "checkpoint-12").rglob(file)
    pipe.unlink()
    os.mkfifo(pipe)
    shown = runs.run(replace(wanted, resume=True))
    assert f"(not a regular file: {pipe})" in shown and "after step 8" in shown
