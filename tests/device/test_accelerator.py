"""What is asked of any accelerator, where there is none: tests/accelerator and tests/test_gpu.py have the rest."""

import warnings

import pytest
import torch

from stronghold.device import Accelerator, HostBuffer, open_device
from stronghold.device import accelerator as accelerator_module

NOWHERE = torch.device("meta", 0)


def test_memory_that_cannot_be_pinned_where_it_lies_stays_pageable_and_it_is_said_once(monkeypatch):
    monkeypatch.setattr(accelerator_module, "_warned", set())
    accelerator, buffer = Accelerator(NOWHERE), HostBuffer(4096)
    with pytest.warns(RuntimeWarning, match="cannot be pinned for the device 'meta'.* pageable"):
        assert accelerator.pin(buffer, []) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accelerator.pin(buffer, []) is False


def test_only_cuda_has_a_limit_of_memory():
    with pytest.raises(ValueError, match=r"needs a CUDA device \(got 'meta:0'\); leave it out"):
        Accelerator(NOWHERE).limit_memory(2**30)


@pytest.mark.parametrize(
    ("found", "wanted", "message"),
    [
        (None, "xpu", "this machine's accelerator \\(got 'xpu'; .* sees no accelerator\\)"),
        ("xpu", "mtia:1", "this machine's accelerator \\(got 'mtia:1'; .* sees 'xpu'\\)"),
        ("mps", "mps", "'mps' has no streams beside one another"),
    ],
)
def test_a_device_must_be_the_machines_and_have_streams(found, wanted, message, monkeypatch):
    device = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    with pytest.raises(ValueError, match=message):
        open_device(wanted)
