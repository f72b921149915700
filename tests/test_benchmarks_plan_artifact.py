"""The step model beside the artifact's own runs on a V100, with constants that were fitted to four of them."""

import json

import pytest

from benchmarks.plan_artifact import FITTED, RESULTS, predicted_s, published

CONSTANTS = json.loads(RESULTS.read_text().splitlines()[-1])["constants"]


@pytest.mark.parametrize(("run", "seconds"), sorted(published().items()), ids=str)
def test_the_artifacts_steps_are_foretold(run, seconds):
    error = abs(predicted_s(*run, CONSTANTS) / seconds - 1)
    assert error < (0.01 if run in FITTED else 0.10)


def test_a_window_is_worth_something_only_where_the_model_has_one():
    """As many layers as that are resident: without them the runs with 32 layers would take as long at any window."""
    assert predicted_s(32, 2, CONSTANTS) > 1.2 * predicted_s(32, 15, CONSTANTS)
