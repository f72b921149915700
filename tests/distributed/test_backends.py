"""By which backends of torch.distributed processes send to one another."""

from __future__ import annotations

import pytest
import torch

from stronghold.distributed.processes import backend_for
from stronghold.errors import ParallelError


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("cuda:1", "cpu:gloo,cuda:nccl")]
)
def test_what_is_on_a_gpu_is_sent_from_there(device: str, backend: str) -> None:
    assert backend_for(torch.device(device)) == backend


def test_a_device_without_a_backend_is_refused() -> None:
    with pytest.raises(ParallelError, match=r"\(got 'meta', for which PyTorch has no backend\); train in one process"):
        backend_for(torch.device("meta"))
