"""What the tests of updates share. One thread is enough for models as small as these: two get in one another's way."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def update(monkeypatch):
    """Returns the launch of the Triton kernel, which Triton's interpreter carries out on the CPU."""
    from stronghold.optim import triton_adamw
    from tests.optim.interpreted import interpreting

    with interpreting(monkeypatch):
        yield triton_adamw.launch


@pytest.fixture
def large(monkeypatch):
    """Has a program update many elements: an interpreted operation takes as long for few of them."""
    from stronghold.optim import triton_adamw

    monkeypatch.setattr(triton_adamw, "ROWS", 256)
