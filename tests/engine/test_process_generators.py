"""Layers that draw from Python's or NumPy's generator of the process: as in plain PyTorch, and so does the loop."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.engine import process_generators
from stronghold.engine.process_generators import process_marks, process_states, put_back

WIDTH, LAYERS, STEPS = 8, 4, 3

DRAWS: dict[str, Callable[[], float]] = {
    "random.random": lambda: random.random(),
    "random.gauss": lambda: random.gauss(0, 1),  # which has a second number in store
    "random.getrandbits": lambda: random.getrandbits(1) + 0.5,
    "numpy.random.rand": lambda: float(np.random.rand()),
    "numpy.random.randn": lambda: float(np.random.randn()),
    "numpy.random.randint": lambda: np.random.randint(5) / 5,
}


class Drawing(nn.Module):
    """A block that scales what it adds by a number that it draws."""

    def __init__(self, draw: Callable[[], float], seed: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.draw, self.seed = draw, seed

    def forward(self, x: Tensor) -> Tensor:
        if self.seed is not None:  # as layers of BigBird do
            random.seed(self.seed)
            np.random.seed(self.seed)
        added = self.linear(x)
        return x + torch.tanh(self.draw() * added)


def stack(draw: Callable[[], float], *, seeded: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Drawing(draw, seed=number if seeded else None) for number in range(LAYERS)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[], object]) -> list:
    """Returns losses, weights, and what the loop itself draws between its steps."""
    random.seed(1)
    np.random.seed(1)
    found: list = []
    for _ in range(STEPS):
        before()
        x = torch.tensor(np.random.randn(3, WIDTH), dtype=torch.float32) * random.random()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), random.random(), np.random.rand()]
    return found + [p.detach().tolist() for p in model.parameters()]


@pytest.fixture(params=["in memory", "states"])
def _marks(request, monkeypatch):
    """By the generators' memory, and as where that does not show all."""
    assert process_generators._memory_shows_draws()
    monkeypatch.setattr(process_generators, "_memory_shows_draws", lambda: request.param == "in memory")
    monkeypatch.setattr(process_generators, "_newest", None)


@pytest.fixture(params=["alone", "beside another thread"])
def _threads(request, monkeypatch):
    this = [threading.current_thread()]
    others = [threading.Thread()] if request.param == "beside another thread" else []
    monkeypatch.setattr(process_generators.threading, "enumerate", lambda: this + others)


@pytest.mark.usefixtures("_marks", "_threads")
@pytest.mark.parametrize("activations", ["recompute", "host", "keep"])
@pytest.mark.parametrize("seeded", [False, True], ids=["", "seeded"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_layer_draws_the_same_again_and_the_loop_what_it_would_have(draw, seeded, activations):
    plain = stack(draw, seeded=seeded)
    model = stronghold.offload(copy.deepcopy(plain), device="cpu", window=1, activations=activations)
    # Without normal numbers in store when a step begins, and with them.
    for before in (lambda: None, lambda: (random.gauss(0, 1), np.random.randn())):
        expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1), before)
        assert trained(model, torch.optim.SGD(model.parameters(), lr=0.1), before) == expected


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("draw", [DRAWS["random.random"], DRAWS["numpy.random.rand"]], ids=["python", "numpy"])
def test_so_it_does_behind_a_hook_that_draws(draw):
    """The hook is of a module within the layer; what the layer draws behind it is the same in its second run."""
    plain = stack(draw)
    model = copy.deepcopy(plain)
    for one in (plain, model):
        for layer in one:
            layer.linear.register_forward_hook(lambda *_: draw() and None)
    stronghold.offload(model, device="cpu", window=1)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1), lambda: None)
    assert trained(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None) == expected


def test_layers_that_draw_nothing_leave_what_another_thread_draws_meanwhile():
    """Such as one that loads batches: it would draw the same again."""
    drawn = []
    with ThreadPoolExecutor(1) as loader:

        def draw() -> float:  # which a layer calls in both of its runs
            drawn.append(loader.submit(lambda: (random.random(), np.random.rand())).result())
            return 0.5

        draw()
        model = stronghold.offload(stack(draw), device="cpu", window=1)
        random.seed(0), np.random.seed(0)
        drawn.clear()
        model(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
        draw()
    random.seed(0), np.random.seed(0)
    assert drawn == [(random.random(), np.random.rand()) for _ in range(2 * LAYERS + 1)]


def test_functions_of_the_modules_are_their_own_again():
    functions = random.random, random.seed, np.random.rand, np.random.seed
    model = stronghold.offload(stack(DRAWS["random.random"]), device="cpu", window=1)
    with ThreadPoolExecutor(1) as other:
        other.submit(int).result()
        model(torch.randn(3, WIDTH)).sum().backward()
    assert (random.random, random.seed, np.random.rand, np.random.seed) == functions


@pytest.mark.usefixtures("_marks")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_marks_are_others_after_each_draw(draw):
    found = [process_marks()]
    for _ in range(5):
        draw()
        found.append(process_marks())
        assert found[-1] not in found[:-1]
    states, expected = process_states(), [draw() for _ in range(3)]
    put_back(states)
    assert process_marks() == states.marks
    assert [draw() for _ in range(3)] == expected


def test_other_bits_of_numpy_are_put_back():
    kept = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        states, expected = process_states(), (np.random.randn(), np.random.randn())
        put_back(states)
        assert (np.random.randn(), np.random.randn()) == expected
    finally:
        np.random.set_bit_generator(kept)
