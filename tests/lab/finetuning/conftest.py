"""For all tests of fine-tuning: one thread, a machine that was probed, and no state of accelerate's from before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.planner.machines import laptop


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("stronghold.engine.planning.auto.kept_machine", lambda device: laptop())
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(before)
