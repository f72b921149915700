"""The window's own: slots allocated once, parameters that look into them only while their layer computes."""

import pytest
import torch

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import OffloadedModelError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.unit import OffloadedParameter
from stronghold.window import Traffic


def offloaded(**settings):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=5, hidden=32, heads=2, sequence=16, vocabulary=100))
    return stronghold.offload(model, device="cpu", **settings)


def step(model, optimizer):
    tokens = torch.randint(0, 100, (2, 16))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("window", [1, 2, 5])
def test_slots_are_allocated_once(window):
    model = offloaded(window=window)
    optimizer, engine = stronghold.AdamW(model.parameters()), engine_of(model)

    def addresses():
        return sorted(s.flat.data_ptr() for s in [*engine.window.slots, *engine.gradients.grad_offload.slots])

    before = addresses()
    assert len(engine.window.slots) == window
    for _ in range(3):
        step(model, optimizer)
    assert addresses() == before


def test_a_layers_parameters_look_into_a_slot_only_while_it_computes():
    model = offloaded(window=2)
    engine, seen = engine_of(model), []
    weight = model.layers[3].qkv.weight if hasattr(model.layers[3], "qkv") else next(model.layers[3].parameters())
    slots = [(s.flat.data_ptr(), s.flat.data_ptr() + s.flat.numel()) for s in engine.window.slots]

    def in_slot():
        with torch._C.DisableTorchFunctionSubclass():
            return any(begin <= weight.data_ptr() < end for begin, end in slots)

    model.layers[3].register_forward_pre_hook(lambda *rest: seen.append(in_slot()))  # before it is brought in
    next(m for m in model.layers[3].modules() if m is not model.layers[3]).register_forward_pre_hook(
        lambda *rest: seen.append(in_slot())
    )
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    assert seen == [False, True]
    assert not in_slot()
    assert type(weight) is OffloadedParameter


def test_a_layer_that_writes_its_own_parameters_is_refused():
    class Writer(torch.nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model = torch.nn.Sequential(Writer(3, 3), Writer(3, 3))
    stronghold.offload(model, window=1, device="cpu")
    with pytest.raises(OffloadedModelError, match="changed one of its own parameters in place"):
        model(torch.ones(1, 3))


def test_traffic_is_cut_into_steps():
    traffic = Traffic(fetches=3, fetched_bytes=30)
    traffic.fetch_waits.append((1.0, 2.0))
    last = traffic.cut()
    assert (last.fetches, last.fetched_bytes, list(last.fetch_waits)) == (3, 30, [(1.0, 2.0)])
    assert (traffic.fetches, traffic.fetched_bytes, list(traffic.fetch_waits)) == (0, 0, [])


def test_report_counts_a_steps_traffic():
    model = offloaded(window=2)
    optimizer = stronghold.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer)
    last, unit = stronghold.report(model).step, engine_of(model).layers[0]
    assert last.fetches == 2 * 5 - 2
    assert last.fetched_bytes == 8 * unit.layout.total_bytes
    assert last.gradient_bytes == 5 * unit.gradients.layout.total_bytes
    assert last.total_s > 0
