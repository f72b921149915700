"""What a run tells of its steps, and of one that fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stronghold.lab.training import TrainingError
from tests.lab.finetuning import runs, small


def test_a_step_has_the_samples_that_are_left_of_an_epoch(tmp_path: Path) -> None:
    """Of twelve rows a step told twenty, and the speed was that of as many."""
    wanted = runs.settings(tmp_path, batch=5, accumulate=2, epochs=2.0)
    shown = runs.run(wanted)
    assert [step["batch"] for step in runs.records(wanted, "step")] == [10, 2, 10, 2]
    assert "4 of 10 samples of up to 40 tokens" in shown
    wanted = replace(wanted, batch=4, accumulate=5, out=str(tmp_path / "one"), save=str(tmp_path / "saved"))
    runs.run(wanted)
    steps = runs.records(wanted, "step")
    assert [step["batch"] for step in steps] == [12, 12]
    (end,) = runs.records(wanted, "end")
    assert end["summary"]["samples_per_s"] == pytest.approx(12 / end["summary"]["iteration_s"])


def test_gradients_that_are_not_finite_end_the_run_with_remedies_that_the_command_has(tmp_path: Path) -> None:
    """It said to pass nonfinite='skip', which is the optimizer's alone."""
    made = small.model()
    made.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    small.tokenizer().save_pretrained(tmp_path / "model")
    made.save_pretrained(tmp_path / "model")
    with pytest.raises(TrainingError) as told:
        runs.run(runs.settings(tmp_path))
    assert str(told.value) == (
        "step 1 failed: the gradients' norm must be finite (got nan); nothing was updated; lower --lr, warm up "
        "(--warmup), clip (--clip), or check the model's weights and the rows"
    )
