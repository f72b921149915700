"""A model that nobody has made settings for is planned when its first training pass shows what its inputs are."""

import copy
import logging
import pickle
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import stronghold
from stronghold.device.throttled import Speed, ThrottledDevice
from stronghold.engine import engine_of, first_pass
from stronghold.engine.planning import first_inputs
from stronghold.engine.rearranging import rearrange
from stronghold.errors import OffloadedModelError
from stronghold.lab.models.gpt import GPT, GPTConfig
from tests.adapters import with_adapters
from tests.crossed import crossed
from tests.engine.test_packed import LORA, packed
from tests.engine.test_tensor_subclasses import quantised
from tests.planner.machines import machine

CONFIG = GPTConfig(layers=6, hidden=64, heads=4, sequence=32, vocabulary=128)
SOME, FEW = 17 * 2**18, 7 * 2**18
"""Bytes of devices that hold some of the layers, and none beside a window."""


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """A GPU that was probed, with so much memory as is put into ``memory``."""
    memory = [2**30]
    monkeypatch.setattr(
        "stronghold.engine.planning.auto.kept_machine", lambda device: machine(device_memory_bytes=memory[-1])
    )
    return memory


def ids(samples=1):
    return torch.randint(0, 128, (samples, 32), generator=torch.Generator().manual_seed(1))


def gpt(dropout=0.0):
    torch.manual_seed(0)
    return GPT(replace(CONFIG, dropout=dropout))


def on_a_gpu(model, **settings):
    device = ThrottledDevice(Speed(flops=1e12, up=1e10, down=1e10, host=1e10), tokens=128)
    return stronghold.offload(model, device=device, **settings)


def trained(model, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        loss = model(ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def as_planned(model, **settings):
    """Returns a model that is offloaded from the beginning as another one was planned."""
    report = stronghold.report(model)
    kept = sum(block.keep for block in engine_of(model).blocks)
    return on_a_gpu(gpt(), window=report.window or 1, resident=report.resident, activations=kept, **settings)


def alike(ours, theirs):
    assert ours[0] == theirs[0]
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "stronghold"]


def test_a_model_that_fits_becomes_resident_and_says_so(caplog):
    model = on_a_gpu(gpt())
    optimizer = stronghold.AdamW(model.parameters())
    before = stronghold.report(model)
    assert before.resident == 0
    assert before.awaits_inputs
    assert "for the first training pass" in str(before)
    with caplog.at_level(logging.INFO, logger="stronghold"):
        ours = trained(model, optimizer)
    report = stronghold.report(model)
    assert (report.resident, report.window, report.awaits_inputs) == (6, 0, False)
    (line,) = lines(caplog)
    assert report.planned.chosen in line
    assert "the model fits, and stays" in line
    plain = gpt()
    theirs = trained(plain, torch.optim.AdamW(plain.parameters()))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)


@pytest.mark.parametrize(
    ("memory_bytes", "dtype", "optimizer"),
    crossed(
        [2**30, SOME, FEW],
        [torch.float32, torch.bfloat16],
        [{}, {"update": "in_backward"}, {"states": "8bit"}, {"max_grad_norm": 0.1}],
        together=1,
    ),
)
def test_bits_and_bytes_are_those_of_a_model_that_was_offloaded_so(here, memory_bytes, dtype, optimizer):
    here.append(memory_bytes)
    model = on_a_gpu(gpt(), dtype=dtype)
    ours = trained(model, stronghold.AdamW(model.parameters(), **optimizer))
    other = as_planned(model, dtype=dtype)
    theirs = trained(other, stronghold.AdamW(other.parameters(), **optimizer))
    alike(ours, theirs)
    report, expected = stronghold.report(model), stronghold.report(other)
    if memory_bytes == SOME:
        assert report.resident > 0
        assert report.resident < 6 or optimizer == {"states": "8bit"}
    bytes_of = [name for name in vars(report) if name.endswith("device_bytes") and not name.startswith("peak")]
    for name in ("window", "resident", "resident_root", "pinned_host_bytes", "pageable_host_bytes", *bytes_of):
        assert getattr(report, name) == getattr(expected, name), name
    assert report.planned is not None
    assert expected.planned is None


