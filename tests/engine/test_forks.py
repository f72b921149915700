"""A child of fork may look at an offloaded model; what it cannot do is refused: no hang, no shared write."""

import copy
import os
import signal
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stronghold
from tests.small import ADAMW, Residual, numbers, ordinary_loop, pair

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
PLACED = pytest.mark.parametrize("placed", [{"window": 2}, {"resident": 4}], ids=["window", "resident"])
ONE = numbers(1)[0]


def trained(placed, update="deferred"):
    _, model = pair(Residual, **placed)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW, update=update)
    ordinary_loop(model, optimizer, [batch.to(placed.get("dtype")) for batch in numbers(2)])
    return model, optimizer


def forked(task):
    """Runs ``task`` in a child; returns what it returned or raised, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends
        try:
            said = str(task())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        os.write(write, said.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "it hung"
    return said


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def write(model):
    with torch.no_grad():
        model.layers[1].up.weight.mul_(2)


USES = {
    "trains": lambda model, optimizer, loss: model(ONE).sum().backward(),
    "goes on": lambda model, optimizer, loss: loss.backward(),
    "steps": lambda model, optimizer, loss: optimizer.step(),
    "writes": lambda model, optimizer, loss: write(model),
    "writes several": lambda model, optimizer, loss: torch.no_grad()(torch._foreach_zero_)(list(model.parameters())),
}


@PLACED
@pytest.mark.parametrize("use", USES)
def test_a_child_that_trains_or_writes_is_refused_and_changes_nothing(use, placed):
    """The weights lie in memory that it shares with its parent."""
    model, optimizer = trained(placed)
    model(ONE).backward()
    loss = model(ONE)
    before = values(model)
    gradient = model.layers[1].up.weight.grad.clone()
    said = forked(lambda: USES[use](model, optimizer, loss))
    assert said.startswith("OffloadedModelError: an offloaded model computes and is trained in the process"), said
    now = values(model)
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert torch.equal(model.layers[1].up.weight.grad, gradient)


def test_a_child_does_not_write_gradients_that_its_parent_has():
    model, optimizer = trained({"window": 2})
    model(ONE).backward()
    gradient = model.layers[1].up.weight.grad.clone()
    said = forked(lambda: optimizer.zero_grad(set_to_none=False))
    assert said.startswith("OffloadedModelError: an offloaded model computes")
    assert torch.equal(model.layers[1].up.weight.grad, gradient)


STATES = {
    "state": lambda model, optimizer, kept, directory: optimizer.state,
    "state_dict": lambda model, optimizer, kept, directory: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer, kept, directory: optimizer.load_state_dict(kept),
    "checkpoint": lambda model, optimizer, kept, directory: stronghold.checkpoint.save(directory, model, optimizer),
    "save": lambda model, optimizer, kept, directory: stronghold.save(model, directory, dtype=torch.float32),
}


@pytest.mark.parametrize("use", STATES)
@pytest.mark.parametrize("written", [False, True], ids=["", "written"])
def test_a_child_that_asks_for_moments_or_masters_is_told_that_they_are_its_parents(use, written, tmp_path):
    """The host's kernels alone work on them, in memory that a child does not have: to read it would end the child."""
    model, optimizer = trained({"window": 2, "dtype": torch.bfloat16})
    kept = copy.deepcopy(optimizer.state_dict())
    if written:  # what was written is the masters', too, and was not taken over yet
        write(model)
    optimizer.wait()
    said = forked(lambda: STATES[use](model, optimizer, kept, tmp_path / "saved"))
    assert said.startswith("OffloadedModelError: an offloaded model computes and is trained in the process"), said
    ordinary_loop(model, optimizer, [ONE.bfloat16()])


@PLACED
def test_a_child_does_not_update_in_its_backward_pass(placed):
    model, _ = trained(placed, update="in_backward")
    loss, before = model(ONE), values(model)
    assert forked(loss.backward).startswith("OffloadedModelError: an offloaded model computes")
    now = values(model)
    assert all(torch.equal(now[name], before[name]) for name in before)


@PLACED
def test_a_child_evaluates_what_is_there_and_is_refused_what_needs_a_slot(placed):
    model, optimizer = trained(placed)
    optimizer.wait()
    model.eval()

    def evaluate():
        with torch.no_grad():
            return model(ONE)

    said = forked(evaluate)
    if "resident" in placed:
        assert said == str(evaluate())
    else:
        assert said.startswith("OffloadedModelError: an offloaded model")


def test_a_child_that_reads_under_an_update_is_told_instead_of_waiting_for_ever():
    model, optimizer = trained({"window": 2})
    model(ONE).backward()
    model.out.weight._unit.owner.device.updates.run(lambda: __import__("time").sleep(0.5))
    optimizer.step()
    assert "with optimizer.wait() before the fork" in forked(lambda: model.layers[3].up.weight.sum())
    assert forked(lambda: model.layers[3].up.weight.shape) == "torch.Size([32, 16])"


@PLACED
def test_a_child_has_a_model_of_its_own(placed):
    trained(placed)

    def own():
        return [float(loss) for loss in ordinary_loop(*trained(placed), numbers(2))]

    torch.manual_seed(0)
    expected = own()
    torch.manual_seed(0)
    assert forked(own) == str(expected)


class Looking(Dataset):
    """Looks at the model in the worker's process, as a data set with an embedding does."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return self.model.layers[number].up.weight.detach().sum() + self.model.out.bias.sum().detach()


@PLACED
def test_the_workers_of_a_data_loader_look_on(placed):
    model, optimizer = trained(placed)
    optimizer.wait()
    found = torch.cat(list(DataLoader(Looking(model), num_workers=2, multiprocessing_context="fork")))
    assert torch.equal(found, torch.stack([Looking(model)[number] for number in range(4)]))
    ordinary_loop(model, optimizer, numbers(1))
