"""``backward(inputs=…)`` and ``torch.autograd.grad``, where each run of a layer has accumulators of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

import stronghold
from stronghold.errors import OffloadedModelError
from tests.engine.test_parts import MODELS, Giving, gradients_of, renewed  # noqa: F401  (a fixture)
from tests.small import Residual, assert_close, follow, numbers, pair

pytestmark = pytest.mark.usefixtures("renewed")

MODELS = {"residual": Residual, **MODELS}


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("model", list(MODELS))
def test_they_are_those_of_plain_pytorch(model, update, activations):
    def loop(model, optimizer, batches):
        seen, parameters = [], list(model.parameters())
        for batch in batches:
            x = batch.clone().requires_grad_()
            asked = [parameters[5], x, *parameters, parameters[2]]
            seen.append([g.clone() for g in torch.autograd.grad(model(x), asked)])
            assert all(p.grad is None for p in parameters)
            model(x).backward(inputs=[x, parameters[3]])
            seen.append(x.grad.clone())
            if update == "deferred":  # in_backward has used it up
                seen.append(parameters[3].grad.clone())
            optimizer.step()
            optimizer.zero_grad()
            model(batch).backward(inputs=parameters)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    follow(MODELS[model], numbers(2), loop, activations=activations, ours_only={"update": update})


@pytest.mark.parametrize("model", ["residual", "looped", "siamese"])
def test_hooks_hear_of_the_whole_gradient_once(model):
    def passes(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        weight, other = model.layers[1].up.weight, model.layers[2].up.weight
        weight.register_hook(lambda g: seen.append(g.clone()) or g.clamp(-0.01, 0.01))
        other.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for batch in numbers(2):
            torch.manual_seed(3)
            model.zero_grad()
            seen += torch.autograd.grad(model(batch), [weight, other])
            model(batch).backward(inputs=[other, weight])
            seen += [weight.grad.clone(), other.grad.clone()]
        return seen

    expected, got = map(passes, pair(MODELS[model]))
    assert_close(got, expected)


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("between", [True, False])
def test_a_penalty_on_the_weights_is_in_them(first, between):
    def passes(model: nn.Module) -> list[Tensor]:
        seen, parameters = [], list(model.parameters())
        for batch in numbers(2):
            for asked in (torch.autograd.grad, lambda loss, p: loss.backward(inputs=p) or [q.grad.clone() for q in p]):
                torch.manual_seed(3)
                term = penalty(model) if first else None
                if between:
                    with torch.no_grad():
                        model(batch)
                loss = model(batch)
                seen += asked(loss + (penalty(model) if term is None else term), parameters)
                seen += torch.autograd.grad(penalty(model), parameters)
        return seen

    expected, got = map(passes, pair(Residual))
    assert_close(got, expected)


def test_an_edge_stands_for_its_parameter():
    def passes(model: nn.Module) -> list[Tensor]:
        edge = get_gradient_edge(model.layers[1].up.weight)
        torch.manual_seed(3)
        (gradient,) = torch.autograd.grad(model(numbers(1)[0]), [edge])
        return [gradient]

    expected, got = map(passes, pair(Residual))
    assert_close(got, expected)


def test_what_torch_refuses_is_refused_as_it_does():
    def refusals(model: nn.Module) -> list[str]:
        batch, (used, unused) = numbers(1)[0], (model.layers[0].up.weight, model.layers[3].up.weight)
        said = []

        def early() -> Tensor:
            return model.layers[0](model.into(batch)).sum()

        assert torch.autograd.grad(early(), [used, unused], allow_unused=True)[1] is None
        zeros = torch.autograd.grad(early(), [used, unused], materialize_grads=True)[1]
        assert_close(zeros, torch.zeros_like(unused))
        for parameters in ([used, unused], [used, model.layers[1].up.weight.requires_grad_(False)]):
            with pytest.raises(RuntimeError) as error:
                torch.autograd.grad(early(), parameters)
            said.append(str(error.value))
        early().backward(inputs=[used, unused])
        assert unused.grad is None
        return said

    expected, got = map(refusals, pair(Residual))
    assert got == expected


def clamp(weight: nn.Parameter) -> RemovableHandle:
    return weight.register_hook(lambda g: g.clamp(-0.05, 0.05))


def listen(weight: nn.Parameter) -> RemovableHandle:
    def double(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(2)

    return weight.register_post_accumulate_grad_hook(double)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("hook", [clamp, listen])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_hook_that_would_hear_of_a_part_is_refused(first, hook: Callable[[nn.Parameter], RemovableHandle], update):
    """A penalty on weights, beside the loss, reaches them by accumulators of their own."""
    plain, ours = pair(Residual)
    optimizer = stronghold.AdamW(ours.parameters(), update=update)
    batch = numbers(1)[0]
    handle = hook(ours.layers[1].up.weight)
    term = penalty(ours) if first else None
    loss = ours(batch)
    with pytest.raises(OffloadedModelError, match=r"parameters? outside of (its|the) layer as well"):
        (loss + (penalty(ours) if term is None else term)).backward()
    del loss, term
    optimizer.zero_grad()
    if update == "in_backward":
        return
    handle.remove()
    for way in ("without the hook", "without the term"):  # as the message says
        for model in (plain, ours):
            model.zero_grad()
            torch.manual_seed(3)
            alone = model is ours and way == "without the term"
            (model(batch) if alone else model(batch) + penalty(model)).backward()
            if alone:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.grad.add_(parameter, alpha=0.2)
        assert_close(gradients_of(ours), gradients_of(plain))


@pytest.mark.parametrize("layer", [0, 1])
def test_a_penalty_alone_behind_a_pass(layer):
    """Its gradients come when no layer is open, the first ones to that which was open last."""
    plain, ours = pair(Residual)
    for model in (plain, ours):
        for batch in numbers(2):
            torch.manual_seed(3)
            model(batch).backward()
            penalty(model.layers[layer]).backward()
    assert_close(gradients_of(ours), gradients_of(plain))


class Rarely(nn.Module):
    """A layer whose second run gives its weight no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Giving() for _ in range(2))

    def forward(self, x: Tensor, gives: tuple[bool, bool]) -> Tensor:
        for give in gives:
            for layer in self.layers:
                x = layer(x, give)
        return x.square().mean()


@pytest.mark.parametrize("gives", [(True, False), (False, True)])
def test_a_function_may_give_no_gradient_in_a_run(gives):
    plain, ours = pair(Rarely)
    batch = numbers(1)[0]
    expected = torch.autograd.grad(plain(batch, gives), list(plain.parameters()))
    with pytest.raises(RuntimeError, match=r"return zeros instead of None|not have been used in the graph"):
        torch.autograd.grad(ours(batch, gives), list(ours.parameters()))
    ours(batch, gives).backward(inputs=list(ours.parameters()))
    assert_close([p.grad for p in ours.parameters()], list(expected))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("writes", ["torch's optimizer", "the user"])
def test_a_penalty_before_the_pass_is_on_the_weights_that_were_written(writes, activations, window):
    """Its gradients open layers that no forward pass has looked at since; the slots hold what was there before."""

    def passes(model: nn.Module) -> list[Tensor]:
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in numbers(3):
            torch.manual_seed(3)
            penalty(model).backward()
            seen += [p.grad.clone() for p in model.parameters()]
            (batch_loss := model(batch)).backward()
            seen += [batch_loss.detach(), *(p.grad.clone() for p in model.parameters())]
            if writes == "the user":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.9)
            else:
                optimizer.step()
            optimizer.zero_grad()
        return seen

    expected, got = map(passes, pair(Residual, window=window, activations=activations))
    assert_close(got, expected)
