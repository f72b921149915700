"""What several of the accelerator's tests need."""

import pytest

from stronghold.device.accelerator import AcceleratorDevice


@pytest.fixture
def root_on_the_host(monkeypatch):
    """Without a budget the device has no room for the root's states: the host updates it, to its own bits."""
    monkeypatch.setattr(AcceleratorDevice, "free_bytes", lambda self: 0)


@pytest.fixture
def _no_races():
    """These have races on purpose, and check for them by themselves."""
