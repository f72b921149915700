"""For all tests with other libraries' trainers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one, and tests differ in their precision
    torch.set_num_threads(before)
