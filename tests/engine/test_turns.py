"""Several threads at one model: they take turns, or are told to; no number is wrong."""

import copy
import pickle
import pickletools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import OffloadedModelError
from tests.gpu import DEVICE, needs_device
from tests.small import ADAMW, Residual, assert_close, assert_same_models, numbers, pair

THREADS = 4


def in_another_thread(task):
    """Runs ``task`` in a thread of its own; returns what it returns or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task).result(timeout=30)


@pytest.mark.parametrize("settings", [{}, {"window": 1}, {"resident": 2}, {"store": "disk"}], ids=str)
def test_threads_that_evaluate_get_what_one_thread_gets(settings, tmp_path):
    if "store" in settings:
        settings = {"store": tmp_path}
    plain, model = pair(Residual, **settings)
    plain.eval()
    model.eval()
    batches = numbers(60)
    begin = threading.Barrier(THREADS)

    def evaluate(number):
        begin.wait()
        with torch.no_grad():
            return [model.features(batch) for batch in batches[number::THREADS]]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(evaluate, range(THREADS)))
    with torch.no_grad():
        for number, outputs in enumerate(found):
            assert_close(outputs, [plain.features(batch) for batch in batches[number::THREADS]])


def test_threads_that_train_at_once_are_right_or_refused():
    model = pair(Residual)[1]
    begin = threading.Barrier(2)

    def train(number):
        begin.wait()
        refused = 0
        for batch in numbers(8, seed=number):
            try:
                model(batch).backward()
            except OffloadedModelError:
                refused += 1
        return refused

    with ThreadPoolExecutor(2) as pool:
        for refused in pool.map(train, range(2)):
            assert refused < 8
    model.zero_grad()
    plain = pair(Residual)[0]
    plain.eval()
    model.eval()
    for one in (plain, model):
        one(numbers(1)[0]).backward()
    assert_same_models(model, plain)


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("settings", [{"window": 1}, {"window": 2}, {"resident": 2}, {"store": "disk"}], ids=str)
def test_a_state_dict_that_another_thread_takes_amid_a_layer_has_its_values(settings, keep_vars, tmp_path):
    """What the layer computes with is in a slot, into which another layer's weights come next."""
    if "store" in settings:
        settings = {"window": 1, "store": tmp_path}
    plain, model = pair(Residual, **settings)
    begun, go_on = threading.Event(), threading.Event()

    def wait(module, args):
        begun.set()
        assert go_on.wait(timeout=30)

    model.layers[1].up.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        output = pool.submit(model, numbers(1)[0])
        assert begun.wait(timeout=30)
        taken = pool.submit(model.state_dict, keep_vars=keep_vars)
        time.sleep(0.1)  # it has come to the layer by now
        go_on.set()
        output.result(timeout=30)
        found = taken.result(timeout=30)
        model(numbers(1)[0])
    expected = plain.state_dict()
    assert list(found) == list(expected)
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_weight_that_another_thread_asks_for_does_not_come_to_a_slot_meanwhile(store, tmp_path, monkeypatch):
    model = pair(Residual, window=1, **({"store": tmp_path} if store == "disk" else {}))[1]
    asked, computes, has_it = threading.Event(), threading.Event(), threading.Event()

    def slow(self):
        if not has_it.is_set():
            asked.set()
            computes.wait(timeout=0.3)
        return torch.Tensor.detach(self)

    def wait(module, args):
        computes.set()
        assert has_it.wait(timeout=30)

    weight = model.layers[1].up.weight
    expected = weight.detach().clone()
    model.layers[1].up.register_forward_pre_hook(wait)
    monkeypatch.setattr(nn.Parameter, "detach", slow, raising=False)
    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        taken = pool.submit(weight.detach)
        assert asked.wait(timeout=30)
        output = pool.submit(model, numbers(1)[0])
        found = taken.result(timeout=30)
        has_it.set()
        output.result(timeout=30)
        model(numbers(1)[0])
    assert torch.equal(found, expected)


def test_a_state_dict_that_a_layers_own_computation_takes_cannot_be_kept():
    model = pair(Residual)[1]
    kept = []
    model.layers[1].up.register_forward_pre_hook(lambda module, args: kept.append(model.state_dict()))
    with pytest.raises(OffloadedModelError, match=r"nothing may keep a tensor over the weights of layers\.1 "):
        model(numbers(1)[0])


