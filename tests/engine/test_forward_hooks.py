"""Hooks of the user's inside of layers: gradients are the plain model's, whatever a hook changes without a return."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import stronghold
from stronghold.engine.traces import Attributes, Trace
from tests.small import assert_close


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("amax", torch.ones(1, 1))
        self.plain, self.scales, self.options = torch.ones(1, 1), [1.0], {"scale": 1.0}

    def forward(self, *, x: Tensor, scale: float = 1.0, nested: Any = None) -> Tensor:
        scale = scale * nested["scales"][0] * self.scales[0] * self.options["scale"]
        return torch.tanh(self.linear(x) / (self.amax * self.plain)) * scale


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.dropout = Inner(), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.out(self.inner(x=x, nested={"scales": [1.0]})))


class Model(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.into, self.layers = nn.Linear(8, 8), nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_like_plain(register: Callable[[nn.Module], Any], kind: Callable[[], nn.Module] = Layer) -> None:
    torch.manual_seed(0)
    plain, x = Model(kind), 3 * torch.randn(3, 8)
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        register(model)
    stronghold.offload(ours, window=2, device="cpu")
    for _ in range(2):
        assert_close(gradients(ours, x), gradients(plain, x))


def _largest(x: Tensor) -> Tensor:
    return x.detach().abs().amax().view(1, 1)


def _on_inner(change: Callable[[Inner, dict[str, Any]], Any]) -> Callable[[nn.Module], None]:
    def hook(module: Inner, args: Any, kwargs: dict[str, Any]) -> None:
        change(module, kwargs)

    def register(model: nn.Module) -> None:
        for layer in model.layers:
            layer.inner.register_forward_pre_hook(hook, with_kwargs=True)

    return register


@pytest.mark.parametrize(
    "change",
    [
        lambda m, kwargs: kwargs.update(x=kwargs["x"] * 2),
        lambda m, kwargs: kwargs.update(scale=0.5),
        lambda m, kwargs: kwargs["nested"]["scales"].__setitem__(0, 0.5),
        lambda m, kwargs: setattr(m, "amax", _largest(kwargs["x"])),
        lambda m, kwargs: m.amax.copy_(_largest(kwargs["x"])),
        lambda m, kwargs: m.amax.data.copy_(_largest(kwargs["x"])),
        lambda m, kwargs: m.plain.copy_(_largest(kwargs["x"])),
        lambda m, kwargs: m.scales.__setitem__(0, _largest(kwargs["x"])),
        lambda m, kwargs: m.options.update(scale=_largest(kwargs["x"])),
        lambda m, kwargs: torch.randperm(3),
    ],
    ids=["tensor", "number", "nested", "assigned", "written", "by .data", "attribute", "list", "dict", "draws"],
)
def test_a_hook_that_returns_nothing_and_changes_something_runs_again(change):
    assert_like_plain(_on_inner(change))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, value: setattr(layer.inner, "amax", value),
        lambda layer, value: layer.inner.amax.copy_(value),
        lambda layer, value: setattr(layer.inner, "plain", value),
        lambda layer, value: layer.inner.plain.copy_(value),
        lambda layer, value: setattr(layer.inner, "more", value),
        lambda layer, value: (vars(layer.inner).pop("fewer", None), setattr(layer.inner, "more", value)),
        lambda layer, value: layer.inner.register_buffer("more", value),
        lambda layer, value: layer.dropout.eval(),
    ],
    ids=["buffer", "written", "attribute", "written attribute", "added", "in another's place", "added buffer", "eval"],
)
def test_a_hook_that_changes_another_module_of_its_layer_runs_again(change):
    class Writer:
        def __init__(self, layer: nn.Module) -> None:
            self.layer = layer

        def write(self, module: nn.Module, args: Any, output: Tensor) -> None:
            change(self.layer, _largest(output))

    class Again(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.fewer = 1.0

        def forward(self, **given: Any) -> Tensor:
            more = vars(self).pop("more", self._buffers.pop("more", torch.ones(1, 1)))
            self.fewer = 1.0  # in each run anew
            return super().forward(**given) / more

    class Twice(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Again()

        def forward(self, x: Tensor) -> Tensor:
            self.dropout.train()
            return super().forward(x + self.out(x))

    def register(model: nn.Module) -> None:
        for layer in model.layers:
            layer.out.register_forward_hook(Writer(layer).write)

    assert_like_plain(register, Twice)


def test_a_look_at_a_layer_of_many_modules_takes_little_longer_than_at_one_of_few():
    """384 hooks in a layer with 128 experts had seconds of the launching thread."""

    def seconds(count: int) -> float:
        layer = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
        attributes, arguments = Attributes(layer.modules()), ((torch.zeros(1, 2),),)

        def once() -> float:
            before = time.thread_time()
            first = Trace(layer[0], arguments, attributes)
            assert not Trace(layer[0], arguments, attributes).differs(first)
            return time.thread_time() - before

        return min(once() for _ in range(30))

    assert any(seconds(514) < 12 * seconds(1) for _ in range(5))  # 5 times; as much as each has is 22 to 60 times


def test_a_look_at_tensors_on_a_device_neither_copies_them_nor_waits_for_them():
    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(isinstance(value, Tensor) and value.is_meta for value in args):
                operators.append(operator)
            return operator(*args, **(kwargs or {}))

    operators = list[Any]()
    norm = nn.BatchNorm1d(2, device="meta")
    norm.cache = torch.zeros(3, 4, device="meta")
    attributes = Attributes([norm])
    with Noted():
        before = Trace(norm, (), attributes)
        assert not Trace(norm, (), attributes).differs(before)
        assert not operators
        norm.running_mean.add_(1)
        assert Trace(norm, (), attributes).differs(before)


KEPT: dict[str, Tensor] = {}


def keep_globally(module: nn.Module, args: Any) -> None:
    KEPT["x"] = args[0]


def add_globally(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * torch.sin(KEPT["x"])


class Steering:
    def keep(self, module: nn.Module, args: Any) -> None:
        self.x = args[0]

    def add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * torch.sin(self.x)


def _by_closure() -> tuple[Callable, Callable]:
    kept = None

    def keep(module: nn.Module, args: Any) -> None:
        nonlocal kept
        kept = args[0]

    return keep, lambda module, args, output: output * torch.sin(kept)


def _by_self() -> tuple[Callable, Callable]:
    steering = Steering()
    return steering.keep, steering.add


@pytest.mark.parametrize("pair", [_by_self, _by_closure, lambda: (keep_globally, add_globally)])
def test_a_hook_that_stores_for_one_that_changes_runs_again_with_it(pair):
    def register(model: nn.Module) -> None:
        keep, add = pair()
        for layer in model.layers:
            layer.inner.linear.register_forward_pre_hook(keep)
            layer.out.register_forward_hook(add)

    assert_like_plain(register)


@pytest.mark.parametrize("settings", [{}, {"window": 1}, {"resident": 2}, {"activations": "host"}, {"activations": 2}])
@pytest.mark.parametrize("where", ["inner", "inner.linear", "out", "dropout"])
@pytest.mark.parametrize(
    "term",
    [
        lambda module, out: out.pow(2).mean(),
        lambda module, out: (out * out.std()).tanh().sum(),
        lambda module, out: sum(p.pow(2).sum() for p in module.parameters()) + out.sigmoid().sum(),
    ],
    ids=["activations", "several", "weights"],
)
def test_what_a_hook_computes_of_what_it_saw_has_the_plain_models_gradients(term, where, settings):
    """A hook that only looks may have autograd save something: to log a norm, or for a penalty."""
    torch.manual_seed(0)
    plain, x = Model(), 3 * torch.randn(3, 8)
    ours, found = copy.deepcopy(plain), [[], []]
    for model, seen in zip((plain, ours), found, strict=True):
        for layer in model.layers:
            layer.get_submodule(where).register_forward_hook(
                lambda module, args, out, seen=seen: seen.append(term(module, out))
            )
    stronghold.offload(ours, device="cpu", **{"window": 2} | settings)
    for with_terms in (False, True):
        for model, seen in zip((plain, ours), found, strict=True):
            model.zero_grad()
            seen.clear()
            torch.manual_seed(1)
            loss = model(x)
            (loss + sum(seen) if with_terms else loss).backward()
        assert len(found[1]) == len(plain.layers)
        torch.testing.assert_close(found[1], found[0])
        for (name, ours_), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours_.grad, theirs.grad, msg=name)


class Checkpointed(nn.Module):
    """Has a checkpoint of its own, which counts what is saved in it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def _within(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(torch.tanh(self.inner(x)))).sin()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._within, x, use_reentrant=False)


@pytest.mark.parametrize("change", [lambda out: (out.exp(), None)[1], lambda out: out.exp()], ids=["looks", "changes"])
def test_what_a_hook_saves_in_a_checkpoint_of_the_layers_own_counts_there(change):
    def register(model: nn.Module) -> None:
        for layer in model.layers:
            layer.inner.register_forward_hook(lambda module, args, out: change(out))

    assert_like_plain(register, Checkpointed)
