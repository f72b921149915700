"""What several processes are told of the settings that ``offload`` plans one process with."""

from __future__ import annotations

import pytest
import torch

from stronghold.distributed.facts import facts_of
from tests.small import Residual


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("plan", "plan.json", "'plan.json'"),
        ("inputs", torch.ones(4, 8), "Tensor"),
        ("experts_per_part", "auto", "'auto'"),
        ("activations", "auto", "'auto'"),
        ("micro_batch", "auto", "'auto'"),
    ],
)
def test_they_are_refused_by_name(name, value, told):
    with pytest.raises(
        ValueError, match=rf"^{name}= is what offload\(\) plans one process with \(got {told}, .*processes=N"
    ):
        facts_of(Residual(), None, {"window": 2, name: value})


def test_values_are_facts():
    facts = facts_of(Residual(), None, {"window": 2, "activations": "host", "micro_batch": 4})
    assert facts["activations"] == "host" and facts["micro_batch"] == 4
