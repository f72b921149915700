"""Who tells that a process is lost, where the store of the signs of life is lost with it."""

from __future__ import annotations

import threading
import time

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


class Kept(dist.Store):
    """A store in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()


def test_all_threads_that_wait_for_a_lost_process_have_the_error_that_says_so(monkeypatch):
    """A stream's thread may be told first, and the main thread wait for what that does."""
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    own, found = watch.Watch(Gone(), 1, 2, [0, 1]), list[BaseException]()

    def wait() -> None:
        try:
            with own.beside():
                raise RuntimeError("Connection closed by peer")
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 3, "a thread waits for ever"
    assert isinstance(found[0], LostProcessError) and all(error is found[0] for error in found)


@pytest.mark.parametrize(("alive", "tells"), [([], True), ([1], False), ([2], False)])
def test_of_several_that_are_lost_at_once_the_first_that_is_left_tells(monkeypatch, alive, tells):
    """As where memory runs out: process 1 is to tell of process 0, and may be gone with it."""
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    own, now = watch.Watch(Kept(), 3, 4, [0, 1, 2, 3]), time.monotonic()
    own._over.set()  # its thread would look for others
    own._thread.join()
    own._beats = {rank: (["1", "0", "0", "0"], now if rank in alive else now - 60) for rank in range(3)}
    assert own._is_to_tell(0, 20.0) is tells
