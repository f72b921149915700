"""Where root parameters are updated on a device with memory of its own: there, or on the host."""

import copy
import threading

import pytest
import torch

import stronghold
from stronghold.engine import engine_of, offload_shared
from stronghold.errors import StoreError
from tests.crossed import crossed
from tests.delayed import Apart
from tests.replicas import in_threads
from tests.small import (
    ADAMW,
    Decoder,
    Frozen,
    Residual,
    assert_close,
    assert_same_models,
    assert_same_states,
    assert_unchanged,
    numbers,
    ordinary_loop,
    pair,
    words,
)
from tests.small import snapshot as kept

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ROOM = 2**30
"""A budget that holds all of each model here."""


def offload(build=Residual, **settings):
    return pair(build, **{"device": Apart(), **settings})[1]


def resident(model) -> list[str]:
    """Returns the root parameters that are updated on the device."""
    return [unit.name for unit in engine_of(model).units if unit.is_root and unit.resident]


def trained(build=Residual, *, steps=4, dtype=torch.float32, accumulate=1, adamw=None, **settings):
    """Returns a model, its optimizer and its losses after some steps."""
    model = offload(build, dtype=dtype, **settings)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW, **(adamw or {}))
    batches = words(steps * accumulate) if build is Decoder else [b.to(dtype) for b in numbers(steps * accumulate)]
    losses = []
    for number in range(steps):
        for batch in batches[number * accumulate : (number + 1) * accumulate]:
            loss = model(batch)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses


# ---- which stay ----


@pytest.mark.parametrize(("dtype", "layers"), crossed([torch.float32, torch.bfloat16], [0, 2], together=1), ids=str)
def test_the_first_root_parameters_stay_as_far_as_they_fit_to_the_byte(layers, dtype):
    names = ["into.weight", "into.bias", "out.weight", "out.bias"]
    settings = {"resident": layers, "window": 1, "dtype": dtype}

    def count(budget):
        return len(resident(offload(device_memory=budget, **settings)))

    none = stronghold.report(offload(**settings)).device_bytes
    least = none + 8 * sum(p.numel() for layer in Residual().layers[:layers] for p in layer.parameters())
    for number in range(1, 5):
        low, high = least, 2**20  # the least budget that keeps so many
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if count(middle) >= number else (middle + 1, high)
        model = offload(device_memory=low, **settings)
        assert resident(model) == names[:number]
        optimizer = stronghold.AdamW(model.parameters())
        assert stronghold.report(model).resident_root == number
        assert stronghold.report(model).device_bytes == low
        ordinary_loop(model, optimizer, [numbers(1)[0].to(dtype)])
        assert stronghold.report(model).device_bytes == low
        del optimizer


def test_auto_gives_memory_to_the_root_before_layers():
    reached = set()
    for budget in range(30_000, 200_000, 5_000):
        model = offload(resident="auto", window=1, device_memory=budget)
        report = stronghold.report(model)
        assert report.resident_root == 4 or not report.resident
        stronghold.AdamW(model.parameters())
        reached.add((report.resident_root == 4, report.resident))
    assert reached >= {(True, 0), (True, 1), (True, 4)}


def test_without_a_budget_half_of_the_free_memory_counts():
    model = offload(device_memory=ROOM)
    optimizer = stronghold.AdamW(model.parameters())
    needed = stronghold.report(model).device_bytes
    del optimizer
    for free, expected in ((2 * needed, 4), (2 * needed - 2, 3), (None, 0)):
        device = Apart()
        device.free_bytes = lambda free=free: free
        assert len(resident(offload(device=device))) == expected


def test_where_the_device_is_the_host_nothing_changes():
    assert resident(offload(device="cpu", device_memory=ROOM)) == []


def test_a_frozen_root_parameter_is_a_copy_and_trains_on_the_host_once_unfrozen():
    def build():
        model = Residual()
        model.into.requires_grad_(False)
        return model

    model = offload(build, device_memory=ROOM)
    assert resident(model) == ["out.weight", "out.bias"]
    twin = offload(build)
    for each in (model, twin):
        each.into.requires_grad_(True)
        each.eval()
    optimizers = [stronghold.AdamW(each.parameters(), **ADAMW) for each in (model, twin)]
    losses = [ordinary_loop(*both, numbers(3)) for both in zip((model, twin), optimizers, strict=True)]
    assert_close(losses[0], losses[1], rtol=0.0, atol=0.0)
    assert_unchanged(kept(twin, optimizers[1]), model, optimizers[0])


