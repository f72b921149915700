"""How many threads an update takes is measured in the training's own calls, by a clock that the tests set."""

import pytest
import torch

import stronghold
from stronghold.native import BLOCK, Blocks, Segment
from stronghold.optim import Threads
from tests.small import Residual, numbers, ordinary_loop, pair

PARAMETERS = 2**24  # of 16 bytes each: 4 MiB for each of 64 threads


def segment(parameters=PARAMETERS, step=2, states="fp32"):
    one = torch.zeros(1).expand(parameters)  # as long as asked for, in the memory of one element
    if states == "8bit":
        codes = torch.zeros(1, dtype=torch.uint8)
        one_moment = Blocks(codes=codes.expand(parameters), exponents=codes.expand(parameters // BLOCK))
    else:
        one_moment = one
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "step": step}
    return Segment(weight=one, grad=one, exp_avg=one_moment, exp_avg_sq=one_moment, **settings)


class Machine:
    """A clock, and a kernel that takes as long as a machine whose memory so many cores keep busy."""

    def __init__(self, saturated_at, noise=()):
        self.now_s, self.saturated_at, self.calls, self.noise = 0.0, saturated_at, [], dict(noise)

    def clock(self):
        return self.now_s

    def kernel(self, threads):
        self.now_s += self.noise.get(len(self.calls), 1.0) / min(threads, self.saturated_at)
        self.calls.append(threads)


def decided(machine, most, segments=None, calls=40):
    threads = Threads(most, measured=True, clock=machine.clock)
    for _ in range(calls):
        threads.run(machine.kernel, [segment()] if segments is None else segments)
    return threads.count


@pytest.mark.parametrize("most", [1, 2, 3, 15, 16, 63])
@pytest.mark.parametrize("saturated_at", [1, 2, 5, 6, 15, 64])
def test_it_is_the_least_number_that_keeps_memory_busy(most, saturated_at):
    machine = Machine(saturated_at)
    expected = min(most, saturated_at)
    assert decided(machine, most) == expected or (most == 63 and saturated_at == 64)  # 62 take 1.6 % longer
    assert machine.calls[-1] == decided(Machine(saturated_at), most), "and it stays with it"


def test_what_is_tried_is_a_literal():
    machine = Machine(6)
    decided(machine, 15, calls=18)
    assert machine.calls == [15] * 3 + [7] * 3 + [3] * 3 + [5] * 3 + [6] * 6
    assert sum(1 for threads in machine.calls if threads < 6) == 6, "so many calls are slower than need be"


def test_other_work_that_slows_two_of_three_calls_changes_nothing():
    noise = {call: 3.0 + call % 5 for call in range(30) if call % 3 != 1}
    assert decided(Machine(6, noise), 15) == 6


def test_a_number_given_is_kept_and_not_timed():
    machine = Machine(1)
    threads = Threads(7)
    for _ in range(20):
        threads.run(machine.kernel, [segment()])
    assert machine.calls == [7] * 20


@pytest.mark.parametrize(
    "untold", [segment(step=1), segment(parameters=2**16), segment(parameters=2**23 // 4, states="8bit")]
)
def test_first_touches_and_short_calls_tell_nothing(untold):
    machine = Machine(1)
    assert decided(machine, 15, [untold]) == 15
    assert set(machine.calls) == {15}


def test_calls_of_other_lengths_are_compared_by_the_byte():
    machine, threads = Machine(4), None
    threads = Threads(8, measured=True, clock=machine.clock)
    for call in range(30):
        length = 1 + call % 3

        def kernel(count, length=length):
            machine.now_s += (length - 1) / min(count, 4)
            machine.kernel(count)

        threads.run(kernel, [segment()] * length)
    assert threads.count == 4


def test_where_the_cpu_computes_all_cores_update_and_on_an_accelerator_it_is_measured():
    _, model = pair(Residual, window=2)
    optimizer = stronghold.AdamW(model.parameters())
    assert optimizer.threads == stronghold.native.usable_cores()
    tried = []
    optimizer.kernel_threads.run(tried.append, [segment()])
    assert tried == [optimizer.threads]
    engine = optimizer._engine
    engine.device.torch_device = torch.device("meta")
    measured = engine.update_threads()
    assert measured.count == max(1, stronghold.native.usable_cores() - 1)
    engine.device.torch_device = torch.device("cpu")


def test_training_that_measures_has_the_bits_of_training_that_does_not(monkeypatch):
    monkeypatch.setattr("stronghold.optim.threads.LEAST_BYTES", 1)
    losses = []
    for measured in (False, True):
        torch.manual_seed(0)
        _, model = pair(Residual, window=2)
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, threads=1)
        if measured:
            optimizer.kernel_threads = Threads(4, measured=True)
        losses.append([float(loss) for loss in ordinary_loop(model, optimizer, numbers(6))])
    assert losses[0] == losses[1]
    assert optimizer.kernel_threads._trying is None, "it was decided meanwhile"