def test_a_copy_in_a_file_knows_nothing_of_the_window():
    model = stronghold.offload(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), window=1, device="cpu")
    for pickled in pickle.dumps(model), pickle.dumps(copy.deepcopy(model)):
        names = [its for _, its, _ in pickletools.genops(pickled) if isinstance(its, str) and "stronghold" in its]
        assert names == ["_stronghold"]


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize(
    "use", ["forward", "backward", "gradient", "step", "close", "a loss on parameters", "one on the open layer's"]
)
def test_what_another_thread_does_in_a_backward_pass_is_refused(use, activations):
    """A loss on parameters is one that autograd computes in the caller's thread, beside that of the device."""
    plain, model = (one.eval() for one in pair(Residual, activations=activations))
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    batch, other = numbers(2)
    hidden = []
    model.layers[2].register_forward_hook(lambda module, args, output: hidden.append(output))
    penalty, of_open = (model.layers[layer].up.weight.square().sum() for layer in (2, 3))
    another = model(other) if use == "backward" else penalty  # with two runs of each, gradients might come in parts
    hidden.clear()
    loss = model(batch)
    uses = {
        "forward": lambda: model(other),
        "backward": another.backward,
        "gradient": lambda: model.layers[3].up.weight.grad,
        "step": optimizer.step,
        "close": lambda: stronghold.close(model),
        "a loss on parameters": penalty.backward,
        "one on the open layer's": of_open.backward,
    }
    refused = []

    def meanwhile(gradient):
        with pytest.raises(OffloadedModelError, match="one thread at a time"):
            in_another_thread(uses[use])
        refused.append(use)

    hidden.pop().register_hook(meanwhile)
    loss.backward()
    assert refused == [use]
    if use == "backward":
        model.out.zero_grad()  # it has got that far before it was refused
    plain(batch).backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if parameter.grad is not None:
            assert_close(parameter.grad, expected.grad, name)
        else:
            assert use == "backward" and name.startswith("out.")


def test_a_step_waits_for_the_layer_that_another_thread_computes():
    model = pair(Residual)[1]
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    model(numbers(1)[0]).backward()
    inside, go, order = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        assert go.wait(30)
        order.append("layer")

    model.layers[1].down.register_forward_hook(wait)

    def step():
        optimizer.step()
        order.append("step")

    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        computing = pool.submit(torch.no_grad()(model), numbers(1)[0])
        assert inside.wait(30)
        stepping = pool.submit(step)
        stepping_early = threading.Event().wait(0.1) or stepping.done()
        go.set()
        computing.result(30)
        stepping.result(30)
    assert not stepping_early and order[0] == "layer"


def test_a_backward_pass_that_failed_keeps_no_thread_from_its_turn():
    model = pair(Residual)[1]
    output = model.features(numbers(1)[0])
    output.register_hook(lambda gradient: None)
    model.layers[0].up.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    in_another_thread(lambda: model(numbers(1)[0]))


class Penalised(nn.Module):
    """A layer that returns a loss of its own as well, on the CPU where it ``copies`` it there."""

    def __init__(self, *, copies):
        super().__init__()
        self.linear, self.copies = nn.Linear(4, 4), copies

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        loss = y.square().mean()
        return x + y, loss.cpu() if self.copies else loss


class PenalisedStack(nn.Module):
    """Three such layers, whose losses are added up on the CPU."""

    def __init__(self, *, copies):
        super().__init__()
        self.layers = nn.ModuleList(Penalised(copies=copies) for _ in range(3))

    def forward(self, x):
        losses = []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss.cpu())
        return x.square().mean().cpu() + sum(losses)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("activations", ["recompute", "host", "keep"])
def test_what_a_layer_computes_on_another_device_is_refused_and_the_remedy_is_right(activations):
    x = torch.randn(2, 4, device=DEVICE)
    model = stronghold.offload(PenalisedStack(copies=True), window=1, device=DEVICE, activations=activations)
    loss = model(x)
    with pytest.raises(OffloadedModelError, match=r"must stay on the device .*outside of the layers"):
        loss.backward()
    plain = PenalisedStack(copies=False)
    model = stronghold.offload(copy.deepcopy(plain), window=1, device=DEVICE, activations=activations)
    losses = model(x), plain.to(DEVICE)(x)
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad.cpu(), other.grad.cpu())
