"""Who tells that a process is lost, where the store of the signs of life is lost with it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from stronghold.distributed import watch
from stronghold.errors import LostProcessError


class Gone(dist.Store):
    """A store whose process has ended."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize(("rank", "local_ranks", "tells"), [(1, [0, 1], True), (2, [2, 3], True), (3, [2, 3], False)])
def test_the_first_on_each_machine_tells_of_the_store_s(monkeypatch, rank, local_ranks, tells):
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    own = watch.Watch(Gone(), rank, 4, local_ranks)
    with pytest.raises(LostProcessError, match="process 0 is lost") as lost, own.waiting():
        raise RuntimeError("Connection closed by peer")
    assert lost.value.ours is tells
