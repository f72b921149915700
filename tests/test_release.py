"""What an offloaded model holds goes with it, at once, without the garbage collector; or when it is closed."""

import copy
import gc
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch._dynamo  # whose import, with a process's first optimizer, leaves cycles that hold the frames around it
from torch import nn

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import OffloadedModelError, StoreError
from tests.small import ADAMW, KINDS, Residual, assert_close, numbers, ordinary_loop, pair

SETTINGS = {
    "window": {},
    "keep": {"activations": "keep"},
    "host": {"activations": "host"},
    "resident": {"resident": 2},
    "micro_batch": {"micro_batch": 2},
    "disk": {"store": "disk"},
    "inputs on disk": {"store": "disk", "activations": "disk"},
    "in_backward": {"update": "in_backward"},
    "all": {"store": "disk", "update": "in_backward", "activations": "keep", "resident": 1},
}
OWN_CYCLES = ("spectral",)
"""torch's parametrisations refer to themselves: the plain module needs the garbage collector, too."""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def warm():
    """What torch imports in its first step is there, and the collector leaves it alone, which makes it fast."""
    model = Residual()
    ordinary_loop(model, torch.optim.AdamW(model.parameters()), numbers(1))
    del model
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def uncollected(warm):
    """Has reference counts alone let go of things."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("stronghold"))


def descriptors() -> dict[str, str]:
    """Returns the files that are open, but for what other threads look at of the system."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the one that listed the folder
    return {number: name for number, name in found.items() if not name.startswith("/proc/")}


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def all_ended(count: int) -> bool:
    """Whether there are ``count`` threads again: the system's own account of one that has ended may lag behind."""
    deadline = time.monotonic() + 5
    while native_threads() > count and time.monotonic() < deadline:
        time.sleep(0.01)
    return native_threads() <= count


def build(kind, settings, directory):
    settings = {**settings, "store": directory} if "store" in settings else dict(settings)
    update = settings.pop("update", "deferred")
    model = pair(kind.build, layers=kind.layers, **settings)[1]
    return model, stronghold.AdamW(model.parameters(), **ADAMW, update=update)


def referred(model: nn.Module, optimizer: object) -> dict[str, weakref.ref]:
    engine = engine_of(model)
    parts = {
        "engine": engine,
        "optimizer": optimizer,
        "store": engine.store,
        "device": engine.device,
        "window": engine.window,
        "gradients": engine.gradients,
        **{f"unit {unit.name}": unit for unit in engine.units},
        **{f"weights of {unit.name}": unit.buffer for unit in engine.units},
        **{f"block {block.layer}": block for block in engine.blocks},
        **{f"module {name}": module for name, module in model.named_modules()},
        **{f"parameter {name}": parameter for name, parameter in model.named_parameters()},
    }
    return {name: weakref.ref(part) for name, part in parts.items()}


ALWAYS = ("window", "all")
CASES = [(name, setting) for name in KINDS for setting in SETTINGS if name == "residual" or setting in ALWAYS]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_all_goes_with_the_model_and_its_optimizer(name, setting, uncollected, tmp_path):
    kind = KINDS[name]
    before, tasks, held = threads(), native_threads(), descriptors()
    store = tmp_path / "store"

    def train():
        model, optimizer = build(kind, SETTINGS[setting], store)
        batches = kind.batches(2)
        ordinary_loop(model, optimizer, batches)
        loss = model(batches[0])
        loss.backward()
        model(batches[1])  # no backward pass follows
        with torch.no_grad():
            model(batches[1])
        return loss, referred(model, optimizer)

    loss, left = train()
    alive = [part for part, reference in left.items() if reference() is not None]
    if name in OWN_CYCLES:
        alive = [part for part in alive if part.split()[0] not in ("module", "parameter")]
    del loss  # has let go of all but its parameters
    assert [part for part in alive if part.split()[0] != "parameter"] == []
    assert threads() == before and all_ended(tasks)
    assert not store.exists()
    if name not in OWN_CYCLES:
        assert descriptors() == held
        assert [part for part, reference in left.items() if reference() is not None] == []


class Remembers(Residual):
    """Keeps the graph of its last loss, as models that report it do, and a layer that of an auxiliary one."""

    def forward(self, x):
        loss = super().forward(x)
        self.last = loss
        self.layers[1].auxiliary = self.layers[1].norm.weight * loss
        return loss