def test_of_replicas_as_many_stay_as_have_room_in_each():
    def found(little):
        models = [Residual() for _ in range(3)]

        def run(one):
            device, free = Apart(), little if one.local_rank == 1 else ROOM
            device.free_bytes = lambda: free
            return resident(offload_shared(models[one.local_rank], one, device=device, window=1))

        return in_threads(3, run)

    seen = [found(little) for little in range(40_000, 60_000, 500)]
    assert all(one == each[0] for each in seen for one in each)
    assert {len(each[0]) for each in seen} >= {0, 2, 4}


def test_what_other_processes_update_as_well_is_updated_on_the_host_by_all():
    _, model = pair(Residual, device=Apart())
    model = Residual()
    one = engine_of(offload()).replicas
    offload_shared(model, one, device=Apart(), shared=[model.out.weight], device_memory=ROOM)
    assert resident(model) == ["into.weight", "into.bias", "out.bias"]


# ---- the same numbers ----


@DTYPES
@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (Residual, {}),
        (Residual, {"adamw": {"max_grad_norm": 0.1}}),
        (Residual, {"adamw": {"states": "8bit"}}),
        (Residual, {"adamw": {"update": "in_backward"}, "resident": 2}),
        (Residual, {"accumulate": 3, "resident": 1}),
        (Decoder, {}),
        (Frozen, {}),
    ],
    ids=["plain", "clipped", "8bit", "in_backward", "accumulated", "tied", "frozen"],
)
def test_it_trains_to_the_bits_of_a_root_on_the_host(build, settings, dtype):
    if build is Decoder and dtype == torch.bfloat16:
        pytest.skip("its buffers are fp32")
    one, first, losses = trained(build, dtype=dtype, device_memory=ROOM, **settings)
    other, second, expected = trained(build, dtype=dtype, **settings)
    assert resident(one)
    assert not resident(other)
    assert_close(losses, expected, rtol=0.0, atol=0.0)
    assert_unchanged(kept(other, second), one, first)
    for mine, its in zip(engine_of(one).units, engine_of(other).units, strict=True):
        for index in range(len(mine.parameters)):
            assert torch.equal(mine.master(index), its.master(index)), mine.name


def test_it_is_the_training_of_plain_pytorch():
    plain, model = pair(Residual, device=Apart(), device_memory=ROOM)
    optimizers = [torch.optim.AdamW(plain.parameters(), **ADAMW), stronghold.AdamW(model.parameters(), **ADAMW)]
    losses = []
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        torch.manual_seed(7)
        losses.append(ordinary_loop(each, optimizer, numbers(10)))
    assert resident(model)
    assert_close(losses[1], losses[0])
    assert_same_models(model, plain)
    assert_same_states(optimizers[1], optimizers[0])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_other_optimizers_step_it_where_it_is(kind):
    plain, model = pair(Residual, device=Apart(), device_memory=ROOM)
    for each in (plain, model):
        torch.manual_seed(7)
        ordinary_loop(each, kind(each.parameters(), lr=0.05), numbers(5))
    assert resident(model)
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def test_a_write_in_bf16_is_its_new_master():
    model, optimizer, _ = trained(dtype=torch.bfloat16, device_memory=ROOM)
    unit = next(unit for unit in engine_of(model).units if unit.name == "into.weight")
    before = unit.master(0)
    with torch.no_grad():
        model.into.weight[0] = 3.0
        model.out.weight.data.zero_()
    expected = before.clone()
    expected[0] = 3.0
    engine_of(model).take_writes(unit)
    assert torch.equal(unit.master(0), expected)
    optimizer.zero_grad()
    model(numbers(1)[0].bfloat16()).backward()
    optimizer.step()
    assert model.out.weight.abs().max() <= 2 * ADAMW["lr"]


# ---- what is kept ----


def test_there_is_nothing_of_it_on_the_host():
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer, _ = trained(dtype=dtype, device_memory=ROOM, resident=4)
        assert stronghold.report(model).host_bytes == 0
        other, second, _ = trained(dtype=dtype, resident=4)
        assert stronghold.report(other).host_bytes > 0
        del optimizer, second


def test_closing_gives_its_memory_back():
    model, _, _ = trained(device_memory=ROOM)
    device = engine_of(model).device
    assert device.resident_bytes
    stronghold.engine.close(model)
    assert device.resident_bytes == 0


