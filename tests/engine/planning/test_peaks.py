"""The planned peak of a step beside the one that the accelerator in software counts, to the byte."""

from typing import Any

import pytest
import torch

from stronghold.errors import BudgetError
from tests.crossed import crossed
from tests.gpu import needs_soft

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"width": 96, "layers": 3, "inner": 160, "dropout": 0.1},
    "gpt": {"layers": 3, "hidden": 64, "heads": 2, "vocabulary": 64},
}


def difference(kind: str, batch: int, *, dtype: torch.dtype | None = None, frozen: bool = False, **given: Any) -> int:
    """Returns by how much what is planned, with nothing resident, is above the peak of two steps."""
    from tests.fits import Case

    given = {"update": "deferred", "window": 1, "resident": 0, **given}
    case = Case(kind, MODELS[kind], batch, sequence=32, dtype=dtype, frozen=frozen, given=given, share=0)
    with pytest.raises(BudgetError) as refused:
        case.planned(device_memory=1)
    plan = case.planned(device_memory=refused.value.needed["device"])  # no root parameter fits beside
    peak_bytes = case.peak_bytes(dict(plan.settings), dict(plan.optimizer))
    return plan.device_bytes - peak_bytes


@pytest.mark.gpu
@needs_soft
@pytest.mark.parametrize(
    ("kind", "batches", "activations"),
    crossed(list(MODELS), [(7, None), (7, 1), (8, 2), (9, 4), (16, 1)], ["recompute", 1, "keep"]),
)
def test_a_peak_is_as_planned(kind, batches, activations):
    batch, micro_batch = batches
    assert difference(kind, batch, micro_batch=micro_batch, activations=activations) == 0


@pytest.mark.gpu
@needs_soft
@pytest.mark.parametrize("kind", MODELS)
def test_a_peak_is_as_planned_in_bf16(kind):
    assert difference(kind, 11, dtype=torch.bfloat16, micro_batch=2, activations="recompute") == 0


@pytest.mark.gpu
@needs_soft
@pytest.mark.parametrize("kind", MODELS)
def test_a_peak_is_at_most_what_is_planned_where_little_is_trained_of_layers(kind):
    """A plan has the gradients of all that is trained beside layers; at the peak those of some are still to come."""
    told = difference(kind, 11, dtype=torch.bfloat16, frozen=True, micro_batch=2, activations="recompute")
    assert 0 < told < 5000


@pytest.mark.gpu
@needs_soft
@pytest.mark.parametrize(
    ("kind", "dtype", "passes"),
    crossed(
        list(MODELS),
        [None, torch.bfloat16],
        [*({"update": "deferred", "accumulate": n} for n in (1, 2, 3)), {"update": "in_backward"}],
    ),
    ids=str,
)
def test_gradients_of_resident_layers_count_when_they_are_there(kind, dtype, passes):
    told = difference(kind, 4, dtype=dtype, resident=3, activations="keep", micro_batch=None, **passes)
    one_layer = {"mlp": 96 * 160 * 2, "gpt": 12 * 64 * 64}[kind] * 4  # whose own may come behind its activations
    assert 0 <= told < 3 * one_layer


@pytest.mark.gpu
@needs_soft
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("kind", MODELS)
def test_a_second_pass_has_a_layer_s_new_gradients_beside_all_that_are_there(kind, batch):
    given = {"resident": 3, "accumulate": 2, "activations": "recompute", "micro_batch": None}
    assert difference(kind, batch, **given) >= 0


@pytest.mark.gpu
@needs_soft
def test_layers_that_are_updated_in_the_backward_pass_keep_no_gradients_on_the_device():
    from tests.fits import Case

    peaks, planned = {}, {}
    for update in ("deferred", "in_backward"):
        given = {"update": update, "window": 1, "resident": 8, "activations": "recompute", "micro_batch": None}
        case = Case(
            "mlp", {**MODELS["mlp"], "layers": 8}, 1, sequence=8, dtype=None, frozen=False, given=given, share=0
        )
        plan = case.planned()
        peaks[update], planned[update] = (
            case.peak_bytes(dict(plan.settings), dict(plan.optimizer)),
            plan.device_bytes,
        )
    gradients = 4 * 2 * 96 * 160  # of one layer's matrices
    assert peaks["deferred"] - peaks["in_backward"] > 6 * gradients
    assert planned["deferred"] - planned["in_backward"] > 4 * gradients
    assert all(peaks[update] <= planned[update] for update in peaks)