class OldNorm(Residual):
    """``torch.nn.utils.weight_norm`` puts a weight with a graph into the module before each computation."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            torch.nn.utils.weight_norm(layer.up)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("setting", ["window", "keep", "host", "resident", "disk", "inputs on disk"])
@pytest.mark.parametrize("build_it", [Remembers, OldNorm], ids=lambda build_it: build_it.__name__)
def test_a_module_that_keeps_a_graph_goes_as_well(build_it, setting, uncollected, tmp_path):
    kind = copy.copy(KINDS["residual"])
    object.__setattr__(kind, "build", build_it)
    before, held, store = threads(), descriptors(), tmp_path / "store"

    def train():
        model, optimizer = build(kind, SETTINGS[setting], store)
        ordinary_loop(model, optimizer, numbers(2))
        model(numbers(1)[0])
        return referred(model, optimizer)

    left = train()
    assert [part for part, reference in left.items() if reference() is not None] == []
    assert threads() == before and descriptors() == held and not store.exists()


def test_memory_does_not_grow_with_models_built_and_dropped(uncollected):
    def rebuild():
        model = pair(lambda: Residual(block=lambda: nn.Linear(16, 16)), dtype=torch.bfloat16)[1]
        optimizer = stronghold.AdamW(model.parameters())
        ordinary_loop(model, optimizer, [batch.bfloat16() for batch in numbers(1)])
        return weakref.ref(engine_of(model).device)

    devices = [rebuild() for _ in range(12)]
    assert all(device() is None for device in devices)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_closed_model_gives_all_back_at_once(setting, uncollected, tmp_path):
    before, tasks, held, store = threads(), native_threads(), descriptors(), tmp_path / "store"
    model, optimizer = build(KINDS["residual"], SETTINGS[setting], store)
    ordinary_loop(model, optimizer, numbers(2))
    model(numbers(1)[0]).backward()
    optimizer.step()
    left = referred(model, optimizer)
    stronghold.close(model)
    assert threads() == before and all_ended(tasks) and descriptors() == held and not store.exists()
    assert left["store"]() is None and left["window"]() is None and left["gradients"]() is None
    assert all(reference() is None for name, reference in left.items() if name.startswith("weights"))
    stronghold.close(model)
    another, _ = build(KINDS["residual"], SETTINGS[setting], store)  # the directory is free
    stronghold.close(another)


@pytest.mark.parametrize("setting", ["window", "disk", "all"])
def test_a_model_is_closed_behind_the_fetches_that_are_under_way(setting, uncollected, tmp_path):
    """A late one found no memory any more; its error's traceback then kept the store."""
    held, late = descriptors(), stronghold.device.Event()
    model, optimizer = build(KINDS["residual"], SETTINGS[setting], tmp_path / "store")
    ordinary_loop(model, optimizer, numbers(1))
    model(numbers(1)[0]).backward()
    device, left = engine_of(model).device, referred(model, optimizer)
    for stream in (device.reads, device.fetches):
        stream.wait(late)
    optimizer.step()  # the next pass's first layers are fetched from here on
    timer = threading.Timer(0.2, late.happen)
    timer.start()
    stronghold.close(model)
    timer.join()
    assert left["store"]() is None
    assert descriptors() == held


@pytest.mark.parametrize("setting", ["window", "keep", "resident", "disk"])
def test_what_was_closed_cannot_be_used(setting, tmp_path):
    model, optimizer = build(KINDS["residual"], SETTINGS[setting], tmp_path / "store")
    (batch,) = numbers(1)
    output = model(batch)
    states = optimizer.state_dict()
    held, copies = model.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    weight = model.layers[0].up.weight
    shape = weight.shape
    stronghold.close(model)
    uses = {
        "forward": lambda: model(batch),
        "a layer": lambda: model.layers[0](batch),
        "backward": lambda: output.backward(),
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "optimizer's state": optimizer.state_dict,
        "states that are loaded": lambda: optimizer.load_state_dict(states),
        "state_dict": model.state_dict,
        "a weight": lambda: weight.sum(),
        "a write": lambda: weight.data.zero_(),
        "a root parameter": lambda: model.out.weight + 1,
        "to": lambda: model.to("cpu"),
        "copy": lambda: copy.deepcopy(model),
        "report": lambda: stronghold.report(model),
        "save": lambda: stronghold.checkpoint.save(tmp_path / "saved", model, optimizer),
        "optimizer": lambda: stronghold.AdamW(model.parameters()),
        "offload": lambda: stronghold.offload(model, device="cpu"),
    }
    for name, use in uses.items():
        with pytest.raises(OffloadedModelError):
            use()
            pytest.fail(name)
    assert weight.shape == shape and weight.grad is None and "closed" in repr(weight)
    assert_close(dict(held), copies, rtol=0.0, atol=0.0)  # what the user got before is the user's


def test_close_says_what_it_needs(tmp_path):
    with pytest.raises(OffloadedModelError, match=r"Residual is not offloaded; call stronghold.offload"):
        stronghold.close(Residual())


def test_a_directory_that_another_model_of_the_process_uses_is_named_with_the_remedy(tmp_path):
    model = pair(Residual, store=tmp_path)[1]
    with pytest.raises(StoreError, match=r"another model of this process .*stronghold.close\(model\)"):
        pair(Residual, store=tmp_path)
    stronghold.close(model)
    pair(Residual, store=tmp_path)


def test_closing_waits_for_updates_and_says_what_made_one_fail(uncollected):
    before = threads()
    model, optimizer = build(KINDS["residual"], {}, Path())
    model(numbers(1)[0]).backward()
    held = model.layers[0].up.weight.data

    def fail():
        raise ValueError("no more")

    engine_of(model).device.updates.submit(fail)
    with pytest.raises(RuntimeError, match="no more"):
        optimizer.step()  # it waits for the weight that is held
    with pytest.raises(RuntimeError, match="no more"):
        stronghold.close(model)
    assert threads() == before
    assert held.isfinite().all()


def test_a_parameter_that_is_kept_has_the_last_update_in_it():
    def train(delay):
        model, optimizer = build(KINDS["residual"], {}, Path())
        weight = model.layers[0].up.weight
        model(numbers(1)[0]).backward()
        if delay:
            engine_of(model).device.updates.submit(lambda: time.sleep(0.2))
        optimizer.step()
        return weight

    assert torch.equal(train(True), train(False))


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_a_loss_whose_model_is_gone_is_refused(activations):
    loss = pair(Residual, activations=activations)[1](numbers(1)[0])
    gc.collect()
    with pytest.raises(OffloadedModelError, match=r"is gone|was closed, or is gone"):
        loss.backward()
