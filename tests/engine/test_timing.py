"""Where a step's time went."""

import time

import torch
from torch import nn

from stronghold import AdamW, offload, report
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


def stopwatch():
    clock, fetched = Clock(), Traffic()
    nothing = DiskCounters(read_bytes=0, written_bytes=0, busy_s=0.0)
    return clock, fetched, Stopwatch(Waits(clock), fetched, Traffic(), lambda: nothing)


def test_what_lies_between_steps_and_passes_is_not_computing():
    clock, fetched, watch = stopwatch()
    layer = nn.Linear(1, 1)
    clock.now = 1.0
    watch.lap()

    fetched.fetch_waits.append((2.0, 3.0))  # an evaluation's
    clock.now = 4.0
    with torch.no_grad():
        watch.come_back(layer.eval())
    assert watch.last().total_s == 1.0
    clock.now = 5.0
    watch.come_back(layer)  # the first pass, 4 s behind the step
    fetched.fetch_waits.append((5.0, 5.5))
    clock.now = 7.0
    watch.come_back(layer)  # a further layer
    watch.leave(more=True)  # as in a pipeline: nothing lies between
    clock.now = 8.0
    watch.leave(more=False)
    fetched.fetch_waits.append((8.0, 8.25))
    fetched.update_waits.append((8.25, 8.3125))  # updates are the step's, whoever waits first
    watch._waits.for_updates.append((8.375, 8.4375))
    clock.now = 8.5
    watch.leave(more=False)
    with torch.no_grad():
        watch.come_back(layer.train())  # the second pass, in a checkpoint without gradients
    fetched.disk_waits.append((9.0, 9.125))
    clock.now = 10.0
    watch.leave(more=False)
    clock.now = 11.0
    watch.lap()  # clipping and the step are the step's
    step = watch.last()
    assert (step.total_s, step.outside_s, step.fetch_wait_s, step.disk_wait_s) == (10.0, 4.375, 0.5, 0.125)
    assert step.update_wait_s == 0.125
    assert step.compute_s == 10.0 - 4.375 - 0.5 - 0.125 - 0.125
    assert step.training_s == 5.625

    clock.now = 12.0
    watch.come_back(layer)
    clock.now = 14.0
    watch.lap()
    step = watch.last()
    assert (step.total_s, step.outside_s, step.fetch_wait_s, step.compute_s) == (3.0, 1.0, 0.0, 2.0)


def test_evaluating_between_two_steps_is_told_apart():
    model = offload(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), device="cpu", window=1)
    optimizer = AdamW(model.parameters())

    def pause(layer, inputs):
        time.sleep(0.05)

    sample = torch.ones(2, 8)
    for passes in (1, 2):
        model(sample).sum().backward()
        optimizer.step()
        hook = model[0].register_forward_pre_hook(pause)
        with torch.no_grad():
            model.eval()(sample)
        hook.remove()
        for _ in range(passes):
            model.train()(sample).sum().backward()
            time.sleep(0.05)
        optimizer.step()
        step = report(model).step
        # Behind the last pass it is the step's.
        assert 0.05 * passes < step.outside_s < step.total_s - 0.05
        assert step.compute_s < step.total_s - step.outside_s
    assert "beside training" in str(report(model))


def test_a_second_pass_through_a_kept_graph_is_training():
    model = offload(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), device="cpu")
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def slow(layer, inputs):
        inputs[0].register_hook(lambda _: time.sleep(0.5))

    optimizer.step()  # what came before is no step's
    model[1].register_forward_pre_hook(slow)
    first = model(torch.ones(2, 4)).square().sum()
    first.backward(retain_graph=True)
    first.backward()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    step = report(model).step
    assert step.total_s > 1.5
    assert step.outside_s < 0.5
