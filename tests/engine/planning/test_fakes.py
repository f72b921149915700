"""Tensors without memory of our own mode beside PyTorch's: every operator of many models, and what planning finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stronghold.engine.find_layers import find_layers
from stronghold.engine.planning.computation import ModelComputation
from stronghold.engine.planning.even_routing import routed_evenly
from stronghold.engine.planning.fakes import Fakes, one_sequence_each
from stronghold.engine.planning.layer_traces import LayerTraces
from tests.engine.test_diffusers import MODELS as DIFFUSERS
from tests.engine.test_families import FAMILIES
from tests.reference import CASES

Built = Callable[[], tuple[nn.Module, dict[str, Any]]]


class Seen(TorchDispatchMode):
    """Notes of each operator what its tensors are like, and which of all that there were have their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._storages: dict[int, int] = {}
        self._held: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, [self._like(one) for one in tree_leaves((args, kwargs, found))]))
        return found

    def _like(self, one: Any) -> Any:
        if not isinstance(one, Tensor):
            return str(one)
        self._held.append(one)
        storage = self._storages.setdefault(one.untyped_storage()._cdata, len(self._storages))
        return one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, storage


def of_family(name: str) -> Built:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return lambda: (FAMILIES[name](), {"input_ids": ids, "labels": ids})


def of_case(name: str) -> Built:
    return lambda: (CASES[name].model(), dict(next(iter(CASES[name].batches(1)))))


def of_diffusers(name: str) -> Built:
    def built() -> tuple[nn.Module, dict[str, Any]]:
        return DIFFUSERS[name][0](), DIFFUSERS[name][1](torch.Generator(), torch.float32)

    return built


BUILT: dict[str, Built] = {
    **{name: of_family(name) for name in FAMILIES},
    **{name: of_case(name) for name in CASES},
    **{name: of_diffusers(name) for name in DIFFUSERS},
}
EACH_TIME = ("gpt", "gpt2", "gemma3", "mixtral", "resnet")


def loss_of(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    numbers = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]
    return numbers[0].float().square().mean()


@contextmanager
def without_memory(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    for module in model.modules():
        for names in (module._parameters, module._buffers):
            names.update((name, mode.from_tensor(one)) for name, one in names.items() if one is not None)
    yield


def calls_of(built: Built, mode: FakeTensorMode, dtype: torch.dtype) -> list[Any]:
    """Returns the operators of two forward and backward passes, of which the second finds what the first has left."""
    torch.manual_seed(0)
    model, inputs = built()
    model.to(dtype).train()
    inputs = {
        name: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one
        for name, one in inputs.items()
    }
    given = {name: mode.from_tensor(one) if isinstance(one, Tensor) else one for name, one in inputs.items()}
    with without_memory(model, mode), routed_evenly(model), mode, Seen() as seen:
        for _ in range(2):
            loss_of(model(**given)).backward()
    return seen.calls


@pytest.mark.parametrize(
    "name", [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.long) for name in BUILT]
)
def test_each_operator_gives_what_pytorch_s_mode_gives(name: str) -> None:
    dtype = torch.bfloat16 if len(name) % 2 else torch.float32
    with one_sequence_each():
        expected = calls_of(BUILT[name], FakeTensorMode(allow_non_fake_inputs=True), dtype)
    mode = Fakes()
    found = calls_of(BUILT[name], mode, dtype)
    assert len(found) == len(expected) > 100
    for one, other in zip(found, expected, strict=True):
        assert one == other
    assert sum(mode._direct.values()) > 10  # it did ask kernels itself


@pytest.mark.parametrize("name", ["gpt", "gemma3", pytest.param("flux", marks=pytest.mark.long)])
def test_a_plan_rests_on_the_same_operators_and_bytes(name: str) -> None:
    found = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), Fakes()):
        model, inputs = BUILT[name]()
        layers = [layer.module for layer in find_layers(model)]
        traces = LayerTraces(mode=mode)  # type: ignore[arg-type]
        with one_sequence_each():
            computation = ModelComputation(model, layers, inputs, traces=traces)
        runs = [asdict(computation.layer(n, samples)) for n in range(len(layers)) for samples in (None, 1)]
        passes = [
            asdict(computation.passes(n, samples, kept=kept))
            for n in range(len(layers))
            for samples in (None, 1)
            for kept in (False, True)
        ]
        root = vars(computation.root)
        root["used_first"] = len(root["used_first"])
        found.append((runs, passes, root))
    assert found[1] == found[0]