@pytest.mark.parametrize(
    ("saved_on", "store", "format", "dtype"),
    crossed(
        ["device", "host"],
        ["ram", "disk"],
        ["safetensors", "dcp"],
        [torch.float32, torch.bfloat16],
        together=1,
    ),
)
def test_a_run_goes_on_wherever_its_root_was_saved(saved_on, store, format, dtype, tmp_path):
    def begin(where, name):
        settings = {"store": tmp_path / name} if store == "disk" else {}
        if where == "device":
            settings["device_memory"] = ROOM
        model, optimizer, _ = trained(dtype=dtype, steps=2, **settings)
        assert bool(resident(model)) == (where == "device")
        return model.eval(), optimizer

    model, optimizer = begin(saved_on, "one")
    stronghold.checkpoint.save(tmp_path / "saved", model, optimizer, format=format)
    batches = [batch.to(dtype) for batch in numbers(3, seed=5)]
    expected = ordinary_loop(model, optimizer, batches)
    after = copy.deepcopy(optimizer.state_dict())
    for where in ("device", "host"):
        other, second = begin(where, where)
        stronghold.checkpoint.load(tmp_path / "saved", other, second, format=format)
        assert_close(ordinary_loop(other, second, batches), expected, rtol=0.0, atol=0.0)
        for (name, parameter), value in zip(other.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(parameter, value), name
        assert_close(second.state_dict(), after, rtol=0.0, atol=0.0)


def reopened(directory, **settings):
    model = Residual().to("meta")
    stronghold.offload(model, device=Apart(), window=2, store=directory, weights=directory, **settings)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    stronghold.checkpoint.load(directory, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("room", [{"device_memory": ROOM}, {}], ids=["device", "host"])
def test_a_store_that_is_reopened_finds_the_root_where_it_was(room, tmp_path):
    model, optimizer, _ = trained(store=tmp_path, **room)
    before, was = kept(model, optimizer), resident(model)
    stronghold.checkpoint.save(tmp_path, model, optimizer)
    del model, optimizer
    if was:
        with pytest.raises(StoreError, match="pass the dtype, memory budgets, resident layers"):
            reopened(tmp_path)
    other, second = reopened(tmp_path, device_memory=ROOM)
    assert resident(other) == was
    assert_unchanged(before, other, second)


# ---- on the host ----


def loaded(dtype=torch.float32):
    """Returns a model with gradients, its optimizer, and a gate that the next copy down waits for."""
    device, gate = Apart(), threading.Event()
    _, model = pair(Residual, device=device, dtype=dtype)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    model.eval()(numbers(1)[0].to(dtype)).backward()
    device.gradients.submit(gate.wait)
    return model, optimizer, gate


def after_one_step(dtype=torch.float32):
    """Returns what the same step makes of the model with nothing late."""
    model, optimizer, gate = loaded(dtype)
    gate.set()
    optimizer.step()
    optimizer.zero_grad()
    return kept(model, optimizer)


@DTYPES
def test_a_step_returns_before_the_gradients_of_the_root_are_down(dtype):
    model, optimizer, gate = loaded(dtype)
    threading.Timer(10, gate.set).start()
    optimizer.step()
    assert not gate.is_set(), "it waited for the copies"
    optimizer.zero_grad()
    gate.set()
    assert_unchanged(after_one_step(dtype), model, optimizer)


@pytest.mark.parametrize("how", ["through itself", "through an alias"])
def test_what_the_user_writes_into_a_gradient_after_the_step_does_not_reach_it(how):
    model, optimizer, gate = loaded()
    threading.Timer(0.3, gate.set).start()
    gradient = model.into.weight.grad
    if how == "through an alias":
        gradient = gradient.detach()
    optimizer.step()
    assert gate.is_set() == (how == "through an alias"), "nothing tells of what is written there"
    gradient.fill_(1e6)
    assert gate.is_set()
    optimizer.zero_grad()
    assert_unchanged(after_one_step(), model, optimizer)


def test_gradients_are_let_go_of_once_the_computation_is_behind_their_copy():
    model, optimizer, gate = loaded()
    threading.Timer(10, gate.set).start()
    optimizer.step()
    root = [unit for unit in engine_of(model).units if unit.is_root]
    assert all(unit.update_reads for unit in root)
    gate.set()
    model(numbers(1)[0])
    assert not any(unit.update_reads for unit in root)