@pytest.mark.parametrize("memory_bytes", [2**30, SOME])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_masters_and_states_that_were_loaded_move_along(here, memory_bytes, states, tmp_path):
    first = on_a_gpu(gpt(), window=2, dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(first.parameters(), states=states)
    trained(first, optimizer)
    stronghold.checkpoint.save(tmp_path / "saved", first, optimizer)
    expected = trained(first, optimizer)
    here.append(memory_bytes)
    model = on_a_gpu(gpt(), dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(model.parameters(), states=states)
    stronghold.checkpoint.load(tmp_path / "saved", model, optimizer)
    alike(trained(model, optimizer), expected)
    assert stronghold.report(model).resident > 0


def test_what_was_computed_and_written_before_counts():
    other, model = on_a_gpu(gpt(), window=1, dtype=torch.bfloat16), on_a_gpu(gpt(), dtype=torch.bfloat16)
    outputs, results = [], []
    for one in (other, model):
        optimizer = stronghold.AdamW(one.parameters())
        with torch.no_grad():
            outputs.append(one(ids()).logits.clone())
        one.eval()
        assert one(ids()).logits.requires_grad
        one.train()
        for parameter in one.layers[2].parameters():
            parameter.data.mul_(1.5)
        results.append(trained(one, optimizer))
    assert torch.equal(*outputs)
    alike(*results)
    assert stronghold.report(model).resident == 6


@pytest.mark.parametrize(
    "settings",
    [{"window": 2}, {"resident": 0}, {"activations": "recompute"}, {"micro_batch": 2}, {"host_memory": "1GiB"}],
)
def test_what_somebody_has_set_stays(settings):
    model = on_a_gpu(gpt(), **settings)
    trained(model, stronghold.AdamW(model.parameters()), steps=1)
    report = stronghold.report(model)
    assert report.resident == 0
    assert report.planned is None
    assert not report.awaits_inputs


def test_where_something_is_in_the_way_the_model_stays_and_the_log_says_what(here, caplog):
    def with_torch(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def with_two(model):
        parameters = list(model.parameters())
        others.append(stronghold.AdamW(parameters[:4]))
        return stronghold.AdamW(parameters[4:])

    def with_gradients(model):
        model.eval()
        model(ids(), labels=ids()).loss.backward()
        model.train()
        return stronghold.AdamW(model.parameters())

    def held(model):
        others.append(next(model.layers[1].parameters()).data)
        return stronghold.AdamW(model.parameters())

    def with_a_graph(model):
        model.eval()
        others.append(model(ids()).logits)
        model.train()
        return stronghold.AdamW(model.parameters())

    def passed_by(model):
        model.__dict__["_call_impl"] = lambda *args, **kwargs: model.forward(*args, **kwargs)  # as what wraps it may
        return stronghold.AdamW(model.parameters())

    def too_small(model):
        here.append(1000)
        return stronghold.AdamW(model.parameters())

    others = []
    for way, reason in {
        with_torch: "stronghold.AdamW does not train it",
        with_two: "several optimizers train it",
        with_gradients: "it has gradients",
        held: "a tensor over the memory of layers.1 is held",
        passed_by: "a layer trains without a call of the model itself",
        with_a_graph: "a graph of an earlier pass is held",
        too_small: "nothing fits: device memory must hold at least",
    }.items():
        caplog.clear()
        model = on_a_gpu(gpt())
        optimizer = way(model)
        with caplog.at_level(logging.INFO, logger="stronghold"):
            trained(model, optimizer, steps=2)
        (line,) = lines(caplog)
        assert reason in line, way
        assert "keeps a window of 2" in line
        assert stronghold.report(model).resident == 0
        others.clear()


def test_what_a_model_seeds_when_it_is_planned_does_not_count(here):
    """Else dropout in the first pass would be another than without a plan."""

    class Seeding(GPT):
        def forward(self, input_ids, labels=None):
            output = super().forward(input_ids, labels=labels)
            torch.manual_seed(7)
            return output

    results = []
    for settings in ({"window": 2}, {}):
        torch.manual_seed(0)
        model = on_a_gpu(Seeding(replace(CONFIG, dropout=0.1)), **settings)
        results.append(trained(model, stronghold.AdamW(model.parameters())))
    assert stronghold.report(model).planned is not None
    alike(*results)


def test_a_plan_seeds_nothing():
    class Seeding(GPT):
        def forward(self, input_ids, labels=None):
            torch.manual_seed(7)
            return super().forward(input_ids, labels=labels)

    model = Seeding(CONFIG)
    before = torch.get_rng_state()
    stronghold.plan(model, inputs={"input_ids": ids(), "labels": ids()}, machine=machine())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_planner_that_fails_is_told_of_and_ends_nothing(monkeypatch):
    monkeypatch.setattr("stronghold.engine.planning.auto.kept_machine", lambda device: 1 / 0)
    model = on_a_gpu(gpt())
    optimizer = stronghold.AdamW(model.parameters())
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError: division by zero"):
        trained(model, optimizer, steps=1)
    trained(model, optimizer, steps=1)
    assert stronghold.report(model).window == 2


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("number", [8, 9, 10, 11])
def test_a_device_that_turns_out_too_small_is_told_of_and_nothing_is_lost(monkeypatch, tmp_path, loaded, number):
    """Each layer asks for room for its moments, and then for weights, remainders and moments."""
    model, other = on_a_gpu(gpt(), dtype=torch.bfloat16), on_a_gpu(gpt(), dtype=torch.bfloat16, window=2)
    optimizers = [stronghold.AdamW(one.parameters()) for one in (model, other)]
    if loaded:
        trained(other, optimizers[1])
        stronghold.checkpoint.save(tmp_path / "saved", other, optimizers[1])
        stronghold.checkpoint.load(tmp_path / "saved", model, optimizers[0])
    device, taken = engine_of(model).device, []
    resident, slot = device.device_buffer, device.buffer

    def device_buffer(length_bytes):
        taken.append(length_bytes)
        if len(taken) == number:
            raise torch.OutOfMemoryError("no room")
        return resident(length_bytes)

    def buffer(length_bytes):
        taken.append(length_bytes)
        if len(taken) == number + 4:  # behind two gradient slots and one of the window, of which one fits
            raise torch.OutOfMemoryError("no room for two")
        return slot(length_bytes)

    monkeypatch.setattr(device, "device_buffer", device_buffer)
    monkeypatch.setattr(device, "buffer", buffer)
    told = r"but the device has no room for it \(no room\); it goes on with 2 resident layers and a window of 1"
    with pytest.warns(RuntimeWarning, match=told):
        ours = trained(model, optimizers[0])
    report = stronghold.report(model)
    assert (report.resident, report.window) == (2, 1)
    alike(ours, trained(other, optimizers[1]))


@pytest.mark.parametrize("memory_bytes", [SOME, 2**23])
def test_half_of_the_device_is_left_to_batches_that_may_come(here, memory_bytes):
    here.append(memory_bytes)
    model = on_a_gpu(gpt())
    trained(model, stronghold.AdamW(model.parameters()), steps=1)
    assert stronghold.report(model).device_bytes <= memory_bytes / 2


def test_layers_run_again_for_a_much_larger_batch_alone(caplog):
    def steps(model):
        optimizer, found, runs = stronghold.AdamW(model.parameters()), [], []
        norm = next(model.layers[3].children())
        norm.forward = lambda x, own=norm.forward: runs.append(None) or own(x)
        torch.manual_seed(2)  # dropout
        for samples in (2, 3, 4, 1):
            runs.clear()
            loss = model(ids(samples), labels=ids(samples)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), len(runs)))
        return zip(*found, strict=True)

    with caplog.at_level(logging.INFO, logger="stronghold"):
        losses, runs = steps(on_a_gpu(gpt(dropout=0.1)))
    expected, again = steps(on_a_gpu(gpt(dropout=0.1), window=2))
    assert losses == expected
    assert (runs, again) == ((1, 1, 2, 1), (2, 2, 2, 2))
    assert "a batch of 256 elements, planned was for 192 at most" in lines(caplog)[1]


def test_hooks_of_the_users_see_no_tensor_without_values():
    model, seen = on_a_gpu(gpt()), set()
    for module in model.modules():
        module.register_forward_hook(lambda module, given, output: seen.update(map(type, given)))
    trained(model, stronghold.AdamW(model.parameters()), steps=1)
    assert stronghold.report(model).resident == 6
    assert torch.Tensor in seen
    assert FakeTensor not in seen


def test_a_batch_that_the_model_writes_into_stays_what_it_is():
    class Batch:
        def __init__(self):
            self.ids = ids()

    class OfBatches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt = gpt()

        def forward(self, batch):
            batch.ids = batch.ids.flip(1)
            return self.gpt(batch.ids, labels=batch.ids).loss

    losses = []
    for settings in ({}, {"window": 2}):
        model, batch = on_a_gpu(OfBatches(), **settings), Batch()
        optimizer = stronghold.AdamW(model.parameters())
        for _ in range(2):
            losses.append(model(batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(batch.ids, ids())
        assert (stronghold.report(model).planned is None) == bool(settings)
    assert losses[:2] == losses[2:]


def test_a_checkpoint_around_the_model_counts_its_own_tensors_alone():
    results = []
    for settings in ({}, {"window": 2}):
        model = on_a_gpu(gpt(dropout=0.1), **settings)
        optimizer, losses = stronghold.AdamW(model.parameters()), []
        for _ in range(3):
            loss = checkpoint(lambda x, model=model: model(x, labels=x).loss, ids(), use_reentrant=False)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == results[1]


def test_a_look_at_the_model_before_there_is_an_optimizer_decides_nothing():
    model = on_a_gpu(gpt())
    model(ids())
    assert stronghold.report(model).awaits_inputs
    trained(model, stronghold.AdamW(model.parameters()), steps=1)
    assert stronghold.report(model).resident == 6


def test_random_numbers_of_python_and_numpy_are_not_drawn():
    class Drawing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt = gpt()

        def forward(self, x):
            return self.gpt(x, labels=x).loss * (random.random() + np.random.rand())

    losses = []
    for settings in ({}, {"window": 2}):
        random.seed(0)
        np.random.seed(0)
        model = on_a_gpu(Drawing(), **settings)
        optimizer = stronghold.AdamW(model.parameters())
        losses.append(model(ids()).item())
        assert (stronghold.report(model).planned is None) == bool(settings)
        stronghold.close(model)
        del optimizer
    assert losses[0] == losses[1]


def test_a_closed_model_says_so():
    model = on_a_gpu(gpt())
    optimizer = stronghold.AdamW(model.parameters())
    stronghold.close(model)
    with pytest.raises(OffloadedModelError, match="closed"):
        model.layers[0](torch.zeros(1, 32, 64))
    assert optimizer is not None


def test_threads_that_begin_together_plan_once(monkeypatch):
    model, calls = on_a_gpu(gpt()), []
    optimizer = stronghold.AdamW(model.parameters())
    monkeypatch.setattr(first_pass, "rearrange", lambda *of: calls.append(of) or rearrange(*of))
    threads = [threading.Thread(target=model, args=(ids(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    trained(model, optimizer, steps=1)


def test_what_is_held_is_what_is_allocated():
    for settings in ({}, {"resident": 3, "window": 1}):
        engine = engine_of(on_a_gpu(gpt(), **settings))
        root = [p for unit in engine.units if unit.is_root for p in unit.on_device]
        resident = [w for unit in engine.units if unit.resident for w in unit.weight]
        slots = sum(slot.flat.nbytes for slot in engine.window.slots) + engine.gradients.grad_offload.device_bytes
        least = slots + sum(t.nbytes for t in [*root, *resident])
        assert least <= engine.held.allocated_bytes() <= least + 4096  # and what lies between tensors


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_products_are_planned_in_the_type_of_autocast(monkeypatch, dtype):
    made, planned = [], first_inputs.PlannedModel
    monkeypatch.setattr(first_inputs, "PlannedModel", lambda *of, **by: made.append(planned(*of, **by)) or made[-1])
    model = on_a_gpu(gpt())
    optimizer = stronghold.AdamW(model.parameters())
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        model(ids(), labels=ids()).loss.backward()
    optimizer.step()
    products = {op.dtype for op in made[0].computation.layer(0).forward if op.kind == "matmul"}
    assert products == {"float32" if dtype is None else "bfloat16"}


def test_arguments_are_known_in_order_and_by_name(caplog):
    model = on_a_gpu(gpt())
    optimizer = stronghold.AdamW(model.parameters())
    model(ids(), ids()).loss.backward()
    optimizer.step()
    assert stronghold.report(model).resident == 6


def test_a_compiled_model_is_planned_by_its_own_call():
    results = []
    for settings in ({"window": 2}, {}):
        torch._dynamo.reset()
        model = on_a_gpu(gpt(dropout=0.1), **settings)
        with pytest.warns(UserWarning, match="leaves the layers as they are"):
            results.append(trained(torch.compile(model, backend="eager"), stronghold.AdamW(model.parameters())))
    assert stronghold.report(model).resident == 6
    alike(*results)


@pytest.mark.parametrize("base", [packed, quantised])
def test_a_quantised_base_stays(caplog, base):
    model = on_a_gpu(with_adapters(base(), LORA))
    optimizer = stronghold.AdamW([p for p in model.parameters() if p.requires_grad])
    numbers = torch.ones(1, 8, dtype=torch.int64)
    with caplog.at_level(logging.INFO, logger="stronghold"):
        model(input_ids=numbers, labels=numbers).loss.backward()
    optimizer.step()
    assert "its weights are quantised" in lines(caplog)[0]


def test_copies_are_ordinary_models():
    """One in a file asks for nothing of ours but the class of the model."""
    model, plain = on_a_gpu(gpt()), gpt()
    expected = trained(plain, torch.optim.AdamW(plain.parameters()))
    assert b"stronghold.engine" not in pickle.dumps(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        alike(trained(other, torch.optim.AdamW(other.parameters())), expected)
    trained(model, stronghold.AdamW(model.parameters()), steps=1)
    assert stronghold.report(model).resident == 6
