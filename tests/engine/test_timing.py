"""Where a step's time went."""

from stronghold.device import Waits
from stronghold.engine.timing import Stopwatch
from stronghold.native import DiskCounters
from stronghold.window import Traffic


class Clock:
    """A device whose stamps are numbers that a test sets."""

    now = 0.0

    def stamp(self):
        return self.now

    def seconds(self, begin, end):
        return end - begin


def test_each_step_is_cut_from_the_traffic():
    clock, fetched, gradients = Clock(), Traffic(), Traffic()
    moved = DiskCounters(read_bytes=1000, written_bytes=100, busy_s=10.0)
    waits = Waits(clock)
    watch = Stopwatch(waits, fetched, gradients, lambda: moved)
    assert watch.last() is None
    fetched.fetches, fetched.fetched_bytes, gradients.gradient_bytes = 3, 300, 40
    fetched.fetch_waits.append((1.0, 1.5))
    fetched.fetch_waits.append((2.0, 2.25))
    fetched.update_waits.append((4.0, 4.5))
    gradients.update_waits.append((9.0, 9.25))
    waits.for_updates.append((9.25, 9.5))
    fetched.disk_waits.append((5.0, 7.0))
    moved = DiskCounters(read_bytes=1500, written_bytes=170, busy_s=13.0)
    clock.now = 10.0
    watch.lap()
    step = watch.last()
    assert (step.total_s, step.fetch_wait_s, step.update_wait_s, step.compute_s) == (10.0, 0.75, 1.0, 6.25)
    assert (step.fetches, step.fetched_bytes, step.gradient_bytes, step.disk_wait_s) == (3, 300, 40, 2.0)
    assert (step.disk_read_bytes, step.disk_written_bytes, step.disk_busy_s) == (500, 70, 3.0)
    assert watch.last() is step, "asked again, it answers the same"

    fetched.fetches = 1
    clock.now = 12.0
    watch.lap()
    step = watch.last()
    assert (step.total_s, step.compute_s, step.fetches, step.gradient_bytes) == (2.0, 2.0, 1, 0)
    assert (step.disk_wait_s, step.disk_read_bytes, step.disk_busy_s) == (0.0, 0, 0.0)


def test_computing_is_never_less_than_nothing():
    clock, fetched = Clock(), Traffic()
    watch = Stopwatch(Waits(clock), fetched, Traffic(), lambda: DiskCounters(read_bytes=0, written_bytes=0, busy_s=0.0))
    fetched.fetch_waits.append((0.0, 5.0))
    clock.now = 4.0
    watch.lap()
    assert watch.last().compute_s == 0.0
